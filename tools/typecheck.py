"""Run mypy --strict over both packages.

mypy does not follow setuptools' package-dir mapping of an editable install, so it gets a folder of
links that has the packages' shape: build/types/tokenpod/scheduler -> scheduler, and so on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "types"
#: The packages, and the folders of their pyproject.toml.
PROJECTS = {"tokenpod": ".", "tokenpod_client": "client"}


def main() -> int:
    """Make the links and run mypy; its exit status."""
    packages = {name: _mapping(ROOT / folder) for name, folder in PROJECTS.items()}
    for name, links in packages.items():
        package = TREE / name
        package.mkdir(parents=True, exist_ok=True)
        for link in package.iterdir():
            link.unlink()
        for part, target in links.items():
            (package / part).symlink_to(target)
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    environment = {**os.environ, "MYPYPATH": str(TREE)}
    chosen = [option for name in packages for option in ("-p", name)]
    return subprocess.call([*mypy, *chosen, *sys.argv[1:]], cwd=TREE, env=environment)


def _mapping(project: Path) -> dict[str, Path]:
    """What a project's package has in it, by name."""
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    mapping = settings["tool"]["setuptools"]["package-dir"]
    folders = {name.partition(".")[2]: (project / path).resolve() for name, path in mapping.items()}
    own = folders.pop("")
    return folders | {path.name: path for path in own.iterdir() if path.name != "__pycache__"}


if __name__ == "__main__":
    sys.exit(main())
