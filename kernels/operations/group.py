"""Ranks that compute one model together, and what they say to each other.

All ranks make the same calls in the same order, on tensors of the same shape. Nothing but tensors
of numbers travels: no objects, no pickles.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Group(Protocol):
    """One rank's end of a group. Rank 0 leads: it alone plans and samples.

    The collectives on tensors return when the device has them in its queue; a CPU has no queue. All
    raise EngineError if a rank is lost.
    """

    @property
    def rank(self) -> int:
        """From 0."""
        ...

    @property
    def world(self) -> int:
        """How many ranks."""
        ...

    @property
    def local_ranks(self) -> int:
        """Ranks on this host, this one included: they share its memory."""
        ...

    @property
    def buffers(self) -> Any:
        """What products send their partial sums through (`Operations.prepare_sum_linear`).

        None where they don't: `add` follows them.
        """
        ...

    def sum(self, x: torch.Tensor) -> None:
        """Every rank's x [T, hidden] becomes the sum of all, bit by bit the same."""
        ...

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """Residual [T, hidden], the same everywhere, += the sum of all ranks' `partial`.

        The result is bit by bit the same on all ranks. May change `partial`.
        """
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """X [n, local] -> [n, world · local]: the ranks' columns, those of rank 0 first."""
        ...

    def broadcast(self, tokens: torch.Tensor) -> None:
        """Every rank's tokens [n] int64 become the leader's."""
        ...

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers. Waits for all ranks, on the host."""
        ...

    def close(self) -> None:
        """Leave. The others' next collective fails."""
        ...
