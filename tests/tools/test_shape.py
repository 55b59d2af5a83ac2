"""`make shape`: lines, and cycles of imports, of which none may be new."""

from __future__ import annotations

from pathlib import Path

import pytest
import shape
from shape import KNOWN, ROOT, cycles, known, lines, listed, sources


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A root of packages without a cycle: a folder of `pod`, linked as ours are, and another."""
    for name, text in {
        "low/__init__.py": "",
        "low/types.py": "class Type:\n    pass\n",
        "high/__init__.py": "",
        "high/server.py": "from pod.low.types import Type\nfrom pod.high import names\n",
        "high/names.py": "import os\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    package = tmp_path / "src" / "pod"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for folder in ("low", "high"):
        (package / folder).symlink_to(tmp_path / folder)
    return tmp_path / "src"


def test_the_product_has_no_cycle_that_is_not_listed() -> None:
    found = cycles(sources(ROOT / "src"))
    listed_ones = known(KNOWN.read_text())
    assert {(level, edge) for level, edges in found.items() for edge in edges} <= listed_ones
    assert not [level for level, _ in listed_ones if level == "packages"]


def test_a_tree_without_cycles_has_none(made_up: Path) -> None:
    assert cycles(sources(made_up)) == {"packages": [], "folders": [], "modules": []}


def test_a_cycle_is_found_on_every_level_even_for_types_alone(made_up: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pod.high import server\n"
    (made_up / "pod/low/types.py").write_text(text)
    assert cycles(sources(made_up)) == {
        "packages": [("high", "low"), ("low", "high")],
        "folders": [("high", "low"), ("low", "high")],
        "modules": [("high/server", "low/types"), ("low/types", "high/server")],
    }


def test_a_cycle_between_modules_of_a_folder_is_one_of_modules_alone(made_up: Path) -> None:
    (made_up / "pod/high/names.py").write_text("def f():\n    import pod.high.server\n")
    found = cycles(sources(made_up))
    assert found["modules"] == [("high/names", "high/server"), ("high/server", "high/names")]
    assert not found["folders"]


def test_a_new_cycle_fails_and_one_that_is_gone_leaves_the_list(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    listing = tmp_path / "cycles.txt"
    old = {("modules", ("high/a", "high/b")), ("modules", ("high/b", "high/a"))}
    listing.write_text(listed(old))
    monkeypatch.setattr(shape, "ROOT", tmp_path)
    monkeypatch.setattr(shape, "KNOWN", listing)
    monkeypatch.setattr("sys.argv", ["shape.py"])
    assert shape.main() == 0
    (made_up / "pod/high/names.py").write_text("import pod.high.server\n")
    assert shape.main() == 1
    assert "modules: high/names -> high/server" in capsys.readouterr().err
    (made_up / "pod/high/names.py").write_text("")
    monkeypatch.setattr("sys.argv", ["shape.py", "--shrink"])
    assert shape.main() == 0
    assert listing.read_text() == ""


def test_lines_are_counted_by_package(made_up: Path) -> None:
    assert lines(sources(made_up)) == {"low": 2, "high": 3, "pod": 0}
