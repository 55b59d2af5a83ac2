"""What goes into an image: locks, build context, Dockerfile, bill of materials."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from image import BILL, canonical, check_bill, check_files, compilers, found, size
from packaging.requirements import Requirement

from tokenpod.service.config.sources import ServerSettings
from tokenpod_client.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
IMAGE_LOCKS = ["runtime-cpu", "runtime-cuda", "build", "sbom"]
#: What the locks are for, as markers of requirements see it; tests may run on another Python.
IMAGE = {
    "python_version": "3.11",
    "python_full_version": "3.11.2",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "sys_platform": "linux",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLIENT = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())


def pins(lock: str) -> dict[str, str]:
    """Versions by canonical name."""
    lines = (LOCKS / f"{lock}.txt").read_text().splitlines()
    found = (re.match(r"([\w.-]+)==(\S+)", line) for line in lines)
    return {canonical(match[1]): match[2] for match in found if match}


def wanted(lock: str) -> list[str]:
    project, client = PROJECT["project"], CLIENT["project"]
    extras = project["optional-dependencies"]
    # Both wheels are built in the image; of what the client's needs the server's asks for `bench`.
    ours = [need for need in project["dependencies"] if not need.startswith("tokenpod-client")]
    ours += [*client["dependencies"], *client["optional-dependencies"]["bench"]]
    runtime = [*ours, *extras["s3"], *extras["vllm"]]
    return {
        "runtime-cpu": runtime,
        "runtime-cuda": [*runtime, *extras["gpu"]],
        "build": [*PROJECT["build-system"]["requires"], *CLIENT["build-system"]["requires"]],
        "sbom": ["cyclonedx-bom"],
    }[lock]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, in order: name and arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def last(name: str) -> str:
    return [arguments for each, arguments in instructions() if each == name][-1]


@pytest.mark.parametrize("lock", IMAGE_LOCKS)
def test_every_pin_of_a_lock_has_a_hash(lock: str) -> None:
    entries = re.split(r"\n(?=\w)", (LOCKS / f"{lock}.txt").read_text())[1:]
    assert len(entries) == len(pins(lock))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


@pytest.mark.parametrize("lock", IMAGE_LOCKS)
def test_a_lock_has_the_versions_that_are_tested(lock: str) -> None:
    tested = pins("dev")
    told = {name: version.removesuffix("+cpu") for name, version in pins(lock).items()}
    # CUDA's libraries come with torch's other build alone.
    ours = {name: v for name, v in told.items() if not name.startswith(("nvidia-", "cuda-"))}
    assert ours == {name: tested[name] for name in ours}


def needs(name: str, version: str, extras: set[str]) -> list[Requirement]:
    """What a distribution asks for in an image.

    Torch's builds ask for different things, and either may be installed here: theirs, and those of
    CUDA's libraries, are the `Requires-Dist` lines of their wheels' METADATA in torch_builds.json.
    """
    builds = json.loads((ROOT / "tests/torch_builds.json").read_text())
    if name.startswith(("torch", "nvidia-", "cuda-")):
        texts = builds[f"{name}=={version}"]
    else:
        texts = requires(name) or ()
    found = [Requirement(text) for text in texts]
    asked = [{**IMAGE, "extra": extra} for extra in ("", *extras)]
    return [n for n in found if n.marker is None or any(map(n.marker.evaluate, asked))]


@pytest.mark.parametrize("lock", IMAGE_LOCKS)
def test_a_lock_is_closed(lock: str) -> None:
    locked = pins(lock)
    todo = [("pyproject.toml", Requirement(text)) for text in wanted(lock)]
    seen = set()
    while todo:
        who, need = todo.pop()
        name = canonical(need.name)
        assert name in locked, f"{who} needs {need}"
        assert need.specifier.contains(locked[name], prereleases=True), f"{who} needs {need}"
        if (name, *sorted(need.extras)) not in seen:
            seen.add((name, *sorted(need.extras)))
            todo += [(name, each) for each in needs(name, locked[name], need.extras)]
    assert {name for name, *_ in seen} == set(locked)


def test_only_one_variant_has_cuda() -> None:
    cpu, cuda = pins("runtime-cpu"), pins("runtime-cuda")
    assert cpu["torch"].endswith("+cpu")
    assert cuda["torch"] == cpu["torch"].removesuffix("+cpu")
    assert "triton" in cuda
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_the_build_context_has_every_folder_of_the_wheels() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    linked = {path.resolve() for path in (ROOT / "src").glob("*/*") if path.is_symlink()}
    folders = {str(path.relative_to(ROOT)) for path in linked}
    assert {"service", "models", "protos"} <= folders
    needed = folders | {"src", "client", "pyproject.toml", "README.md", "LICENSE", "requirements"}
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == needed


def test_stubs_of_a_checkout_stay_out_of_the_build_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines.index("**/*_pb2*") > lines.index("!protos")


def test_the_image_runs_as_a_numeric_user_without_privileges() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last("USER"))


def test_the_image_starts_the_server() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["tokenpod"]
    assert json.loads(last("CMD")) == ["serve"]


def test_the_image_exposes_the_servers_ports() -> None:
    fields = ServerSettings.model_fields
    ports = [str(fields[name].default) for name in ("port", "health_port")]
    assert last("EXPOSE").split() == ports


def test_the_health_check_is_a_command_of_ours() -> None:
    shell = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert shell[:2] == ["sh", "-c"]
    words = shlex.split(shell[2])
    assert words[:3] == ["exec", "tokenpod", "health"]
    command = app.get_command(None, "health")
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    port = ServerSettings.model_fields["health_port"].default
    assert words[-1] == f"127.0.0.1:${{TOKENPOD_HEALTH_PORT:-{port}}}"


@pytest.mark.pod
def test_no_compiler_is_installed_but_for_cuda() -> None:
    stage, stages = "", {}
    for name, arguments in instructions():
        if name == "FROM":
            stage = arguments.split()[-1]
        stages.setdefault(stage, []).append(arguments)
    having = [name for name, lines in stages.items() if any(" gcc " in line for line in lines)]
    assert having == ["runtime-cuda"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root folder of an image: with this environment's distributions, and a real bill."""
    root = tmp_path_factory.mktemp("root")
    library = root / "opt/tokenpod/lib/python3.11"
    library.mkdir(parents=True)
    (library / "site-packages").symlink_to(sysconfig.get_path("purelib"))
    cyclonedx = Path(sys.executable).with_name("cyclonedx-py")
    # An image's build validates it against the format's schema, which takes its time.
    options = ["--no-validate", "--output-format", "JSON", "--output-file", root / BILL]
    subprocess.run([cyclonedx, "environment", *options, sys.executable], check=True)
    return root


@pytest.mark.pod
def test_the_bill_of_materials_is_complete(root: Path) -> None:
    there = {canonical(each.name) for each in found(root)}
    assert {"torch", "grpcio", "tokenpod", "numpy"} <= there
    assert check_bill(root) == len(there)


@pytest.mark.pod
def test_a_bill_that_lacks_something_is_refused(root: Path, tmp_path: Path) -> None:
    bill = json.loads((root / BILL).read_text())
    bill["components"] = [each for each in bill["components"] if each["name"] != "torch"]
    (tmp_path / "opt/tokenpod").mkdir(parents=True)
    (tmp_path / "opt/tokenpod/lib").symlink_to(root / "opt/tokenpod/lib")
    (tmp_path / BILL).write_text(json.dumps(bill))
    with pytest.raises(SystemExit, match=r"differ: \[\('torch', "):
        check_bill(tmp_path)


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to("a")
    assert size(tmp_path.iterdir()) == 1000


def test_a_file_of_ours_that_is_a_link_or_missing_is_refused(tmp_path: Path) -> None:
    packages = tmp_path / "opt/tokenpod/lib/python3.11/site-packages"
    info = packages / "tokenpod-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenpod\nVersion: 1\n")
    (info / "RECORD").write_text("tokenpod/a.py,,\ntokenpod/tiles.json,,\n")
    (packages / "tokenpod").mkdir()
    (packages / "tokenpod/a.py").touch()
    with pytest.raises(SystemExit, match=r"not there: \['\S+/tokenpod/tiles\.json'\]"):
        check_files(tmp_path)
    (packages / "tokenpod/tiles.json").symlink_to("a.py")
    with pytest.raises(SystemExit, match=r"tiles\.json"):
        check_files(tmp_path)
    (packages / "tokenpod/tiles.json").unlink()
    (packages / "tokenpod/tiles.json").touch()
    assert check_files(tmp_path) == 2


def test_compilers_are_seen(tmp_path: Path) -> None:
    programs = tmp_path / "usr/bin"
    programs.mkdir(parents=True)
    assert compilers(tmp_path) == []
    (programs / "gcc").touch()
    assert compilers(tmp_path) == ["gcc"]
