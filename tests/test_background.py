"""The suite passes where a shell runs it in the background, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pod

ROOT = Path(__file__).resolve().parent.parent
#: A shell without a terminal ignores SIGINT for what it runs in the background, as this does.
IGNORING = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]


def test_programs_under_test_take_ctrl_c_when_the_run_itself_ignores_it() -> None:
    pytest = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "120"]
    chosen = "tests/cli/test_cli.py::test_ctrl_c_cancels_the_call"
    done = subprocess.run(
        [*IGNORING, *pytest, chosen], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
