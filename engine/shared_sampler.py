"""Sampling in a group: the leader chooses, and all ranks go on with its tokens.

The tokens are all that a rank's next step needs of this one, so nothing else travels, and followers
keep no sampler's state.
"""

from __future__ import annotations

import torch

from tokenpod.engine.sampler import Sampler, Samples
from tokenpod.kernels.group import Group

_CPU = torch.device("cpu")


def host_sampler(group: Group | None, *, rows: int, vocab_size: int) -> Sampler | FollowingSampler:
    """The sampler of a rank; without a group there is one rank."""
    if group is None:
        return Sampler(rows=rows, vocab_size=vocab_size, device=_CPU)
    if group.rank == 0:
        return LeadingSampler(group, rows=rows, vocab_size=vocab_size)
    return FollowingSampler(group)


class LeadingSampler(Sampler):
    """The leader's on a CPU: tells the others what it draws."""

    def __init__(self, group: Group, *, rows: int, vocab_size: int) -> None:
        super().__init__(rows=rows, vocab_size=vocab_size, device=_CPU)
        self._group = group

    def sample(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> Samples:
        """See `Sampler.sample`."""
        samples = super().sample(logits, rows, positions)
        self._group.broadcast(samples.tokens)
        return samples


class FollowingSampler:
    """A follower's in the place of a `Sampler`: hears what the leader has drawn."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def follow_row(self, row: int, *, draws: bool) -> None:
        """Give a row to a sequence; the leader knows what it asks for."""

    def clear_row(self, row: int) -> None:
        """There is nothing to forget."""

    def sample(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> Samples:
        """The leader's tokens; log probabilities are 0, and there are no top tokens."""
        tokens = torch.empty(len(rows), dtype=torch.int64)
        self._group.broadcast(tokens)
        return Samples(tokens, torch.zeros(len(rows), dtype=torch.float32))
