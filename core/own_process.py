"""Limits that a child process sets itself, which does what clients' data says."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path


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
