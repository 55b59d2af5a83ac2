"""The wheels that an image is built from, by hash."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_build import ONE_TRY, pinned, shown


def fetch(variant: str, locks: Path, folder: Path, index: str) -> Path:
    """Download the wheels of the variant's locks to `folder`, but for those it has; the folder.

    The CPU variant's torch is looked for on `index`, unless that is empty, and then, as all else,
    where pip looks by itself. Raises SystemExit if a wheel is nowhere, or has another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if variant == "cpu":
        _fetch_torch(locks / "runtime-cpu.txt", folder, index)
    for lock in (f"runtime-{variant}", "build", "sbom"):
        status = _download(locks / f"{lock}.txt", folder)
        if status:
            raise SystemExit(f"the wheels of {lock}.txt: pip ended with status {status}")
    return folder


def _fetch_torch(lock: Path, folder: Path, index: str) -> None:
    entries = re.split(r"\n(?=\w)", lock.read_text())
    (torch,) = [entry for entry in entries if entry.startswith("torch==")]
    with tempfile.TemporaryDirectory() as scratch:
        alone = Path(scratch) / "torch.txt"
        alone.write_text(f"{torch}\n")
        if index and not _download(alone, folder, *ONE_TRY, "--index-url", index):
            return
        if not _download(alone, folder):
            return
    looked = f"on {shown(index)} or where" if index else "where"
    raise SystemExit(
        f"torch=={pinned(lock)} was not found {looked} pip looks by itself: TORCH_INDEX=URL names "
        "an index of PyTorch's CPU builds, PIP_FIND_LINKS=FOLDER a folder that has the wheel"
    )


def _download(lock: Path, folder: Path, *options: str) -> int:
    return subprocess.call(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--find-links", str(folder), "--dest", str(folder)),
            *options,
            *("--requirement", str(lock)),
        ]
    )
