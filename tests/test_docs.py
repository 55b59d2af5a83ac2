"""The documentation is true where a machine can tell: flags, code, the embedded example."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tokenpod.service.protocols import TABLE
from tokenpod_client.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("", "benchmarks", "docs", "examples", "models", "tests")
PAGES = sorted(
    page
    for folder in FOLDERS
    for page in (ROOT / folder).glob("**/*.md" if folder else "*.md")
    if "node_modules" not in page.parts
)
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
#: Flags of other programs, and those of TGI that do not exist here.
FOREIGN = {
    *("--master-shard-uds-path", "--shard-uds-path", "--tokenizer-name"),
    *("--disable-grammar-support", "--prometheus-port", "--usage-stats"),
    *("--http2-prior-knowledge", "--protocol"),
    # Of smg.
    *("--host", "--policy", "--worker-urls"),
    # Of docker and pip.
    *("--tag", "--publish", "--gpus", "--volume", "--extra-index-url", "--build-arg", "--file"),
}
COMMANDS = {name: app.get_command(None, name) for name in app.list_commands()}


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def flags_of(command: str) -> set[str]:
    parameters = COMMANDS[command].params
    return {flag for p in parameters for flag in (*p.opts, *p.secondary_opts)}


def test_there_are_pages() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= names
    assert {"docs/architecture.md", "docs/contract.md", "docs/settings.md"} <= names


@EVERY_PAGE
def test_every_fence_is_closed(page: Path) -> None:
    fences = re.findall(r"^```.*$", page.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert all(fence == "```" for fence in fences[1::2])


@EVERY_PAGE
def test_mermaid_pictures_begin_with_their_kind_and_close_their_boxes(page: Path) -> None:
    for picture in blocks(page, "mermaid"):
        lines = [line.strip() for line in picture.splitlines()]
        assert re.match(r"flowchart (LR|TD)$|sequenceDiagram$", lines[0])
        opened = sum(line.startswith(("subgraph ", "loop ")) for line in lines)
        assert opened == lines.count("end")


def test_python_blocks_compile() -> None:
    # The demo model's card shows what the model writes.
    pages = [page for page in PAGES if "demo" not in page.parts]
    found = [code for page in pages for code in blocks(page, "python")]
    for code in found:
        ast.parse(code)
    assert found


def test_commands_in_pages_exist_with_their_flags() -> None:
    seen = 0
    for page in PAGES:
        for body in blocks(page, "sh") + blocks(page, "console"):
            for line in body.splitlines():
                if match := re.match(r"(?:\$ )?tokenpod (\w+)", line):
                    seen += 1
                    assert set(FLAG.findall(line)) <= flags_of(match[1]), line
    assert seen


def test_flags_named_in_pages_exist() -> None:
    known = set().union(*(flags_of(command) for command in COMMANDS))
    pages = ("contract", "architecture", "coming-from-tgi", "operations", "telemetry")
    for name in ("README.md", *(f"docs/{page}.md" for page in pages)):
        assert set(FLAG.findall((ROOT / name).read_text())) - FOREIGN <= known, name
    assert not FOREIGN & known


def test_metrics_and_labels_of_the_runbooks_exist() -> None:
    names = (ROOT / "tests" / "names.txt").read_text().split()
    shown = {name.replace(".", "_") for name in names if not name.startswith("-")}
    suffix = re.compile(r"(_seconds|_bytes|_ratio)?(_total|_count|_sum|_bucket)?$")
    text = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"\b(?:tokenpod|gen_ai|rpc)_[a-z_]+", text))
    assert len(named) > 20
    assert {name for name in named if suffix.sub("", name) not in shown} == set()


def test_make_targets_named_in_contributing_exist() -> None:
    named = set(re.findall(r"`make ([a-z]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    makefile = (ROOT / "Makefile").read_text()
    assert named
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 700


def test_the_guides_are_short() -> None:
    """Without code, and without what is made from it."""
    pages = [page for page in PAGES if page.parent.name == "docs" and page.stem != "settings"]
    texts = [FENCE.sub("", page.read_text()) for page in pages]
    made = re.compile(r"<!-- Written by.*?<!-- End of the list. -->", re.DOTALL)
    words = [word for text in texts for word in made.sub("", text).split()]
    assert sum(any(map(str.isalnum, word)) for word in words) <= 37_000


def test_the_page_of_clients_lists_every_service_that_is_served() -> None:
    (listing,) = (b for b in blocks(ROOT / "docs/clients.md", "console") if " list\n" in b)
    told = listing.partition(" list\n")[2].partition("\n$")[0].splitlines()
    assert told == sorted({row.service for row in TABLE})


def benchmark_cases() -> set[str]:
    folder = ROOT / "benchmarks" / "cases"
    return {path.stem.replace("_", "-") for path in folder.glob("*.py")}


def test_every_benchmark_is_listed() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == benchmark_cases()


@EVERY_PAGE
def test_benchmarks_that_are_named_exist(page: Path) -> None:
    """`benchmarks/run.py CASE`, and files; a script of the past is named with its commit."""
    text = re.sub(r"benchmarks/\w+\.py[^`\n]*` at [0-9a-f]{8}", "", page.read_text())
    for name in re.findall(r"(?<!:)benchmarks/(\w+\.py)", text):
        assert (ROOT / "benchmarks" / name).is_file(), name
    for case in re.findall(r"benchmarks/run\.py ([a-z][\w-]*)", text):
        assert case in benchmark_cases(), case


@EVERY_PAGE
def test_tests_that_are_named_exist(page: Path) -> None:
    """`server/test_load.py::test_name`, below tests/."""
    for file, name in re.findall(r"`(?:tests/)?([\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        if not name and not Path(file).name.startswith("test_"):
            continue
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert not name or re.search(rf"\bdef {name}\(", path.read_text()), f"{file}::{name}"


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = set(LINK.findall((ROOT / "docs/README.md").read_text()))
    there = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert there <= {link.partition("#")[0] for link in listed}
