"""Which build of torch `make setup` installs, and what that weighs.

The default index has the build with CUDA, whose libraries take gigabytes. Where no NVIDIA driver is
found, PyTorch's own index of CPU builds is tried first, once: torch alone is taken from there, in
the version of the lock, and all else from the default index. If the try fails, torch comes from
the default index too.

TORCH_INDEX names another index, which is then tried on every machine; if it is empty, none is.
This runs before anything is installed, with the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from urllib.parse import urlsplit

from image.contents import GB, canonical, size, size_of

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
#: Any one of these is there with a driver; the last one under Windows.
_DRIVER = ("dev/nvidiactl", "proc/driver/nvidia/version", "usr/lib/wsl/lib/libcuda.so.1")
#: How long an index may take to list torch's versions, in seconds. pip's own time-out is one of
#: each connection, and begins after the name has been looked up.
PROBE_SECONDS = 10.0
PIP = (sys.executable, "-m", "pip")
#: Options of pip for what has an alternative: 15 s without a byte are too long.
ONE_TRY = ("--retries", "0", "--timeout", "15")


def main() -> int:
    parser = argparse.ArgumentParser(prog="torch_build", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    taken = commands.add_parser("install", help="install torch, unless the default index has it")
    taken.add_argument("lock", type=Path)
    commands.add_parser("weigh", help="say which build is installed, and what it weighs")
    options = parser.parse_args()
    if options.command == "weigh":
        print(weight(Path(sys.prefix)))
    else:
        index = index_to_try(os.environ, driver=has_driver(Path("/")))
        print(install(pinned(options.lock), installed(), index))
    return 0


def has_driver(root: Path) -> bool:
    """Whether the machine with this root folder has an NVIDIA driver."""
    return any((root / path).exists() for path in _DRIVER)


def index_to_try(environ: Mapping[str, str], *, driver: bool) -> str:
    """The index that is tried before the default one; empty if none is."""
    return environ.get("TORCH_INDEX", "" if driver else CPU_BUILDS).strip()


def pinned(lock: Path) -> str:
    """The version of torch in a lock."""
    found = re.search(r"^torch==(\S+)", lock.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{lock} has no torch")
    return found[1]


def shown(index: str) -> str:
    """An index's address without the name and password that it may hold."""
    parts = urlsplit(index)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def installed() -> str | None:
    """The version of torch in this environment."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def install(
    wanted: str,
    there: str | None,
    index: str,
    pip: Sequence[str] = PIP,
    seconds: float = PROBE_SECONDS,
) -> str:
    """Install torch from `index`, if that has it; a line that says what was done.

    Torch is left to the default index, which is asked for all of the lock next, where `index` is
    empty or of no use.

    Args:
        wanted: the version, without a build: 2.13.0.
        there: the version that is installed; any build of the one that is wanted will do.
        index: where to look, once.
        pip: the command.
        seconds: how long the index may take to list its versions.
    """
    if there is not None and _is(there, wanted):
        return f"torch {there} is installed already"
    if not index:
        return f"torch {wanted} comes from the default index"
    print(f"Looking for torch {wanted} on {shown(index)}", flush=True)
    problem = refusal(index, wanted, pip, seconds)
    if problem is None:
        command = [*pip, "install", "-qq", "--no-deps", *ONE_TRY, "--index-url", index]
        status = subprocess.call([*command, f"torch=={wanted}"])
        if not status:
            return f"torch {wanted} came from {shown(index)}"
        problem = f"could not be used: pip ended with status {status}"
    return (
        f"{shown(index)} {problem}. torch {wanted} comes from the default index instead, with CUDA "
        "where that has no other; TORCH_INDEX=URL names another index of CPU builds"
    )


def refusal(
    index: str, wanted: str, pip: Sequence[str] = PIP, seconds: float = PROBE_SECONDS
) -> str | None:
    """Why torch `wanted` can't be had from `index`; None if it can. Takes `seconds` at most."""
    # pip asks, for it knows the operator's proxies and certificates.
    command = [*pip, "index", "versions", "torch", "--retries", "0", "--timeout", f"{seconds / 2}"]
    try:
        told = subprocess.run(
            [*command, "--index-url", index], capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {seconds:g} s"
    # "Available versions: 2.13.0+cpu, 2.12.1+cpu"
    if any(_is(word, wanted) for word in re.split(r"[\s,]+", told.stdout)):
        return None
    return f"can't be reached, or has no torch {wanted} for this Python"


def weight(environment: Path) -> str:
    """A line that says what an environment and its torch weigh."""
    (packages,) = (environment / "lib").glob("python3*/site-packages")
    parts = {canonical(each.name): each for each in distributions(path=[str(packages)])}
    cuda = [part for name, part in parts.items() if name.startswith(("nvidia-", "cuda-"))]
    own = sum(size_of(part) for part in (parts["torch"], *cuda))
    libraries = " and CUDA's libraries" if cuda else ""
    return (
        f"{environment.name} takes {size(environment) / GB:.1f} GB, "
        f"torch {parts['torch'].version}{libraries} {own / GB:.1f} GB of that"
    )


def _is(found: str, wanted: str) -> bool:
    """Whether `found` is the version `wanted`, of whatever build: 2.13.0+cpu is 2.13.0."""
    return wanted in (found, found.partition("+")[0])


if __name__ == "__main__":
    sys.exit(main())
