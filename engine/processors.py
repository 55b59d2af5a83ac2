"""What changes or cuts a row's scores before a token is drawn, each by its published formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenpod.engine.rng import philox, signed, split
from tokenpod.engine.types import SamplingParams

#: "A Watermark for Large Language Models" (Kirchenbauer et al., 2023), with TGI's constants.
WATERMARK_GAMMA = 0.5
WATERMARK_DELTA = 2.0
WATERMARK_KEY = 15_485_863
#: Scores that a truncated row looks at before it sorts the whole vocabulary.
_FIRST_LOOK = 256
#: More than float32 sums of probabilities can be off by.
_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that are still in the race; parallel [k] tensors."""

    ids: torch.Tensor
    scores: torch.Tensor

    def keep(self, which: torch.Tensor | slice) -> Candidates:
        """Those that `which` (a mask, indices or a slice) selects."""
        return Candidates(self.ids[which], self.scores[which])


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


def truncate(scores: torch.Tensor, params: SamplingParams) -> Candidates:
    """What top_k, top_p, min_p and typical_p leave, in this order, each renormalising.

    Args:
        scores: [vocab] float32, after temperature.

    Ties with the k-th score all stay in. top_p takes tokens by falling score, the lowest id first
    in ties, until their mass reaches p; typical_p by rising distance from the entropy (Meister et
    al., 2023), likewise. At least one token stays.
    """
    kept, total = _falling(scores, params)
    if params.top_p < 1.0:
        mass = (kept.scores - total).exp().cumsum(0)
        kept = kept.keep(slice(0, int((mass < params.top_p).sum()) + 1))
    if params.min_p:
        floor = kept.scores[0] + torch.tensor(params.min_p).log()
        kept = kept.keep(kept.scores >= floor)
    if params.typical_p < 1.0:
        logp = kept.scores.log_softmax(0)
        p = logp.exp()
        # 0 * -inf is 0 here: a banned token has no information.
        entropy = -(p * logp).nan_to_num(nan=0.0).sum()
        _, order = (-logp - entropy).abs().sort(stable=True)
        count = int((p[order].cumsum(0) < params.typical_p).sum()) + 1
        kept = kept.keep(order[:count])
    return kept


def _falling(scores: torch.Tensor, params: SamplingParams) -> tuple[Candidates, torch.Tensor]:
    """Candidates by falling score, the lowest id first in ties, and the log of their total mass.

    Sorting a whole vocabulary is slow and rarely needed: where top_p alone cuts, the highest scores
    are looked at first, and the rest only if their mass does not reach p.
    """
    vocab_size = len(scores)
    if 0 < params.top_k < vocab_size:
        kept = _at_least(scores, scores.topk(params.top_k).values[-1])
        return kept, kept.scores.logsumexp(0)
    total = scores.logsumexp(0)
    if params.top_p < 1.0 and vocab_size > 2 * _FIRST_LOOK:
        highest = scores.topk(_FIRST_LOOK).values
        if (highest - total).exp().sum() > params.top_p + _ROUNDING:
            return _at_least(scores, highest[-1]), total
    return _at_least(scores, scores.min()), total


def _at_least(scores: torch.Tensor, least: torch.Tensor) -> Candidates:
    ids = (scores >= least).nonzero().flatten()
    values, order = scores[ids].sort(descending=True, stable=True)
    return Candidates(ids[order], values)


def _counts(tokens: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    ids = torch.tensor(list(tokens), dtype=torch.int64)
    return torch.bincount(ids, minlength=vocab_size).to(device, torch.float32)
