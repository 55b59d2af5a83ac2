"""Collectives on GPUs, in the order of the current stream, so that graphs can hold them.

Sums go through the peers' memory where GPUs reach it: of a decode step they take a few microseconds
there, several times less than NCCL's, and two ranks' long ones meet the residual stream on their
way. Long sums of more ranks, and those of other hosts, are NCCL's.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d as c10d

from tokenpod.core.errors import EngineError
from tokenpod.engine.shards.cpu_group import CpuGroup
from tokenpod.engine.shards.rendezvous import one_line
from tokenpod.kernels.gpu.peers import BLOCK, EMPTY_PAIR, SymmetricBuffers

#: Bytes of the longest of short sums, by how many ranks there are: each sends all of it to every
#: other one. Measured on H200s (docs/measurements/gpu.md), when twice the bytes travelled.
LONGEST_SUM = {2: 1 << 20, 4: 1 << 20, 8: 1 << 19}
#: Words that two ranks send each other at a time: their longer sums are several launches.
PAIR_WORDS = 1 << 22
#: Tokens that the leader can broadcast at once without NCCL.
MOST_BROADCAST = 4 * BLOCK


def longest_sum(world: int) -> int:
    """Words of 32 bits of the longest of short sums of so many ranks."""
    return next((size // 4 for most, size in LONGEST_SUM.items() if world <= most), 0)


class DeviceGroup:
    """A `Group` whose tensors are on GPUs, one per rank.

    Args:
        host: the same ranks on the host.
        store: where ranks have met.
        device: of this rank.
        timeout: seconds that connecting waits for the others.
    """

    def __init__(
        self, host: CpuGroup, store: c10d.Store, *, device: torch.device, timeout: float
    ) -> None:
        self._host = host
        self.rank, self.world, self.local_ranks = host.rank, host.world, host.local_ranks
        torch.cuda.set_device(device)
        try:
            distributed.init_process_group(
                "nccl",
                store=c10d.PrefixStore("device", store),
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=timeout),
                device_id=torch.device("cuda", torch.cuda.current_device()),
            )
            distributed.all_reduce(torch.zeros(1, device=device))
        except RuntimeError as error:
            raise EngineError(f"rank {self.rank} can't use NCCL: {one_line(error)}") from None
        self._memory: list[torch.Tensor] = []
        #: What sums go through; None: NCCL.
        self._sums: SymmetricBuffers | None = None
        #: See `Group.buffers`.
        self.buffers: SymmetricBuffers | None = None
        self._broadcasts: SymmetricBuffers | None = None
        longest = longest_sum(self.world)
        sums = PAIR_WORDS if self.world == 2 else longest
        if buffers := self._symmetric_buffers(sums, device):
            self._sums = buffers
            self.buffers = self._symmetric_buffers(longest, device, together=1)
            self._broadcasts = self._symmetric_buffers(MOST_BROADCAST, device)

    def sum(self, x: torch.Tensor) -> None:
        """Every rank's x [T, hidden] becomes the sum of all, bit by bit the same."""
        if buffers := self._buffers_for(x):
            buffers.sum(x)
        else:
            distributed.all_reduce(x)

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """Residual [T, hidden], the same everywhere, += the sum of all ranks' `partial`.

        As `Group.add`; what `partial` may be besides, `SymmetricBuffers.add` says.
        """
        if buffers := self._buffers_for(residual):
            buffers.add(partial, residual)
        else:
            distributed.all_reduce(partial)
            residual += partial

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, local] -> [n, world * local]: the ranks' columns, those of rank 0 first."""
        n, local = x.shape
        if self._sums is not None and self.world == 2 and local * x.itemsize % 4 == 0:
            return self._sums.gather(x.contiguous())
        parts = torch.empty((self.world, n, local), dtype=x.dtype, device=x.device)
        distributed.all_gather_into_tensor(parts, x.contiguous())
        return parts.transpose(0, 1).reshape(n, self.world * local)

    def broadcast(self, tokens: torch.Tensor) -> None:
        """Every rank's tokens [n] int64 become the leader's."""
        if self._broadcasts is not None and len(tokens) <= self._broadcasts.capacity:
            self._broadcasts.tell(tokens)
        else:
            distributed.broadcast(tokens, 0)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers. Waits for all ranks."""
        return self._host.least(number)

    def close(self) -> None:
        """Leave. The others' next collective fails."""
        distributed.destroy_process_group()
        self._host.close()

    def _buffers_for(self, x: torch.Tensor) -> SymmetricBuffers | None:
        """What its sum goes through; None: NCCL."""
        buffers = self._sums
        if buffers is None or x.nbytes % 4 or (self.world > 2 and not buffers.fit(x)):
            return None
        return buffers

    def _symmetric_buffers(
        self, capacity: int, device: torch.device, *, together: int = BLOCK
    ) -> SymmetricBuffers | None:
        """Buffers in memory that all ranks reach; None, on all of them, where one does not."""
        if self.least(int(self.local_ranks == self.world and capacity > 0)) == 0:
            return None
        addresses: list[int] = []
        try:
            words = SymmetricBuffers.words(self.world, capacity)
            memory = symmetric_memory.empty(words, dtype=torch.int64, device=device)
            everyone: Any = distributed.group.WORLD
            handle: Any = symmetric_memory.rendezvous(memory, everyone)
            memory.fill_(EMPTY_PAIR)
            torch.cuda.synchronize(device)
            # A handle may be of a larger allocation, cut up in the same way on every rank.
            offset = memory.data_ptr() - handle.buffer_ptrs[self.rank]
            addresses = [address + offset for address in handle.buffer_ptrs]
            self._memory.append(memory)
        except (RuntimeError, AttributeError) as error:
            warnings.warn(
                f"rank {self.rank} does not reach its peers' memory: {one_line(error)}",
                stacklevel=2,
            )
        # Nobody writes before all have emptied theirs.
        if self.least(len(addresses)) != self.world:
            return None
        return SymmetricBuffers.at(addresses, self.rank, capacity, device, together=together)
