"""Other programs, run to their end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

#: What a build takes that is not Python's, by the packages of Debian that have it.
PROGRAMS = {"buildah": "buildah", "crun": "crun", "debootstrap": "debootstrap"}


def check_needs() -> None:
    """Raises SystemExit with a line for each thing that this machine or user lacks."""
    lacking = []
    if os.geteuid():
        lacking.append("root: it makes a root folder and a container")
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        lacking.append(f"{', '.join(missing)}: apt-get install {' '.join(missing)}")
    if lacking:
        raise SystemExit("\n".join(f"make image needs {each}" for each in lacking))


def run(*command: object, cwd: Path | None = None) -> None:
    """Run a command whose output is the operator's to read. Raises SystemExit if it fails."""
    words = [str(word) for word in command]
    status = subprocess.call(words, cwd=cwd)
    if status:
        raise SystemExit(f"{' '.join(words[:2])} ended with status {status}")


def read(*command: object) -> str:
    """What a command prints. Raises SystemExit, with its complaint, if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()
