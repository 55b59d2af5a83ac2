"""Collectives on GPUs, in the order of the current stream, so that graphs can hold them."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from tokenpod.engine.errors import EngineError
from tokenpod.engine.host_group import HostGroup
from tokenpod.engine.rendezvous import one_line


class DeviceGroup:
    """A `Group` whose tensors are on GPUs, one a rank.

    Args:
        host: the same ranks on the host.
        store: where ranks have met.
        device: of this rank.
        timeout: seconds that connecting waits for the others.
    """

    def __init__(
        self, host: HostGroup, store: c10d.Store, *, device: torch.device, timeout: float
    ) -> None:
        self._host = host
        self.rank, self.world, self.neighbours = host.rank, host.world, host.neighbours
        self._device = device
        torch.cuda.set_device(device)
        try:
            distributed.init_process_group(
                "nccl",
                store=c10d.PrefixStore("device", store),
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=timeout),
                device_id=device,
            )
        except RuntimeError as error:
            raise EngineError(f"rank {self.rank} can't use NCCL: {one_line(error)}") from None
        self.least(1)

    def sum(self, x: torch.Tensor) -> None:
        """See `Group.sum`."""
        distributed.all_reduce(x)

    def add(self, share: torch.Tensor, residual: torch.Tensor) -> None:
        """See `Group.add`."""
        distributed.all_reduce(share)
        residual += share

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group.gather`."""
        n, local = x.shape
        parts = torch.empty((self.world, n, local), dtype=x.dtype, device=x.device)
        distributed.all_gather_into_tensor(parts, x.contiguous())
        return parts.transpose(0, 1).reshape(n, self.world * local)

    def share(self, tokens: torch.Tensor) -> None:
        """See `Group.share`."""
        distributed.broadcast(tokens, 0)

    def least(self, number: int) -> int:
        """See `Group.least`."""
        return self._host.least(number)

    def close(self) -> None:
        """See `Group.close`."""
        distributed.destroy_process_group()
        self._host.close()
