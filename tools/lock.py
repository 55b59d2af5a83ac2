"""`make locks`: what goes into the images, with the versions of requirements/dev.txt and hashes.

uv looks where its own settings say (UV_INDEX, UV_FIND_LINKS). Torch's builds for CPUs are not on
the default index: one of the two must name where they are.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"

#: Of the images: Debian 12's Python, on x86-64.
PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_28"


@dataclass(frozen=True)
class Lock:
    """A file of pinned requirements, and what it is for."""

    file: str
    about: str
    wanted: list[str]
    #: A build of torch for CPUs instead of the one with CUDA.
    cpu: bool = False


def locks() -> list[Lock]:
    """Every lock but the developers'."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    # An image's init container downloads from the store that most have; gateways drive pods.
    wanted = [*_needed(project), *_needed(client, "bench")]
    runtime = [*wanted, *extras["s3"], *extras["vllm"]]
    cuda = [*runtime, *extras["gpu"]]
    return [
        Lock("runtime-cpu.txt", "What a server without a GPU needs.", runtime, cpu=True),
        Lock("runtime-cuda.txt", "What a server with NVIDIA GPUs needs.", cuda),
        Lock("build.txt", "What builds the wheels.", client["build-system"]["requires"]),
        Lock("sbom.txt", "What writes an image's bill of materials.", ["cyclonedx-bom"]),
    ]


def _needed(project: dict[str, Any], *extras: str) -> list[str]:
    """What a wheel and its extras depend on, but for the wheel that is built beside it."""
    found = list(project["project"]["dependencies"])
    for name in extras:
        found += project["project"]["optional-dependencies"][name]
    return [each for each in found if not each.startswith("tokenpod-client")]


def write(lock: Lock) -> None:
    """Resolve `lock` and write its file."""
    # Without more, `==2.13.0` is also satisfied by 2.13.0+cpu.
    build = "{0}+cpu" if lock.cpu else "{0},!={1}+cpu"
    pins = "\n".join(
        build.format(line, line.removeprefix("torch==")) if line.startswith("torch==") else line
        for line in (LOCKS / "dev.txt").read_text().splitlines()
    )
    with tempfile.TemporaryDirectory() as scratch:
        wanted, constraints = Path(scratch) / "in.txt", Path(scratch) / "pins.txt"
        wanted.write_text("\n".join(lock.wanted) + "\n")
        constraints.write_text(pins + "\n")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "compile", "--quiet"),
                *("--no-header", "--no-annotate", "--generate-hashes"),
                *("--python-version", PYTHON, "--python-platform", PLATFORM),
                *("--constraints", str(constraints), str(wanted)),
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    about = f"# {lock.about} Written by tools/lock.py for Python {PYTHON}, {PLATFORM}.\n"
    (LOCKS / lock.file).write_text(about + done.stdout)


if __name__ == "__main__":
    for each in locks():
        write(each)
