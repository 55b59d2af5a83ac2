"""How much memory there is for weights."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None where that can't be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    if device.type == "cpu":
        known = [size for size in (_machine(), _container()) if size is not None]
        return min(known, default=None)
    return None


def use_large_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel for pages of 2 MiB under a fresh tensor of a CPU: filling it is twice as fast.

    Where there are none it stays as it is.
    """
    large = 2 << 20
    start = -(-tensor.data_ptr() // large) * large
    end = (tensor.data_ptr() + tensor.nbytes) // large * large
    if sys.platform == "linux" and tensor.device.type == "cpu" and start < end:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


def _machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _container() -> int | None:
    """What is left of the control group's limit (version 2), if it has one."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        files = dict(
            line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines()
        ).get("inactive_file", "0")
    except (OSError, ValueError):
        return None
    # Cached pages of files that were only read count as used, but give way.
    return None if limit == "max" else max(int(limit) - used + int(files), 0)
