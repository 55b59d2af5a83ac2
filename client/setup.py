"""Build hook: the stubs are made from the .proto files."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))


class BuildWithStubs(build_py):
    """`build_py` (wheels and editable installs alike), with fresh stubs."""

    def run(self) -> None:
        """Make the stubs first: they are modules to copy."""
        import stubs

        stubs.generate(stubs.PROTOS)
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
