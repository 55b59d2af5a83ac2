"""Build hook: names the packages, and makes the protobuf stubs from the .proto files."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
#: The folders of the product; pyproject.toml says under which name each is installed.
SERVER = ("commands", "service", "core", "scheduler", "engine", "kernels", "models")
FOLDERS = ("protos", "cli", *SERVER)

sys.path.insert(0, str(ROOT / "tools"))


def packages() -> list[str]:
    """Every folder of the product that has an `__init__.py`, so that a new one needs no line."""
    found = [init.parent for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")]
    names = [".".join(("tokenpod", *path.relative_to(ROOT).parts)) for path in sorted(found)]
    return ["tokenpod", *names]


class BuildWithStubs(build_py):
    """`build_py` (wheels and editable installs alike), with fresh stubs."""

    def run(self) -> None:
        import stubs

        stubs.generate(stubs.PROTOS)
        super().run()


setup(packages=packages(), cmdclass={"build_py": BuildWithStubs})
