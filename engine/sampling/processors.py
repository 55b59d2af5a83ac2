"""What changes or cuts a row's scores before a token is drawn, each by its published formula."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.core.new_row import NewRow
from tokenpod.core.sampling import COUNTED, MOST_BOOST
from tokenpod.engine.sampling.bad_words import BadWords
from tokenpod.engine.sampling.rng import philox, split
from tokenpod.engine.sampling.sampler import Record, Records, edits_of

#: "A Watermark for Large Language Models" (Kirchenbauer et al., 2023), with TGI's constants.
WATERMARK_GAMMA = 0.5
WATERMARK_DELTA = 2.0
WATERMARK_KEY = 15_485_863


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that are still in the race: [n, k] each; a row with fewer has scores of -inf."""

    ids: torch.Tensor
    scores: torch.Tensor


class History:
    """What the processors read of a row besides its columns.

    Args:
        new: the sequence.
        columns: its row's.
    """

    def __init__(self, new: NewRow, columns: Record, vocab_size: int) -> None:
        ids, values = (torch.from_numpy(edits) for edits in edits_of(new))
        sizes = [
            int(columns[name]) for name in ("logit_bias", "ends", "stops", "allowed_token_ids")
        ]
        biases, ends, stops, last = itertools.accumulate(sizes)
        #: None: there are none.
        self.bad_words: BadWords | None = None
        if columns["bad_words"]:
            self.bad_words = BadWords(ids[last:].numpy(), values[last:].numpy())
        ids = ids.long()
        self.bias_ids, self.biases = ids[:biases], values[:biases]
        #: End-of-text tokens, which may be boosted.
        self.ends = ids[biases:ends]
        #: Tokens that may not be drawn before `min_new_tokens`.
        self.late = ids[biases:stops]
        #: [vocab] float32: -inf for tokens that can't be drawn; None: all can.
        self.forbidden: torch.Tensor | None = None
        if len(allowed := ids[stops:last]):
            self.forbidden = torch.full((vocab_size,), -torch.inf).index_fill_(0, allowed, 0.0)
        #: [vocab] float32 occurrences in prompt and output; None where nothing asks.
        self.prompt: torch.Tensor | None = None
        self.outputs: torch.Tensor | None = None
        if columns["flags"] & COUNTED:
            self.prompt = _counts(new.request.prompt, vocab_size)
            self.outputs = _counts(new.outputs, vocab_size)

    def note(self, token: int) -> None:
        """A token has been drawn."""
        if self.outputs is not None:
            self.outputs[token] += 1
        if self.bad_words is not None:
            self.bad_words.note(token)


def edit(scores: torch.Tensor, columns: Record, history: History, position: int) -> None:
    """Everything that comes before temperature, in place.

    Args:
        scores: [vocab] float32.
        columns: the row's.
        position: which output token of its sequence is drawn, from 0.
    """
    if columns["watermark"]:
        scores += watermark_bias(int(columns["previous"]), len(scores))
    if history.outputs is not None and history.prompt is not None:
        _penalise(scores, columns, history.prompt, history.outputs)
    if len(history.bias_ids):
        scores[history.bias_ids] += history.biases
    beyond = position - int(columns["eos_boost_after"])
    if columns["eos_boost_factor"] != 1.0 and beyond > 0:
        _boost(scores, history.ends, boost_of(float(columns["eos_boost_factor"]), beyond))
    if position < columns["min_new_tokens"]:
        scores[history.late] = -torch.inf
    if history.forbidden is not None:
        # Added, so that NaN and Inf stay what they are and the row is found out.
        scores += history.forbidden
    if history.bad_words is not None:
        scores[torch.from_numpy(history.bad_words.banned)] += -torch.inf


def boost_of(factor: float, beyond: int) -> float:
    """`factor` to the power of `beyond`, at most MOST_BOOST, less 1; a float32.

    By squares, in float64: every path that draws tokens rounds likewise.
    """
    power, square = 1.0, factor
    while beyond:
        if beyond & 1:
            power = min(power * square, MOST_BOOST)
        square = min(square * square, MOST_BOOST)
        beyond >>= 1
    return float(np.float32(power - 1.0))


def _boost(scores: torch.Tensor, ends: torch.Tensor, boost: float) -> None:
    """Exponential decay length penalty, as Hugging Face's libraries have it, in place."""
    ending = scores[ends]
    boosted = ending + ending.abs() * boost
    # What can't be drawn stays so: -inf and inf would be NaN.
    scores[ends] = torch.where(ending > -torch.inf, boosted, ending)


def _penalise(
    scores: torch.Tensor, columns: Record, prompt: torch.Tensor, out: torch.Tensor
) -> None:
    """Repetition, presence, frequency and relative frequency penalties, in place.

    Repetition is CTRL's (Keskar et al., 2019): scores of tokens in prompt or output are divided by
    the penalty if positive, multiplied if negative. Relative frequency is TGI's: count / length.
    """
    repetition = float(columns["repetition_penalty"])
    if repetition != 1.0:
        seen = (out + prompt) > 0
        punished = torch.where(scores < 0, scores * repetition, scores / repetition)
        torch.where(seen, punished, scores, out=scores)
    if presence := float(columns["presence_penalty"]):
        scores -= (out > 0) * presence
    if frequency := float(columns["frequency_penalty"]):
        scores -= out * frequency
    if relative := float(columns["relative_frequency_penalty"]):
        scores -= (out + prompt) / max(int(columns["length"]), 1) * relative


def watermark_bias(previous: int, vocab_size: int) -> torch.Tensor:
    """[vocab] float32: delta on the green half of the vocabulary, which the last token chooses.

    Token v is green if word v mod 4 of Philox at counter (v // 4, 0, 0, 0) with the key
    WATERMARK_KEY * previous is below gamma * 2^32.
    """
    key = split(torch.tensor(previous) * WATERMARK_KEY)
    block = torch.arange(-(-vocab_size // 4))
    zero = torch.zeros_like(block)
    words = torch.stack(philox((block, zero, zero, zero), key), dim=-1).flatten()[:vocab_size]
    return (words < int(WATERMARK_GAMMA * 2**32)).to(torch.float32) * WATERMARK_DELTA


def truncate(scores: torch.Tensor, columns: Records) -> Candidates:
    """What top_k, top_p, min_p and typical_p leave, in this order, each renormalising.

    Ties with the k-th score all stay in. top_p takes tokens by falling score, the lowest id first
    in ties, until their mass reaches p; typical_p by rising distance from the entropy (Meister et
    al., 2023), likewise. At least one token stays.

    Args:
        scores: [n, vocab] float32, after temperature; the highest of each row is 0.
        columns: [n], the rows'.
    """
    least, ties = _lowest_kept(scores, columns)
    kept = _at_least(scores, least, ties)
    typical_p = columns["typical_p"]
    if (typical_p < 1.0).any():
        kept.scores.masked_fill_(~_typical(kept.scores, typical_p), -torch.inf)
    return kept


def _lowest_kept(scores: torch.Tensor, columns: Records) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 1] each: the lowest score that top_k, top_p and min_p keep; at most how many have it.

    All three keep the first so many by falling score, so the tokens themselves need no sorting.
    """
    vocab_size = scores.shape[1]
    falling = _falling(scores)
    top_k = columns["top_k"]
    last = np.minimum(np.where(top_k > 0, top_k, vocab_size), vocab_size) - 1
    kth = falling.gather(1, torch.from_numpy(last)[:, None])
    floor = torch.from_numpy(columns["min_p"].astype(np.float32))[:, None]
    mass = _running_sum(falling.exp().masked_fill_(falling < kth, 0.0))
    reach = _wanted(columns["top_p"]) * mass[:, -1:]
    count = torch.searchsorted(mass, reach) + 1
    least = falling.gather(1, count.clamp(max=vocab_size) - 1)
    least = torch.maximum(least, torch.maximum(kth, floor))
    return least, count - torch.searchsorted(-falling, -least)


def _wanted(share: npt.NDArray[np.float64]) -> torch.Tensor:
    """[n, 1] float64: the mass to reach; infinity, which nothing reaches, where all stay in."""
    return torch.from_numpy(np.where(share < 1.0, share, math.inf))[:, None]


def _at_least(scores: torch.Tensor, least: torch.Tensor, ties: torch.Tensor) -> Candidates:
    """Tokens above the `least` score, and with it the `ties` lowest ids; -inf is never in."""
    row, ids = ((scores >= least) & (scores > -torch.inf)).nonzero(as_tuple=True)
    sizes = torch.bincount(row, minlength=len(scores))
    at = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row]
    shape = (len(scores), int(sizes.max()))
    kept = Candidates(ids.new_zeros(shape), scores.new_full(shape, -torch.inf))
    kept.ids[row, at] = ids
    kept.scores[row, at] = scores[row, ids]
    tied = kept.scores == least
    kept.scores.masked_fill_(tied & (tied.cumsum(1) > ties), -torch.inf)
    return kept


def _typical(scores: torch.Tensor, typical_p: npt.NDArray[np.float64]) -> torch.Tensor:
    """[n, k] bool: which tokens typical_p keeps."""
    logp = scores - log_mass(scores)
    p = logp.exp()
    # A token that is out has no information: 0 * -inf is 0 here.
    entropy = -_running_sum((p * logp).nan_to_num(nan=0.0))[:, -1:]
    distance = (-logp - entropy).abs()
    order = distance.argsort(dim=1, stable=True)
    mass = _running_sum(p.gather(1, order))
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=1)
    return torch.empty_like(order, dtype=torch.bool).scatter_(1, order, before < _wanted(typical_p))


def log_mass(scores: torch.Tensor) -> torch.Tensor:
    """[n, 1] float64: log of the sum of exponentials of [n, k] scores that are at most 0.

    However many -inf a row ends with: other rows' candidates must not change its bits.
    """
    return _running_sum(scores.exp())[:, -1:].log()


def _running_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums from left to right in float64, whose order no width changes."""
    return values.cumsum(1, dtype=torch.float64)


def _falling(scores: torch.Tensor) -> torch.Tensor:
    """Each row's scores from the highest to the lowest."""
    # numpy's is more than forty times faster than torch's on a CPU.
    return torch.from_numpy(-np.sort(-scores.numpy(), axis=1))


def _counts(tokens: Sequence[int], vocab_size: int) -> torch.Tensor:
    counts = np.bincount(np.array(tokens, np.int64), minlength=vocab_size)
    return torch.from_numpy(counts.astype(np.float32))
