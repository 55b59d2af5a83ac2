"""What `make image` says before it begins, on machines that lack something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CODE = """
import os
os.geteuid = lambda: {uid}
from image.commands import check_needs
check_needs()
"""


def needs(programs: Path, uid: int) -> list[str]:
    """The lines that are said to a user with these programs."""
    ran = subprocess.run(
        [sys.executable, "-c", CODE.format(uid=uid)],
        env={"PATH": str(programs), "PYTHONPATH": str(TOOLS)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == (1 if ran.stderr else 0)
    return ran.stderr.splitlines()


def test_all_that_is_lacking_is_said_at_once(tmp_path: Path) -> None:
    for name in ("buildah", "crun", "debootstrap"):
        assert len(needs(tmp_path, 1000)) == 2
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert needs(tmp_path, 1000) == [
        "make image needs root: it makes a root folder and a container"
    ]
    assert needs(tmp_path, 0) == []


def test_what_to_install_is_said(tmp_path: Path) -> None:
    (tmp_path / "crun").write_text("#!/bin/sh\n")
    (tmp_path / "crun").chmod(0o755)
    (line,) = needs(tmp_path, 0)
    assert line == "make image needs buildah, debootstrap: apt-get install buildah debootstrap"
