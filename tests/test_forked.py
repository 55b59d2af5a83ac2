"""Tests that run in forked processes: what becomes of them is reported by the one that forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pod

_CONFTEST = """
from support import forked

def pytest_configure(config):
    config.pluginmanager.register(forked.ForkedRun(config, 2))
"""
_FIRST = """
import os, warnings

def test_says(shared_once, tmp_path):
    print("said by the first")
    warnings.warn("odd")
    assert shared_once

def test_ends_its_process(shared_once):
    os._exit(3)

def test_is_run_by_another(shared_once):
    pass
"""
_SHARES = """
import pytest

@pytest.fixture(scope="session")
def shared_once(tmp_path_factory):
    yield tmp_path_factory.getbasetemp()
"""


def _run(folder: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, "-p", "no:cacheprovider", str(folder)],
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_results_output_and_warnings_of_all_processes_are_reported(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST + _SHARES)
    (tmp_path / "test_first.py").write_text(_FIRST)
    (tmp_path / "test_second.py").write_text("def test_fails():\n    print('words')\n    assert 0")
    said = _run(tmp_path)
    assert "its process ended with status 3" in said
    assert "words" in said
    assert "said by the first" not in said
    assert "UserWarning: odd" in said
    assert "2 failed, 2 passed" in said


def test_none_begins_after_as_many_failures_as_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_a.py").write_text("def test_fails():\n    assert 0\n")
    (tmp_path / "test_b.py").write_text(
        "import time\n"
        "def test_waits():\n    time.sleep(50)\n"
        "def test_late():\n    open('late', 'w')\n"
    )
    assert "stopping after 1 failures" in _run(tmp_path, "-x")
    assert not (tmp_path / "late").exists()
