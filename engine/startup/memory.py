"""How much memory there is for KV slots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tokenpod.core.cgroup import memory_limits

#: Bytes that a loaded pod takes beside a step, of calls and freed tensors: 28 MiB were measured.
PROCESSES_GROW = 32 << 20
#: Torch keeps tensors of up to a MiB apart: room for those of two steps under way.
_SMALL, _SMALLS = 1 << 19, 64

#: Bytes of pieces of pinned memory, as torch rounds them, and how many there are of each: 8 MB.
_PINNED_POWERS, _PINNED_PIECES = range(2, 19), 16


def let_segments_grow() -> None:
    """Have torch map GPU memory piece by piece behind what it has, instead of in fixed segments.

    Steps have all sizes; in fixed segments their tensors leave gaps that fit nothing, until torch
    must ask the driver, which stops the GPU. To be called before anything is on the GPU.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


@contextmanager
def in_one_piece(device: torch.device) -> Iterator[None]:
    """Have tensors that stay what they are in segments of their own, each mapped at once.

    60 GiB take 5 ms so, and 200 in segments that grow, by 20 MiB at a time.
    """
    if device.type != "cuda":
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        let_segments_grow()


def map_ahead(device: torch.device, extra: int) -> None:
    """Have torch map about `extra` bytes of a GPU more than it has, and some for small tensors.

    Steps of all sizes leave gaps between their tensors. What those need beyond the largest step is
    mapped now and not while serving.
    """
    small = [torch.empty(_SMALL, dtype=torch.uint8, device=device) for _ in range(_SMALLS)]
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    whole = torch.empty(unused + extra, dtype=torch.uint8, device=device)
    del small, whole


def pin_ahead() -> None:
    """Have torch pin memory of the host for what steps send to a GPU, several pieces of each size.

    Pinning while a GPU computes may wait until it is done, and steps of a burst send lists of ever
    new lengths.
    """
    sizes = [1 << power for power in _PINNED_POWERS for _ in range(_PINNED_PIECES)]
    pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    del pieces


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that can still be allocated, and where that is from, for the operator."""

    bytes: int
    source: str
    #: A process that takes more is killed.
    limited: bool = False

    def shared(self, ranks: int) -> FreeMemory:
        """What each of so many ranks gets of it."""
        source = f"{self.source}, shared by {ranks} ranks" if ranks > 1 else self.source
        return FreeMemory(self.bytes // ranks, source, self.limited)

    def less(self, reserve: int, taken_by: str) -> FreeMemory:
        """What is left for keys and values."""
        source = f"{self.source} less {size(reserve)} that {taken_by}"
        return FreeMemory(max(self.bytes - reserve, 0), source, self.limited)


def free_memory(device: torch.device) -> FreeMemory:
    """What a GPU has left; or this machine, where the container's limits count too."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return FreeMemory(free, f"of the GPU's {size(total)}")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for limit in memory_limits()[:1]:
        if limit.left < available:
            source = f"under the limit of {size(limit.limit)} (cgroup v{limit.version})"
            return FreeMemory(limit.left, source, limited=True)
    return FreeMemory(available, "on this machine")


def size(count: int) -> str:
    """`count` bytes, for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
