"""Scores of prompt tokens equal those that plain code computes from their logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.sampling.samplers import halves, random_logits, with_holes
from tokenpod.engine.sampling.prompt_scores import PromptScores, Wanted, joined, score

VOCAB = 70


def plain_tops(logits: np.ndarray, n: int) -> list[int]:
    """By falling logit, the lowest id first in ties."""
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:n]


@pytest.mark.parametrize("make", [random_logits, halves, with_holes])
@pytest.mark.parametrize("n", [1, 5, 64, 90])
def test_tops_and_ranks_are_those_of_plain_code(make, n):
    m = 20  # more than are ranked at a time
    logits = make(m, VOCAB, 3)
    following = torch.from_numpy(np.random.default_rng(1).integers(40, size=m))
    scores = score(logits, following, Wanted(top_n=n, ranks=True))
    logprobs = logits.log_softmax(1)
    for at in range(m):
        row = logits[at].numpy()
        want = plain_tops(row, n)
        assert scores.top_ids[at].tolist() == want
        assert torch.allclose(scores.top_logprobs[at], logprobs[at, want])
        own = int(following[at])
        assert int(scores.ranks[at]) == 1 + int((row > row[own]).sum())
        assert torch.allclose(scores.logprobs[at], logprobs[at, own])


def test_what_nobody_asks_for_is_not_there():
    scores = score(random_logits(3, VOCAB), torch.tensor([1, 2, 3]), Wanted())
    assert (scores.top_ids.shape, scores.top_logprobs.shape, len(scores.ranks)) == ((3, 0),) * 2 + (
        0,
    )
    assert scores.details is None
    ranks = score(random_logits(3, VOCAB), torch.tensor([1, 2, 3]), Wanted(ranks=True)).details
    assert (ranks.top_n, ranks.top_ids, len(ranks.rank_list())) == (0, b"", 3)


def test_bad_logits_name_tokens_of_the_vocabulary():
    logits = torch.full((2, VOCAB), float("nan"))
    ids = score(logits, torch.tensor([1, 2]), Wanted(top_n=3)).top_ids
    assert ((ids >= 0) & (ids < VOCAB)).all()


def test_a_run_goes_on_where_it_is_computed_again():
    logits, following = random_logits(9, VOCAB), torch.arange(9)
    whole = score(logits, following, Wanted(2, ranks=True))

    def part(begin: int, end: int) -> PromptScores:
        return score(logits[begin:end], following[begin:end], Wanted(2, ranks=True))

    again = part(0, 4).continued(4, part(4, 7)).continued(2, part(2, 9))
    for one, other in zip(again, whole, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(joined([part(0, 3), part(3, 9)]), whole, strict=True):
        assert torch.equal(one, other)
    assert whole.details.tops(8)[0] == whole.top_ids[8].tolist()
