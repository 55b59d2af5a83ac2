"""What the engine's sampler gets: the values of a checked request, with "not set" made neutral."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from tokenpod.core.sampling import CUTS, TABLE, SamplingParams
from tokenpod.service.calls.call import GenerateCall, Sampling, ShardRequest, Stopping
from tokenpod.service.calls.errors import InvalidArgument

#: Divisors of logits stay where float32 can hold the quotient: beyond, nothing changes but NaN.
_LEAST_DIVISOR, _MOST_DIVISOR = 1e-6, 1e6

_NO_STOPPING = Stopping()


def check_allowed(
    call: GenerateCall, eos: frozenset[int], bad_words: Sequence[Sequence[int]] = ()
) -> None:
    """Raise InvalidArgument if what may be drawn leaves nothing to draw.

    Args:
        eos: tokens that end a text.
        bad_words: the call's as tokens.
    """
    allowed, ends = {*call.sampling.allowed_token_ids}, eos | {*call.stopping.stop_token_ids}
    if call.stopping.min_new_tokens and allowed and allowed <= ends:
        problem = "leaves only tokens that end the text, none before stopping.min_new_tokens"
        raise InvalidArgument("sampling.allowed_token_ids", problem)
    if allowed and allowed <= {word[0] for word in bad_words if len(word) == 1}:
        problem = "leaves only tokens that are words of sampling.bad_words"
        raise InvalidArgument("sampling.allowed_token_ids", problem)


def sampling_params(
    sampling: Sampling,
    seed: int,
    stopping: Stopping = _NO_STOPPING,
    bad_words: Sequence[Sequence[int]] = (),
) -> SamplingParams:
    """Checked values with every "not set" made neutral.

    Of `stopping`, how ends are drawn; `bad_words` are the call's as tokens.
    """
    asked: dict[str, Any] = {
        "eos_boost_after": stopping.eos_boost_after,
        "eos_boost_factor": stopping.eos_boost_factor,
    }
    for column in TABLE.columns:
        value = getattr(sampling, column.name, None)
        if value:
            asked[column.name] = _divisor(value) if column.knob.divides else value
    params = SamplingParams(**asked | {"seed": seed, "bad_words": [*bad_words]})
    if sampling.do_sample is not None:
        return params
    several = max(sampling.n, sampling.best_of) > 1
    tuned = bool(sampling.temperature) or several or TABLE.needs(params) & CUTS != 0
    return structs.replace(params, do_sample=sampling.temperature != 0.0 and tuned)


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
    """A divisor of logits; None and 0 are neutral."""
    return min(max(value, _LEAST_DIVISOR), _MOST_DIVISOR) if value else 1.0
