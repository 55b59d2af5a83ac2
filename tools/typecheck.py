"""Run mypy --strict over the installed namespace.

mypy does not follow setuptools' package-dir mapping of an editable install, so it gets a folder of
links that has the namespace's shape: build/types/tokenpod/scheduler -> scheduler, and so on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "types"


def main() -> int:
    """Make the links and run mypy; its exit status."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    mapping = project["tool"]["setuptools"]["package-dir"]
    package = TREE / "tokenpod"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {name.partition(".")[2]: ROOT / folder for name, folder in mapping.items()}
    del wanted[""]
    wanted |= {p.name: p for p in (ROOT / mapping["tokenpod"]).iterdir() if p.name != "__pycache__"}
    for link in package.iterdir():
        link.unlink()
    for name, target in wanted.items():
        (package / name).symlink_to(target)
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    environment = {**os.environ, "MYPYPATH": str(TREE)}
    return subprocess.call([*mypy, "-p", "tokenpod", *sys.argv[1:]], cwd=TREE, env=environment)


if __name__ == "__main__":
    sys.exit(main())
