"""What TGI's flash shards draw from and report as top tokens, after utils/tokens.py of v3.3.7.

The watermark's green list is ours, and biases, which TGI lacks, come after its penalties.
"""

from __future__ import annotations

import torch

from support.sampling.sampling_reference import green
from tokenpod.core.sampling import SamplingParams

INF = float("inf")


def distribution(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], outputs: list[int]
) -> torch.Tensor:
    """[vocab] log probabilities, float64: processors, then warpers, in TGI's order."""
    context, scores = torch.tensor([*prompt, *outputs]), logits.double()
    if params.watermark:
        scores = scores + 2.0 * torch.from_numpy(green(int(context[-1]), len(scores)))
    seen, penalty = scores[context], params.repetition_penalty
    scores = scores.index_put((context,), torch.where(seen < 0, seen * penalty, seen / penalty))
    frequency = torch.bincount(context, minlength=len(scores)) / len(context)
    scores = scores - frequency * params.relative_frequency_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.do_sample:
        scores = scores / params.temperature
        if 0 < params.top_k < len(scores):
            scores[scores < scores.topk(params.top_k).values[-1]] = -INF
        if params.top_p < 1:
            rising = scores.sort()
            lost = rising.values.softmax(0).cumsum(0) <= 1 - params.top_p
            lost[-1] = False
            scores[rising.indices[lost]] = -INF
        if params.typical_p < 1:
            logp = scores.log_softmax(0)
            distance = (-logp + (logp.exp() * logp).nansum()).abs()
            nearest = distance.sort()
            mass = scores[nearest.indices].softmax(0).cumsum(0)
            last = min(int((mass < params.typical_p).sum()), len(scores) - 1)
            scores[distance > nearest.values[last]] = -INF
    return scores.log_softmax(0)


def best_of(logprobs: torch.Tensor, n: int) -> list[int]:
    """The n most likely and all that tie with the last; nothing that can't be drawn."""
    nth = logprobs.topk(min(n, len(logprobs))).values[-1]
    ids = ((logprobs >= nth) & (logprobs > -INF)).nonzero().flatten()
    return ids[logprobs[ids].argsort(descending=True, stable=True)].tolist()
