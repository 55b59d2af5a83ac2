"""Who may import whom: a folder knows those below it, and none knows itself by way of another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Each folder, and what it may import besides itself.
MAY_IMPORT = {
    "protos": set[str](),
    "core": set[str](),
    "scheduler": {"core"},
    "kernels": {"core"},
    "models": {"core", "kernels"},
    "engine": {"protos", "core", "scheduler", "kernels", "models"},
    # It starts the engine as a process, and never imports it.
    "service": {"protos", "core"},
    # The client's package: nothing of the server's.
    "client": {"protos"},
    "cli": {"protos", "client"},
    "commands": {"core", "scheduler", "service", "cli"},
    # The command's entry.
    "tokenpod": {"cli"},
}
#: Our packages, and the folder of what is in none of the others.
OWN = {"tokenpod": "tokenpod", "tokenpod_client": "client"}
#: What a process without a GPU's libraries must be able to import.
WITHOUT_TORCH = ("core", "scheduler", "service", "client", "cli", "commands", "tokenpod")
WITHOUT_PROTOBUF = ("core", "scheduler", "kernels", "models")


def modules(folder: str) -> Iterator[Path]:
    # `make wheel` leaves a copy of the client in client/build.
    found = ((path, path.relative_to(ROOT).parts) for path in (ROOT / folder).rglob("*.py"))
    return (path for path, parts in found if "_pb2" not in path.name and "build" not in parts[:-1])


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module in OWN:
                yield from (f"{node.module}.{name.name}" for name in node.names)


def folder_of(module: str) -> str | None:
    """The folder of one of our modules: `tokenpod.service.config` lies in `service`."""
    package, _, rest = module.partition(".")
    if package not in OWN or not rest:
        return None
    first = rest.partition(".")[0]
    return first if first in MAY_IMPORT else OWN[package]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_those_below_it_alone(folder: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in modules(folder)
        for module in imported(path)
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
        for module in imported(path)
        if module.partition(".")[0] == library
    ]
    assert users == []


def test_every_folder_of_the_product_has_its_place() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"client"}
    assert packages - {"tests", "tools", "benchmarks"} == MAY_IMPORT.keys()
