"""How much memory there is for weights, and how they leave no more than they take."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

#: glibc's names for limits of its allocator (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Bytes of an allocation that has pages of its own while weights are made.
_LARGE = 32 << 10
#: The same while serving: what glibc's own limit grows to.
_MOST_KEPT = 32 << 20

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


@contextmanager
def freed_at_once() -> Iterator[None]:
    """While weights are read, made and laid out: what is freed goes back to the system.

    glibc keeps what is freed below a limit that grows up to 32 MiB, and each weight leaves gaps
    that the next does not fit into: a model of 640 MB of int8 held 240 MB of them, and took 250
    more at its worst. Below the limit are scales alone, of pieces that are widened. Afterwards the
    limits are what they grow to. Other libraries have none.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _MOST_KEPT)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _MOST_KEPT)
        libc.malloc_trim(ctypes.c_size_t(0))


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
