"""What an image holds: its distributions, its bill of materials, and where the bytes go."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

BILL = "opt/tokenpod/sbom.cdx.json"
COMPILERS = ("cc", "gcc", "g++", "clang", "tcc", "ld", "as")
MB, GB = 1_000_000, 1_000_000_000


@dataclass(frozen=True)
class Filling:
    """What takes space."""

    name: str
    size: int


def canonical(name: str) -> str:
    """A distribution's name, written in the one way that registries compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(packages: Path) -> dict[str, str]:
    """Versions of the distributions in a site-packages folder, by canonical name."""
    return {canonical(each.name): each.version for each in distributions(path=[str(packages)])}


def billed(bill: Path) -> dict[str, str]:
    """Versions of the components of a CycloneDX file, by canonical name."""
    components = json.loads(bill.read_text())["components"]
    return {canonical(each["name"]): each["version"] for each in components}


def site_packages(root: Path) -> Path:
    """Where an image's distributions are."""
    (folder,) = (root / "opt/tokenpod/lib").glob("python3*/site-packages")
    return folder


def check_bill(root: Path) -> int:
    """How many components an image's bill has. Raises SystemExit unless they are what is there."""
    there, told = installed(site_packages(root)), billed(root / BILL)
    if there != told:
        odd = sorted(set(there.items()) ^ set(told.items()))
        raise SystemExit(f"the bill of materials and what is installed differ: {odd}")
    return len(told)


def compilers(root: Path) -> list[str]:
    """C compilers and what belongs to them, by the names of their programs."""
    return [name for name in COMPILERS if (root / "usr/bin" / name).exists()]


def fillings(root: Path, most: int = 12) -> list[Filling]:
    """What takes most space in an image, the largest first, and the rest as one."""
    packages = site_packages(root)
    found = [Filling(each.name, size_of(each)) for each in distributions(path=[str(packages)])]
    system = Filling("Debian and its Python", size(root) - size(root / "opt"))
    found = sorted([*found, system], key=lambda each: each.size, reverse=True)
    rest = size(root) - sum(each.size for each in found[:most])
    return [*found[:most], Filling("all else", rest)]


def size(folder: Path) -> int:
    """Bytes of the files below a folder, each counted once however many names it has."""
    return _total(path for top, _, names in os.walk(folder) for path in _paths(top, names))


def size_of(distribution: Distribution) -> int:
    """Bytes of the files that a distribution brought."""
    return _total(Path(str(distribution.locate_file(path))) for path in distribution.files or ())


def _paths(top: str, names: list[str]) -> list[Path]:
    return [Path(top, name) for name in names]


def _total(paths: Iterable[Path]) -> int:
    seen: dict[tuple[int, int], int] = {}
    for path in paths:
        if path.is_file() and not path.is_symlink():
            about = path.stat()
            seen[about.st_dev, about.st_ino] = about.st_size
    return sum(seen.values())
