"""The memory limits that this process is under: those of its cgroups, of either version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
#: Version 1 writes "no limit" as the largest whole page; no machine has so much.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit, in bytes; `used` is without files' pages that the kernel drops for others.

    The limit counts those too: a library of gigabytes that was read once would leave nothing.
    """

    limit: int
    used: int
    version: int

    @property
    def left(self) -> int:
        """Bytes that can still be allocated."""
        return max(self.limit - self.used, 0)


def memory_limits(root: Path = _ROOT, own: Path = _OWN) -> list[MemoryLimit]:
    """The limits of this process's cgroups and of all above them, tightest first.

    A container sees its own cgroup where the root is mounted, though the paths that it reads may
    be the node's: folders that are not there are passed over.

    Args:
        root: where cgroups are mounted.
        own: this process's cgroups, one line per hierarchy, as in /proc/self/cgroup.
    """
    found = [*_limits(root, _path(own, ""), 2), *_limits(root / "memory", _path(own, "memory"), 1)]
    return sorted(found, key=lambda each: each.left)


#: The limit, what is used, and in memory.stat the files' pages that were used once.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _limits(root: Path, path: Path, version: int) -> Iterator[MemoryLimit]:
    """The limits of one hierarchy, from `path` below `root` up to `root`."""
    limit_file, used_file, idle = _FILES[version]
    for folder in (root / path, *(root / above for above in path.parents)):
        try:
            limit, used = ((folder / name).read_text().strip() for name in (limit_file, used_file))
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        droppable = sum(int(line.split()[1]) for line in lines if line.split()[0] == idle)
        if limit != "max" and int(limit) < _UNLIMITED:
            yield MemoryLimit(int(limit), max(int(used) - droppable, 0), version)


def _path(own: Path, controller: str) -> Path:
    """Relative, of the hierarchy that has `controller`; "": of version 2's."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return Path()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path(path.lstrip("/"))
    return Path()
