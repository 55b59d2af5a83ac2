"""What changes or cuts a row's scores before a token is drawn, each by its published formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenpod.core.messages import SamplingParams
from tokenpod.engine.rng import philox, signed, split

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
    """The tokens of a sequence, as far as its penalties ask: counts a vocabulary entry.

    Counts are made only for parameters that need them: a whole vocabulary a row is a lot.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        outputs: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        everything = params.repetition_penalty != 1.0 or params.relative_frequency_penalty
        counted = everything or params.presence_penalty or params.frequency_penalty
        #: [vocab] float32 occurrences in prompt and in output; None where nothing asks.
        self.prompt_counts = _counts(prompt, vocab_size, device) if everything else None
        self.output_counts = _counts(outputs, vocab_size, device) if counted else None
        #: Tokens of prompt and output.
        self.length = len(prompt) + len(outputs)
        #: The last token, a scalar on the device, where the watermark asks.
        last = [*prompt[-1:], *outputs[-1:]][-1:]
        self._watermarked = params.watermark
        self.previous = torch.tensor(last[0] if last else 0, dtype=torch.int64, device=device)

    def note(self, token: torch.Tensor) -> None:
        """Add a sampled token (a scalar on the device; -1 is the end of the sequence)."""
        self.length += 1
        if self.output_counts is not None:
            self.output_counts[token.clamp(min=0)] += 1
        if self._watermarked:
            self.previous = token.clone()


def penalise(scores: torch.Tensor, params: SamplingParams, history: History) -> None:
    """Repetition, presence, frequency, relative frequency penalties and logit bias, in place.

    Repetition is CTRL's (Keskar et al., 2019): scores of tokens in prompt or output are divided by
    the penalty if positive, multiplied if negative. Relative frequency is TGI's: count / length.
    """
    out = history.output_counts
    if params.repetition_penalty != 1.0:
        assert out is not None
        assert history.prompt_counts is not None
        seen = (out + history.prompt_counts) > 0
        penalty = params.repetition_penalty
        punished = torch.where(scores < 0, scores * penalty, scores / penalty)
        torch.where(seen, punished, scores, out=scores)
    if params.presence_penalty:
        assert out is not None
        scores -= (out > 0) * params.presence_penalty
    if params.frequency_penalty:
        assert out is not None
        scores -= out * params.frequency_penalty
    if params.relative_frequency_penalty:
        assert out is not None
        assert history.prompt_counts is not None
        share = (out + history.prompt_counts) / max(history.length, 1)
        scores -= share * params.relative_frequency_penalty
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        bias = torch.tensor(list(params.logit_bias.values()), device=scores.device)
        scores[ids] += bias.to(scores.dtype)


def watermark_bias(previous: torch.Tensor, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[vocab] float32: delta on the green half of the vocabulary, which the last token chooses.

    Token v is green if word v mod 4 of Philox at counter (v // 4, 0, 0, 0) with the key
    WATERMARK_KEY * previous is below gamma * 2^32.
    """
    key = split(previous * signed(WATERMARK_KEY))
    block = torch.arange(-(-vocab_size // 4), device=device)
    zero = torch.zeros_like(block)
    words = torch.stack(philox((block, zero, zero, zero), key), dim=-1).flatten()[:vocab_size]
    return (words < int(WATERMARK_GAMMA * 2**32)).to(torch.float32) * WATERMARK_DELTA


def truncate(scores: torch.Tensor, params: Sequence[SamplingParams]) -> Candidates:
    """What top_k, top_p, min_p and typical_p leave, in this order, each renormalising.

    Ties with the k-th score all stay in. top_p takes tokens by falling score, the lowest id first
    in ties, until their mass reaches p; typical_p by rising distance from the entropy (Meister et
    al., 2023), likewise. At least one token stays.

    Args:
        scores: [n, vocab] float32, after temperature; the highest of each row is 0.
        params: n.
    """
    least, ties = _lowest_kept(scores, params)
    kept = _at_least(scores, least, ties)
    if any(p.typical_p < 1.0 for p in params):
        kept.scores.masked_fill_(~_typical(kept.scores, params), -torch.inf)
    return kept


def _lowest_kept(
    scores: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 1] each: the lowest score that top_k, top_p and min_p keep; at most how many have it.

    All three keep the first so many by falling score, so the tokens themselves need no sorting.
    """
    vocab_size = scores.shape[1]
    device = scores.device
    falling = _falling(scores)
    last = torch.tensor([[(p.top_k or vocab_size) - 1] for p in params], device=device)
    kth = falling.gather(1, last.clamp(max=vocab_size - 1))
    floor = torch.tensor([[math.log(p.min_p) if p.min_p else -math.inf] for p in params])
    mass = _running_sum(falling.exp().masked_fill_(falling < kth, 0.0))
    # Nothing reaches a mass of infinity: top_p 1 keeps all.
    wanted = [[p.top_p if p.top_p < 1.0 else math.inf] for p in params]
    reach = torch.tensor(wanted, dtype=torch.float64, device=device) * mass[:, -1:]
    count = torch.searchsorted(mass, reach) + 1
    least = falling.gather(1, count.clamp(max=vocab_size) - 1)
    least = torch.maximum(least, torch.maximum(kth, floor.to(scores)))
    return least, count - torch.searchsorted(-falling, -least)


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


def _typical(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[n, k] bool: which tokens typical_p keeps."""
    logp = scores - log_mass(scores)
    p = logp.exp()
    # A token that is out has no information: 0 * -inf is 0 here.
    entropy = -_running_sum((p * logp).nan_to_num(nan=0.0))[:, -1:]
    distance = (-logp - entropy).abs()
    order = distance.argsort(dim=1, stable=True)
    wanted = [[p.typical_p if p.typical_p < 1.0 else math.inf] for p in params]
    reach = torch.tensor(wanted, dtype=torch.float64, device=scores.device)
    mass = _running_sum(p.gather(1, order))
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=1)
    return torch.empty_like(order, dtype=torch.bool).scatter_(1, order, before < reach)


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
    if scores.device.type == "cpu":
        # numpy's is more than forty times faster than torch's on a CPU.
        return torch.from_numpy(-np.sort(-scores.numpy(), axis=1))
    return scores.sort(dim=1, descending=True).values


def _counts(tokens: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    ids = torch.tensor(list(tokens), dtype=torch.int64)
    return torch.bincount(ids, minlength=vocab_size).to(device, torch.float32)
