"""What a process asks of the kernel for itself: when it ends, what it may take, how it sleeps."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29


def die_with_parent() -> None:
    """Be killed when the parent is, even by SIGKILL: no orphan keeps a GPU or a port busy."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_naps_on_time() -> None:
    """Let sleeps of this thread end within a microsecond of their time.

    Linux may end them 50 µs late, so that it wakes less often: more than the sleep itself of who
    looks every 20 µs whether a device is through.
    """
    _prctl(_PR_SET_TIMERSLACK, 1000)


def limit_memory(more: int) -> None:
    """Let the address space grow by so many bytes from here; then allocations fail."""
    if sys.platform != "linux":
        # Other systems do not enforce it.
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # A failed allocation of a library aborts: that is an answer, not a crash to keep.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def be_first_to_go() -> None:
    """When the container's memory runs out, this process can be replaced and an engine can't."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
