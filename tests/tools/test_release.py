"""One version for all that is released, and wheels that need no environment of development."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from release_version import PLACES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that name a version, and the tool."""
    for name in (*PLACES, "tools/release_version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(tree: Path, *given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "tools/release_version.py", *given]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def test_everything_names_the_version_of_the_project() -> None:
    done = run(ROOT, "--check")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("new", ["1.2.3", "1.2.3rc4"])
def test_a_new_version_is_written_everywhere(tree: Path, new: str) -> None:
    old = run(tree).stdout.strip()
    assert run(tree, new).stdout == f"{new}\n"
    assert run(tree, "--check").returncode == 0
    for name in PLACES:
        before, after = ((folder / name).read_text() for folder in (ROOT, tree))
        assert after == re.sub(rf"(?<![\d.]){re.escape(old)}\b", new, before)


@pytest.mark.parametrize("name", list(PLACES)[1:])
def test_a_file_that_names_another_version_is_found(tree: Path, name: str) -> None:
    path = tree / name
    path.write_text(path.read_text().replace("0.1.0", "0.1.1"))
    done = run(tree, "--check")
    assert done.returncode == 1
    assert f"{name} names 0.1.1" in done.stderr


def test_what_is_no_version_is_refused(tree: Path) -> None:
    done = run(tree, "next")
    assert done.returncode == 2
    assert "'next' is no version" in done.stderr


@pytest.mark.parametrize("target", ["wheel", "release"])
def test_wheels_are_built_without_the_environment_of_development(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "pip wheel" in done.stdout
    assert "dev.txt" not in done.stdout
