"""What operators' dashboards, scripts and charts call by name stays: flags, metrics, spans.

tests/names.txt lists them; a name that is new, or is gone on purpose, is changed there with the
change itself (`python tests/test_names.py` writes it).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = Path(__file__).with_suffix("").parent / "names.txt"
PRODUCT = ("cli", "commands", "service", "core", "scheduler", "engine", "kernels", "models")
#: Flags, and dotted names of metrics, spans and their attributes.
WANTED = re.compile(r"--[a-z][a-z0-9-]+|(tokenpod|gen_ai|rpc|error|server)\.[a-z0-9_.]+")


def strings() -> Iterator[str]:
    """Every string constant of the product that is no docstring, parts of f-strings too."""
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def settings() -> Iterator[str]:
    """Every setting, as it is called on the command line and in the environment."""
    page = (ROOT / "docs" / "settings.md").read_text()
    yield from re.findall(r"`(--[a-z0-9-]+|TOKENPOD_[A-Z0-9_]+)", page)


def names() -> str:
    """One name to a line."""
    found = {text for text in strings() if WANTED.fullmatch(text)} | set(settings())
    return "".join(f"{name}\n" for name in sorted(found) if not is_module(name))


def is_module(name: str) -> bool:
    """Modules that are started by name are no business of operators."""
    own, _, rest = name.partition(".")
    path = ROOT.joinpath(*rest.split("."))
    ours = own == "tokenpod" and rest.partition(".")[0] in PRODUCT
    return ours and (path.is_dir() or path.with_suffix(".py").is_file())


def test_names_stay() -> None:
    assert names() == NAMES.read_text()


if __name__ == "__main__":
    NAMES.write_text(names())
