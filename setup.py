"""Build hook: names the packages."""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
#: The folders of the server; pyproject.toml says under which name each is installed.
FOLDERS = ("commands", "service", "core", "scheduler", "engine", "kernels", "models")


def packages() -> list[str]:
    """Every folder of the server that has an `__init__.py`, so that a new one needs no line."""
    found = [init.parent for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")]
    names = [".".join(("tokenpod", *path.relative_to(ROOT).parts)) for path in sorted(found)]
    return ["tokenpod", *names]


setup(packages=packages())
