"""The base that `make image` makes, with programs that stand in for those that need root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
#: Refuses what the real one does, and notes where it was sent.
DEBOOTSTRAP = """#!/bin/sh
case "$3" in *" "*) echo "$3: a path with a space" >&2; exit 1;; esac
mkdir -p "$3/usr/share/man" "$3/etc"
touch "$3/etc/debian_version"
echo "$3" > "$NOTES/target"
exit "$DEBOOTSTRAP_STATUS"
"""
#: Knows no image yet, and lists what is added to one.
BUILDAH = """#!/bin/sh
case "$1" in
  from) echo container ;;
  add) (cd "$4" && find . | sort) > "$NOTES/added" ;;
esac
"""


@pytest.fixture
def make_base(tmp_path: Path):
    """Makes the base from a checkout whose path has a space."""
    checkout = tmp_path / "check out"
    shutil.copytree(TOOLS / "image", checkout / "tools/image")
    shutil.copy(TOOLS / "torch_build.py", checkout / "tools")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in (("debootstrap", DEBOOTSTRAP), ("buildah", BUILDAH)):
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)

    def make(status: int = 0) -> subprocess.CompletedProcess[str]:
        code = "from image.build import base_image; print(base_image())"
        env = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(checkout / "tools"),
            "NOTES": str(tmp_path),
            "DEBOOTSTRAP_STATUS": str(status),
        }
        command = [sys.executable, "-P", "-c", code]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    return make


def test_a_base_is_made_for_a_checkout_whose_path_has_a_space(tmp_path: Path, make_base) -> None:
    done = make_base()
    assert (done.returncode, done.stdout) == (0, "localhost/tokenpod-base:bookworm\n"), done.stderr
    added = (tmp_path / "added").read_text().split()
    assert "./etc/debian_version" in added
    assert "./usr/share/man" not in added
    assert not Path((tmp_path / "target").read_text().strip()).parent.exists()


def test_what_a_failed_debootstrap_left_can_be_read(tmp_path: Path, make_base) -> None:
    done = make_base(status=3)
    left = Path((tmp_path / "target").read_text().strip())
    assert (left / "etc/debian_version").exists()
    shutil.rmtree(left.parent)
    assert done.returncode == 1
    assert "debootstrap --variant=minbase ended with status 3" in done.stderr
