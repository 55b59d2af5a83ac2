"""Build hook: the protobuf stubs are made from the .proto files before packages are collected."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))


class BuildWithStubs(build_py):
    """`build_py` (wheels and editable installs alike), with fresh stubs."""

    def run(self) -> None:
        import stubs

        stubs.generate(stubs.PROTOS)
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
