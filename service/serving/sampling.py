"""What the engine's sampler gets: the values of a checked request, with "not set" made neutral."""

from __future__ import annotations

from tokenpod.core.messages import SamplingParams
from tokenpod.service.serving.calls import Sampling, ShardRequest

#: Divisors of logits stay where float32 can hold the quotient: beyond, nothing changes but NaN.
_LEAST_DIVISOR, _MOST_DIVISOR = 1e-6, 1e6


def sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    """`sampling` with every "not set" made neutral. Expects checked values."""
    temperature = sampling.temperature
    top_p, typical_p = sampling.top_p or 1.0, sampling.typical_p or 1.0
    chosen = sampling.do_sample
    if chosen is None:
        several = max(sampling.n, sampling.best_of) > 1
        tuned = (temperature, sampling.top_k, top_p < 1, sampling.min_p, typical_p < 1, several)
        chosen = temperature != 0.0 and any(tuned)
    return SamplingParams(
        do_sample=chosen,
        temperature=_divisor(temperature),
        top_k=sampling.top_k,
        top_p=top_p,
        min_p=sampling.min_p,
        typical_p=typical_p,
        repetition_penalty=_divisor(sampling.repetition_penalty),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        watermark=sampling.watermark,
        seed=seed,
    )


def shard_sampling_params(request: ShardRequest) -> SamplingParams:
    """TGI's rules: sampling if asked for, or if any knob is off its neutral value."""
    temperature, top_p = _divisor(request.temperature), request.top_p or 1.0
    typical_p = request.typical_p or 1.0
    tuned = (temperature != 1.0, request.top_k, top_p < 1.0, typical_p < 1.0)
    return SamplingParams(
        do_sample=request.do_sample or any(tuned),
        temperature=temperature,
        top_k=request.top_k,
        top_p=top_p,
        typical_p=typical_p,
        repetition_penalty=_divisor(request.repetition_penalty),
        relative_frequency_penalty=request.frequency_penalty,
        watermark=request.watermark,
        seed=request.seed,
        top_of_processed=True,
    )


def _divisor(value: float | None) -> float:
    """What logits are divided by; None and 0 are neutral."""
    return min(max(value, _LEAST_DIVISOR), _MOST_DIVISOR) if value else 1.0
