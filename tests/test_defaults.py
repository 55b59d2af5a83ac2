"""A default has one value: docs and signatures that repeat a setting's say what the table says.

docs/settings.md is written from the table. Elsewhere docs write a flag and its default as
`--flag` (40 s), and a choice as `exact` (default).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from tokenpod.service.config.sources import ServerSettings

ROOT = Path(__file__).parents[1]
#: These tell other servers' defaults too.
OTHERS = ("coming-from-tgi.md", "coming-from-vllm.md", "settings.md")
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in OTHERS]
UNITS = {"": 1, "s": 1, "ms": 1e-3, "MiB": 2**20, "GiB": 2**30, "KiB": 2**10, "tokens": 1}
TOLD = re.compile(r"`--([a-z-]+)` \((\d[\d.,]*) ?([A-Za-z]*)[,;)]")
CHOSEN = re.compile(r"`([a-z_0-9]+)` \(default\)")
FIELDS = ServerSettings.model_fields


def default_of(name: str) -> Any:
    """A setting's default, or what it comes to where nothing is set."""
    value = FIELDS[name].default
    if value is None and hasattr(ServerSettings, f"resolved_{name}"):
        return getattr(ServerSettings(device="cpu"), f"resolved_{name}")
    return value


def told() -> Iterator[tuple[str, str, float]]:
    """The page, the setting and the default that it tells."""
    for page in PAGES:
        for flag, number, unit in TOLD.findall(page.read_text()):
            name = flag.replace("-", "_")
            if name in FIELDS:
                yield page.name, name, float(number.replace(",", "")) * UNITS[unit]


def test_docs_tell_the_numbers_of_the_table() -> None:
    wrong = [(page, name, value) for page, name, value in told() if default_of(name) != value]
    assert wrong == []


def test_docs_tell_enough_defaults_for_this_to_be_a_test() -> None:
    assert len(list(told())) >= 6


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_docs_call_the_choices_of_the_table_default(page: Path) -> None:
    for value in CHOSEN.findall(page.read_text()):
        having = [name for name, field in FIELDS.items() if value in get_args(field.annotation)]
        assert having, f"{value} is no value of a setting"
        assert any(default_of(name) == value for name in having), value


def test_signatures_repeat_the_defaults_of_the_table_or_none() -> None:
    wrong = []
    for path in sorted((ROOT / "service").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            own = [*node.args.posonlyargs, *node.args.args]
            pairs = zip(own[len(own) - len(node.args.defaults) :], node.args.defaults, strict=True)
            more = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            for argument, default in (*pairs, *more):
                if argument.arg not in FIELDS or not isinstance(default, ast.Constant):
                    continue
                # None, 0 and "" stand for "there is none", where a part is used by itself.
                if default.value and default.value != default_of(argument.arg):
                    wrong.append(f"{path.name}: {argument.arg} is {default.value!r}")
    assert wrong == []
