"""A group whose ranks never meet: launches of sums over ranks are noted for all of them.

Kernels have a rank's number in them, so each rank would compile its own. The first rank of a host
compiles for all of them what goes through their memory; what NCCL does is compiled already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tokenpod.engine.shards.device_group import MOST_BROADCAST, PAIR_WORDS, longest_sum
from tokenpod.kernels.gpu.peers import SymmetricBuffers
from tokenpod.kernels.operations.ops import AddLinear, AddSummand, Operations


class NotedGroup:
    """A `Group` whose tensors have no memory; only ranks of one pod reach each other's."""

    def __init__(self, rank: int, world: int, device: torch.device, *, one_pod: bool) -> None:
        self.rank = rank
        self.world = self.local_ranks = world

        def of_all(capacity: int, **how: int) -> list[SymmetricBuffers]:
            return [
                SymmetricBuffers.at([0] * world, each, capacity, device, **how)
                for each in range(world)
            ]

        short = longest_sum(world) if one_pod else 0
        #: Of every rank; none: sums are NCCL's.
        self._sums = of_all(PAIR_WORDS if world == 2 else short) if short else []
        #: Of every rank, where products end in sums.
        self.buffers = of_all(short, together=1) if short else None
        self._broadcasts = of_all(MOST_BROADCAST)

    def sum(self, x: torch.Tensor) -> None:
        """Note it for each rank."""
        for buffers in self._for(x):
            buffers.sum(x)

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """Note it for each rank."""
        for buffers in self._for(residual):
            buffers.add(partial, residual)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Note it for each rank; what has the shape of all ranks' columns."""
        if self._sums and self.world == 2 and x.shape[1] * x.itemsize % 4 == 0:
            gathered = [buffers.gather(x.contiguous()) for buffers in self._sums]
            return gathered[0]
        return x.new_empty(len(x), self.world * x.shape[1])

    def broadcast(self, tokens: torch.Tensor) -> None:
        """Note it for each rank."""
        if self._sums and len(tokens) <= MOST_BROADCAST:
            for buffers in self._broadcasts:
                buffers.tell(tokens)

    def least(self, number: int) -> int:
        """The number."""
        return number

    def close(self) -> None:
        """Nothing is open."""

    def noting(self, ops: Operations) -> Operations:
        """The operations, whose products end in every rank's sums."""
        prepare = ops.prepare_sum_linear
        if prepare is None:
            return ops

        def prepare_all(
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            buffers: list[SymmetricBuffers],
            add: AddSummand,
        ) -> AddLinear:
            products: list[Callable[..., None]] = [
                prepare(weight, bias, each, add) for each in buffers
            ]

            def add_products(x: torch.Tensor, residual: torch.Tensor) -> None:
                for product in products:
                    product(x, residual)

            return add_products

        return replace(ops, prepare_sum_linear=prepare_all)

    def _for(self, x: torch.Tensor) -> list[SymmetricBuffers]:
        fits = not x.nbytes % 4 and (self.world == 2 or all(each.fit(x) for each in self._sums))
        return self._sums if fits else []
