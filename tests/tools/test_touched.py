"""CI finds the folders of tests that a change touches, and none where history does not tell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "touched"


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@localhost")
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def commit(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(str(len(list(folder.rglob("*")))))
    git(folder, "add", "--all")
    git(folder, "commit", "--message", "Change")


def touched(folder: Path) -> list[str]:
    done = subprocess.run(
        ["bash", SCRIPT], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """A repository with a test of each of these folders; some are in folders below."""
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "--initial-branch", "main")
    tests = ("cli/test_a", "client/test_a", "engine/gpu/test_a", "server/test_a", "service/test_a")
    commit(folder, *(f"tests/{name}.py" for name in tests), "tests/support/pods/harness.py")
    return folder


@pytest.fixture
def clone(origin: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", f"file://{origin}", "clone")
    return tmp_path / "clone"


def test_a_branch_is_compared_with_where_it_left_main(origin: Path, clone: Path) -> None:
    commit(clone, "engine/loop.py", "tests/support/pods/harness.py")
    commit(clone, "commands/size.py", "README.md")
    commit(origin, "service/server.py")
    git(clone, "fetch")
    assert touched(clone) == ["tests/cli", "tests/engine"]


def test_service_and_the_client_have_tests_under_other_names_too(clone: Path) -> None:
    commit(clone, "service/server.py", "src/tokenpod_client/sync.py")
    assert touched(clone) == ["tests/client", "tests/server", "tests/service"]


def test_main_itself_is_compared_with_its_first_parent(origin: Path, clone: Path) -> None:
    commit(origin, "engine/loop.py")
    git(origin, "checkout", "-b", "branch", "HEAD~1")
    commit(origin, "service/server.py")
    git(origin, "checkout", "main")
    git(origin, "merge", "--no-ff", "branch")
    git(clone, "pull")
    assert touched(clone) == ["tests/server", "tests/service"]


def test_a_shallow_clone_tells_what_its_history_holds(origin: Path, tmp_path: Path) -> None:
    commit(origin, "engine/loop.py")
    for depth, found in ((1, []), (2, ["tests/engine"])):
        git(tmp_path, "clone", "--depth", str(depth), f"file://{origin}", "shallow")
        assert touched(tmp_path / "shallow") == found
        shutil.rmtree(tmp_path / "shallow")


def test_a_repository_with_no_origin_is_compared_with_its_first_parent(origin: Path) -> None:
    assert touched(origin) == []
    commit(origin, "tests/engine/gpu/test_b.py")
    assert touched(origin) == ["tests/engine"]
