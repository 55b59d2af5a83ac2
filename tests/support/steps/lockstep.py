"""Ranks of a group as threads of one process: their arithmetic, without sockets and processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tokenpod.kernels.operations.group import Group

T = TypeVar("T")

#: Seconds until a rank that lost another gives up.
PATIENCE = 120


class _Meeting:
    """Where ranks put what the others read."""

    def __init__(self, world: int) -> None:
        self.brought: list[torch.Tensor] = [torch.empty(0)] * world
        self.barrier = threading.Barrier(world, timeout=PATIENCE)


class LockstepGroup(Group):
    """One rank's end."""

    buffers: Any = None

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank, self._meeting = rank, meeting

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world(self) -> int:
        return len(self._meeting.brought)

    @property
    def local_ranks(self) -> int:
        return self.world

    def sum(self, x: torch.Tensor) -> None:
        x.copy_(torch.stack(self._exchange(x)).sum(0))

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        residual += torch.stack(self._exchange(partial)).sum(0)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, tokens: torch.Tensor) -> None:
        tokens.copy_(self._exchange(tokens)[0])

    def least(self, number: int) -> int:
        return int(min(x.item() for x in self._exchange(torch.tensor(number))))

    def close(self) -> None:
        self._meeting.barrier.abort()

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        meeting = self._meeting
        meeting.brought[self._rank] = x.clone()
        meeting.barrier.wait()
        everyone = list(meeting.brought)
        meeting.barrier.wait()
        return everyone


def in_lockstep(world: int, rank: Callable[[Group], T]) -> list[T]:
    """What `rank` returns on each of so many ranks, which must make the same collectives."""
    meeting = _Meeting(world)

    def run(group: LockstepGroup) -> T:
        try:
            return rank(group)
        except BaseException:
            group.close()
            raise

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, [LockstepGroup(i, meeting) for i in range(world)]))
