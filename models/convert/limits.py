"""What a process that reads files of strangers gives up before it opens them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path

_CLONE_NEWUSER = 0x1000_0000
_CLONE_NEWNET = 0x4000_0000


def leave_the_network() -> bool:
    """Move this process into a network without interfaces; whether the system allows it.

    Call it before there are threads: without the right to make a network, a process needs a user
    namespace of its own first, which only a process of one thread gets.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    # Without a mapping it works as well, but new files would seem to be nobody's.
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def limit(*, memory: int, seconds: int) -> None:
    """Let this process map so many bytes more than now, and take so many seconds of a processor."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory
    for kind, value in ((resource.RLIMIT_AS, most), (resource.RLIMIT_CPU, seconds)):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
