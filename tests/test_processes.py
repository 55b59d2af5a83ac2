"""`pytest -n N`: what forked processes say of tests, and what is said of those that end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pod

CONFTEST = """
import pytest
from support.processes import Processes

def pytest_configure(config):
    config.pluginmanager.register(Processes(2))

@pytest.fixture(scope="session")
def common():
    yield
    raise ValueError("said at the end")
"""
TESTS = """
import os, signal, warnings

def test_passes(tmp_path):
    warnings.warn("a warning")

def test_is_lost():
    os.kill(os.getpid(), signal.SIGKILL)

def test_fails():
    assert False, "seen"

def test_shares(common):
    pass
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_others.py").write_text("def test_passes(): pass")
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    path = f"pythonpath={Path(__file__).parent}"
    done = subprocess.run(
        [*command, "-o", path, "--rootdir", folder, folder],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_each_test_is_reported_once_though_a_process_is_lost_and_another_goes_on(tmp_path):
    status, said = run(tmp_path)
    assert status == 1
    assert "2 failed, 3 passed, 1 warning, 1 error" in said
    assert "of the tests ended here, with status -9" in said
    assert "AssertionError: seen" in said
    assert "ValueError: said at the end" in said
    assert "UserWarning: a warning" in said


def test_it_stops_at_the_first_failure_if_asked_to(tmp_path):
    status, said = run(tmp_path, "-x", "-k", "fails or shares")
    assert status == 1
    assert "1 failed" in said
    assert "stopping after 1 failures" in said
    assert "test_shares" not in said
