"""Collectives on a CPU, over TCP."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import distributed_c10d as c10d

from tokenpod.core.errors import RankLost
from tokenpod.engine.shards.rendezvous import one_line

_T = TypeVar("_T")

#: Bytes up to which a sum is that of what all ranks get from all others.
_SHORT = 1 << 16


class CpuGroup:
    """A `Group` whose tensors are on a CPU.

    Args:
        store: where ranks have met.
        rank: from 0.
        world: how many ranks.
        toward: address and port of rank 0: the others are reached the same way.
        timeout: seconds that a collective waits for the others.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        world: int,
        *,
        toward: tuple[str, int],
        timeout: float,
    ) -> None:
        self.rank = rank
        self.world = world
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        # The library's default would be whatever this host's name resolves to, or else loopback.
        options._devices = [gloo.create_device(hostname=_own_address(*toward))]
        self._gloo = self._run(lambda: gloo(store, rank, world, options))
        self.local_ranks = self._count_local_ranks()
        self.buffers = None

    def sum(self, x: torch.Tensor) -> None:
        """Every rank's x [T, hidden] becomes the sum of all, bit by bit the same."""
        if x.nbytes <= _SHORT:
            parts = self._run(lambda: self._exchange(x))
            total = parts[0].float()
            for part in parts[1:]:  # in the order of ranks: rounding is the same on all
                total += part
            x.copy_(total)
        else:
            self._run(lambda: self._gloo.allreduce([x]).wait())

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """Residual [T, hidden], the same everywhere, += the sum of all ranks' `partial`."""
        self.sum(partial)
        residual += partial

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, local] -> [n, world * local]: the ranks' columns, those of rank 0 first."""
        return torch.cat(self._run(lambda: self._exchange(x.contiguous())), dim=1)

    def broadcast(self, tokens: torch.Tensor) -> None:
        """Every rank's tokens [n] int64 become the leader's."""
        self._run(lambda: self._gloo.broadcast(tokens, 0).wait())

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers. Waits for all ranks."""
        numbers = torch.tensor([number])
        self._run(lambda: self._gloo.allreduce([numbers], c10d.ReduceOp.MIN).wait())
        return int(numbers)

    def close(self) -> None:
        """Leave. The others' next collective fails."""
        # Ends its threads, and the store's. A process that ends before they do may crash.
        self._gloo = None

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' x, by rank."""
        parts = [torch.empty_like(x) for _ in range(self.world)]
        self._gloo.allgather([parts], [x]).wait()
        return parts

    def _count_local_ranks(self) -> int:
        own = torch.tensor([[zlib.crc32(socket.gethostname().encode())]])
        return int((self.gather(own) == own).sum())

    def _run(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} lost its group of {self.world}: {one_line(error)}"
            ) from None


def _own_address(address: str, port: int) -> str:
    """Of this host, on the way to another (or, at rank 0, to itself)."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)  # of datagrams: this sends nothing
        return str(probe.getsockname()[0])
