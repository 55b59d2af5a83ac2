"""What the model thought of a prompt's tokens: log probabilities, ranks and the likeliest ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tokenpod.core.outputs import PromptDetails
from tokenpod.core.requests import Request
from tokenpod.engine.sampling.sampler import logprobs_of

#: Positions whose likeliest tokens are found at a time: it takes several times the memory of
#: their logits.
_RANKED_AT_ONCE = 16


class Wanted(NamedTuple):
    """What is asked of a prompt's tokens besides their log probabilities."""

    top_n: int = 0
    ranks: bool = False

    @classmethod
    def of(cls, request: Request) -> Wanted:
        """Of a request's prompt."""
        return cls(request.prompt_top_n_tokens, request.prompt_ranks)


#: Log probabilities alone.
NOTHING_ELSE = Wanted()


class PromptScores(NamedTuple):
    """Of a run of a prompt's tokens, [m]; on a device or on the host."""

    #: [m] float32.
    logprobs: torch.Tensor
    #: [m, k] int32 and float32, as `PromptDetails` has them; k is 0 where nobody asked.
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    #: [m] int32, or none.
    ranks: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PromptScores:
        """All four, changed alike."""
        return PromptScores(*map(change, self))

    def behind(self, n: int) -> PromptScores:
        """These without the first n; all of them if n is below 0."""
        return self.map(lambda values: values[n:]) if n > 0 else self

    def continued(self, start: int, more: PromptScores) -> PromptScores:
        """These with `more` from position `start` on, in the place of what was there."""
        return joined([self.map(lambda values: values[:start]), more])

    @property
    def details(self) -> PromptDetails | None:
        """What there is besides log probabilities; None: nothing. On the host."""
        top_n = self.top_ids.shape[1]
        if not (top_n or len(self.ranks)):
            return None
        return PromptDetails(top_n, *(values.numpy().tobytes() for values in self[1:]))


def score(logits: torch.Tensor, following: torch.Tensor, wanted: Wanted) -> PromptScores:
    """Scores of the tokens that follow.

    Args:
        logits: [m, vocab] float32.
        following: [m] int64.
    """
    n = min(wanted.top_n, logits.shape[1])
    step = _RANKED_AT_ONCE if n else len(logits)
    parts = [_likeliest(logits[at : at + step], n) for at in range(0, len(logits), step)]
    ids, values = map(torch.cat, zip(*parts, strict=True))
    ranks = following.new_empty(0, dtype=torch.int32)
    if wanted.ranks:
        own = logits.gather(1, following[:, None])
        ranks = ((logits > own).sum(1) + 1).to(torch.int32)
    return PromptScores(logprobs_of(logits, following), ids, values, ranks)


def joined(parts: list[PromptScores]) -> PromptScores:
    """Runs one after the other."""
    return PromptScores(*map(torch.cat, zip(*parts, strict=True)))


def _likeliest(logits: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[m, n] ids, int32, and log probabilities, by falling logit, the lowest id first in ties.

    Nothing here waits for the host, and all shapes follow from m and n. A row with NaN has any ids.
    """
    m, vocab = logits.shape
    if not n:
        empty = logits.new_empty(m, 0)
        return empty.to(torch.int32), empty
    last = logits.topk(n).values[:, -1:]
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    # All above the n-th, and the lowest ids of those that tie with it: topk's own choice of ties
    # differs between devices.
    lists = [
        torch.where(which, ids, vocab).topk(n, largest=False, sorted=True).values
        for which in (logits > last, logits == last)
    ]
    candidates = torch.cat(lists, 1).sort(1).values.long()
    there = candidates < vocab
    candidates.clamp_(max=vocab - 1)
    found = logits.gather(1, candidates).masked_fill_(~there, -torch.inf)
    order = found.argsort(dim=1, descending=True, stable=True)[:, :n]
    chosen = candidates.gather(1, order)
    return chosen.to(torch.int32), logits.log_softmax(1).gather(1, chosen)
