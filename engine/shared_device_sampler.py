"""`shared_sampler` on GPUs: tokens travel in the order of the queue, and no host waits for them."""

from __future__ import annotations

import torch

from tokenpod.engine.device_sampler import DeviceSampler, DeviceSamples, Launches
from tokenpod.kernels.group import Group


def device_sampler(
    group: Group | None, *, rows: int, vocab_size: int, device: torch.device, most_edits: int
) -> DeviceSampler | FollowingDeviceSampler:
    """The sampler of a rank; without a group there is one rank."""
    if group is not None and group.rank > 0:
        return FollowingDeviceSampler(group, rows=rows, device=device)
    if group is None:
        return DeviceSampler(rows=rows, vocab_size=vocab_size, device=device, most_edits=most_edits)
    return LeadingDeviceSampler(
        group, rows=rows, vocab_size=vocab_size, device=device, most_edits=most_edits
    )


class LeadingDeviceSampler(DeviceSampler):
    """The leader's: tells the others what it draws, greedy tokens within captured steps."""

    def __init__(
        self, group: Group, *, rows: int, vocab_size: int, device: torch.device, most_edits: int
    ) -> None:
        super().__init__(rows=rows, vocab_size=vocab_size, device=device, most_edits=most_edits)
        self._group = group

    def begin(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `DeviceSampler.begin`."""
        tokens = super().begin(logits, rows, positions)
        self._group.broadcast(tokens)
        return tokens

    def finish(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        launches: Launches | None = None,
    ) -> DeviceSamples:
        """See `DeviceSampler.finish`."""
        launches = launches or self.launches
        samples = super().finish(logits, rows, positions, launches)
        if launches.draws:
            self._group.broadcast(samples.tokens)
        return samples


class FollowingDeviceSampler:
    """A follower's in the place of a `DeviceSampler`: hears what the leader has drawn.

    It knows which rows draw, and so when the leader has more to tell than greedy tokens.
    """

    def __init__(self, group: Group, *, rows: int, device: torch.device) -> None:
        self._group = group
        self._drawing: set[int] = set()
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    @property
    def launches(self) -> Launches:
        """What the live rows need, as far as other ranks notice."""
        return Launches(draws=bool(self._drawing), tops=False)

    def follow_row(self, row: int, *, draws: bool) -> None:
        """Give a row to a sequence; the leader knows what else it asks for."""
        self.clear_row(row)
        if draws:
            self._drawing.add(row)

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        self._drawing.discard(row)

    def begin(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The leader's greedy tokens."""
        tokens = self._tokens[: len(rows)]
        self._group.broadcast(tokens)
        return tokens

    def finish(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> DeviceSamples:
        """All of the leader's tokens; log probabilities are 0, and there are no top tokens."""
        tokens = self._tokens[: len(rows)]
        if self.launches.draws:
            self._group.broadcast(tokens)
        return DeviceSamples.of_tokens(tokens)
