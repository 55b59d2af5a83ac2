"""How much memory there is for KV slots."""

from __future__ import annotations

import os

import torch

#: Torch keeps tensors of up to a MiB apart: room for those of two steps under way.
_SMALL, _SMALLS = 1 << 19, 64


def let_segments_grow() -> None:
    """Have torch map GPU memory piece by piece behind what it has, instead of in fixed segments.

    Steps have all sizes; in fixed segments their tensors leave gaps that fit nothing, until torch
    must ask the driver, which stops the GPU. To be called before anything is on the GPU.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def map_ahead(device: torch.device, extra: int) -> None:
    """Have torch map about `extra` bytes of a GPU more than it has, and some for small tensors.

    Steps of all sizes leave gaps between their tensors. What those need beyond the largest step is
    mapped now and not while serving.
    """
    small = [torch.empty(_SMALL, dtype=torch.uint8, device=device) for _ in range(_SMALLS)]
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    whole = torch.empty(unused + extra, dtype=torch.uint8, device=device)
    del small, whole


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated; on a CPU the container's limit counts too."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return min([available, *_cgroup_headroom()])


def _cgroup_headroom() -> list[int]:
    """Bytes left under this container's memory limit, if it has one (cgroup v2)."""
    try:
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as used,
        ):
            return [int(limit.read()) - int(used.read())]
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return []
