"""Build hook: names the packages and their version, and makes the stubs from the .proto files."""

import sys
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent
#: The folders of the repository that are subpackages here.
FOLDERS = ("protos", "cli")

sys.path.insert(0, str(ROOT / "tools"))


def packages() -> list[str]:
    """Every folder that has an `__init__.py`, so that a new one needs no line."""
    found = [init.parent for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")]
    names = [".".join(("tokenpod_client", *path.relative_to(ROOT).parts)) for path in found]
    return ["tokenpod_client", *sorted(names)]


def version() -> str:
    """The server's: both wheels are released together."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["version"])


class BuildWithStubs(build_py):
    """`build_py` (wheels and editable installs alike), with fresh stubs."""

    def run(self) -> None:
        import stubs

        stubs.generate(stubs.PROTOS)
        super().run()


setup(packages=packages(), version=version(), cmdclass={"build_py": BuildWithStubs})
