"""How a rank joins its group."""

from __future__ import annotations

import torch

from tokenpod.core.errors import EngineError
from tokenpod.engine.shards.rendezvous import open_store
from tokenpod.kernels.operations.group import Group


def join_group(
    rank: int, world: int, address: str, port: int, *, device: torch.device, timeout: float
) -> Group:
    """Meet the other ranks and connect to them.

    Args:
        rank: from 0; rank 0 listens.
        world: how many ranks, at least 2.
        address: where rank 0 is, a name or an IP address; if that is this host alone, rank 0
            listens to this host alone.
        port: where rank 0 listens.
        device: what this rank computes on: the CPU, or a GPU that no other rank has.
        timeout: seconds to wait for the others, here and in every collective on the host.

    Raises:
        EngineError: in one line, if the others don't come or don't fit.
    """
    if not 0 <= rank < world or world < 2:
        raise EngineError(f"rank {rank} of {world}: a group has ranks 0 to world - 1, two or more")
    store = open_store(rank, world, address, port, timeout=timeout)
    from tokenpod.engine.shards.cpu_group import CpuGroup

    host = CpuGroup(store, rank, world, toward=(address, port), timeout=timeout)
    if device.type == "cpu":
        return host
    # Not on a CPU: it brings Triton with it.
    from tokenpod.engine.shards.device_group import DeviceGroup

    return DeviceGroup(host, store, device=device, timeout=timeout)
