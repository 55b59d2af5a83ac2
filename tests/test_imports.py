"""Who may import whom: a folder knows those below it, and none knows itself by way of another."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from shape import imported, sources

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
#: Each folder, and what it may import besides itself.
MAY_IMPORT = {
    "protos": set[str](),
    "core": set[str](),
    "scheduler": {"core"},
    "simulator": {"core", "scheduler"},
    "kernels": {"core"},
    "models": {"core", "kernels"},
    "engine": {"protos", "core", "scheduler", "kernels", "models"},
    # It starts the engine as a process, and never imports it.
    "service": {"protos", "core"},
    # The client's own modules: nothing of the server's.
    "tokenpod_client": {"protos"},
    "cli": {"protos", "tokenpod_client"},
    "commands": {"core", "scheduler", "simulator", "service", "cli"},
    # The command's entry.
    "tokenpod": {"cli"},
}
#: Our packages: folders with modules of their own, and links to other folders.
OWN = ("tokenpod", "tokenpod_client")
#: What a process without a GPU's libraries must be able to import.
WITHOUT_TORCH = (
    *("core", "scheduler", "simulator", "service", "tokenpod_client", "cli", "commands"),
    "tokenpod",
)
WITHOUT_PROTOBUF = ("core", "scheduler", "simulator", "kernels", "models")


@functools.cache
def names_imported(path: Path) -> tuple[str, ...]:
    """What a module imports, read once for all tests here."""
    return tuple(imported(path))


def modules(folder: str) -> Iterator[Path]:
    # Links are not followed: each module is found in its own folder.
    start = SRC / folder if folder in OWN else ROOT / folder
    return (path for path in start.rglob("*.py") if "_pb2" not in path.name)


def folder_of(module: str) -> str | None:
    """The folder of one of our modules: `tokenpod.service.config.sources` lies in `service`."""
    package, _, rest = module.partition(".")
    if package not in OWN or not rest:
        return None
    first = rest.partition(".")[0]
    return first if first in MAY_IMPORT else package


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_those_below_it_alone(folder: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in modules(folder)
        for module in names_imported(path)
        if (other := folder_of(module)) and other != folder and other not in MAY_IMPORT[folder]
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("folder", "library"),
    [(folder, "torch") for folder in WITHOUT_TORCH]
    + [(folder, "google") for folder in WITHOUT_PROTOBUF],
)
def test_a_folder_does_without_a_library(folder: str, library: str) -> None:
    users = [
        str(path.relative_to(ROOT))
        for path in modules(folder)
        for module in names_imported(path)
        if module.partition(".")[0] == library
    ]
    assert users == []


def test_every_folder_of_the_product_has_its_place() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} | set(OWN)
    assert packages - {"tests", "tools", "benchmarks"} == MAY_IMPORT.keys()


def test_every_folder_of_the_product_is_linked_once_and_no_module_has_two_names() -> None:
    links = [path.resolve() for package in OWN for path in (SRC / package).iterdir()]
    folders = [path for path in links if path.is_dir() and path.name != "__pycache__"]
    assert sorted(folders) == sorted(ROOT / name for name in MAY_IMPORT if name not in OWN)
    count = Counter(path.resolve() for path in sources(SRC).values())
    assert len(count) > 600
    assert [path for path, names in count.items() if names > 1] == []
