"""Sampling in a group: the leader chooses, and all ranks go on with its tokens.

The tokens are all that a rank's next step needs of this one. They travel in the order of the
device's queue, so no host waits for them, and followers keep no sampler's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

from tokenpod.engine.group import Group


class Drawn(Protocol):
    """What was drawn, by either kind of sampler."""

    @property
    def tokens(self) -> torch.Tensor:
        """[n] int64; -1 for a bad row."""
        ...


Samples = TypeVar("Samples", bound=Drawn)
_Samples_co = TypeVar("_Samples_co", covariant=True)


class RowSampler(Protocol[_Samples_co]):
    """What an executor asks of a sampler; `Sampler` and `DeviceSampler` say what is meant."""

    def set_row(self, *args: Any, **kwargs: Any) -> None:
        """Give a row to a sequence."""
        ...

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        ...

    def sample(self, logits: torch.Tensor, rows: Any, positions: Any) -> _Samples_co:
        """Draw one token a row."""
        ...


class LeadingSampler(Generic[Samples]):
    """The leader's: draws as `inner` does, and tells the others."""

    def __init__(self, inner: RowSampler[Samples], group: Group) -> None:
        self._inner = inner
        self._group = group
        self.set_row = inner.set_row
        self.clear_row = inner.clear_row

    def sample(self, logits: torch.Tensor, rows: Any, positions: Any) -> Samples:
        """As `inner` does."""
        samples = self._inner.sample(logits, rows, positions)
        self._group.share(samples.tokens)
        return samples


class FollowingSampler(Generic[Samples]):
    """A follower's: hears what the leader has drawn, and nothing about it.

    Args:
        group: of this rank.
        of_tokens: makes samples of tokens [n] int64.
    """

    def __init__(self, group: Group, of_tokens: Callable[[torch.Tensor], Samples]) -> None:
        self._group = group
        self._of_tokens = of_tokens

    def set_row(self, *args: Any, **kwargs: Any) -> None:
        """The leader knows what the row asks for."""

    def clear_row(self, row: int) -> None:
        """There is nothing to forget."""

    def sample(self, logits: torch.Tensor, rows: Any, positions: Any) -> Samples:
        """The leader's tokens."""
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        self._group.share(tokens)
        return self._of_tokens(tokens)
