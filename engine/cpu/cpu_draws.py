"""How a CPU draws tokens from the scores of rows: the best one, or one by chance.

A row that truncates its distribution (top_k, top_p, min_p, typical_p) is reduced to its surviving
tokens before anything is drawn; noise depends on the token's id, so the draw is the same as over
the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.core.sampling import MOST_TOP_TOKENS
from tokenpod.engine.sampling.processors import History, log_mass, truncate
from tokenpod.engine.sampling.rng import token_noise, vocabulary_noise
from tokenpod.engine.sampling.sampler import Records, logprobs_of

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step that are drawn in the same way."""

    #: [m] where they are in the step.
    at: Ints
    #: [m] their columns.
    columns: Records
    #: [m] which output token of its sequence is drawn, from 0.
    positions: Ints
    #: [m] None where nothing is edited.
    histories: list[History | None]


@dataclass(frozen=True, slots=True)
class Distributions:
    """What m rows' tokens are drawn from."""

    #: [m, k] scores, -inf where a token can't be drawn.
    scores: torch.Tensor
    #: [m, k] which tokens' scores they are; None: the whole vocabulary's.
    ids: torch.Tensor | None = None

    def tops(self, at: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log probabilities of a row's n most likely tokens and of all that tie.

        They are computed as the drawn token's log probability is, so that its own is the same.
        """
        scores = self.scores[at : at + 1]
        best = top_tokens(scores[0], min(n, scores.shape[1]))
        best = best[scores[0, best] > -torch.inf]
        if self.ids is None:
            return best, scores.log_softmax(1)[0, best]
        values = (scores - log_mass(scores)).to(torch.float32)
        return self.ids[at, best], values[0, best]


#: Processed scores and their rows to tokens, log probabilities, and what they are drawn from.
Draw = Callable[[torch.Tensor, Rows], tuple[torch.Tensor, torch.Tensor, Distributions]]


def draw_best(scores: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, Distributions]:
    """The highest processed score of each row."""
    tokens = argmax(scores)
    if not rows.columns["logprobs"].any():
        logprobs = torch.zeros(len(tokens), dtype=torch.float32)
    else:
        logprobs = logprobs_of(scores, tokens)
    return tokens, logprobs, Distributions(scores)


def draw_whole(
    scores: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, Distributions]:
    """Draws from the whole vocabulary."""
    scores = tempered(scores, rows)
    noise = vocabulary_noise(*counters(rows), scores.shape[1])
    # argmax of log p - log E: the order of p / E without underflow.
    tokens = argmax(scores - noise.log())
    return tokens, logprobs_of(scores, tokens), Distributions(scores)


def draw_truncated(
    scores: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, Distributions]:
    """Draws from what truncation leaves."""
    kept = truncate(tempered(scores, rows), rows.columns)
    numbers = counters(rows)
    if 4 * kept.ids.shape[1] < scores.shape[1]:
        seed, stream, where = (number[:, None] for number in numbers)
        noise = token_noise(seed, stream, where, kept.ids)
    else:  # one counter serves four tokens of the whole vocabulary
        noise = vocabulary_noise(*numbers, scores.shape[1]).gather(1, kept.ids)
    at = argmax(kept.scores - noise.log())[:, None]
    logprobs = (kept.scores.gather(1, at) - log_mass(kept.scores)).to(torch.float32)
    tokens = kept.ids.gather(1, at)
    return tokens.squeeze(1), logprobs.squeeze(1), Distributions(kept.scores, kept.ids)


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """[n] int64: the highest score of each row, the lowest id in ties; a NaN counts as highest."""
    # numpy's is more than ten times faster than torch's on a CPU.
    return torch.from_numpy(scores.numpy().argmax(axis=1))


def top_tokens(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Ids of the n highest scores and of all that tie with the last, at most MOST_TOP_TOKENS.

    By falling score, the lowest id first in ties.

    Args:
        scores: [vocab] float32.
        n: at most vocab.
    """
    ids = (scores >= scores.topk(n).values[-1]).nonzero().flatten()
    order = scores[ids].argsort(descending=True, stable=True)
    return ids[order][:MOST_TOP_TOKENS]


def tempered(scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """[m, vocab] scores over temperature, the highest of each row at 0.

    In this order a tiny temperature drives the others to -inf rather than the highest to inf.
    """
    temperatures = torch.from_numpy(rows.columns["temperature"].astype(np.float32))
    return (scores - scores.amax(1, keepdim=True)).div_(temperatures[:, None])


def counters(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[m] int64 each: seeds, streams, positions."""
    seeds, streams = rows.columns["seed"].copy(), rows.columns["stream"].copy()
    return torch.from_numpy(seeds), torch.from_numpy(streams), torch.from_numpy(rows.positions)
