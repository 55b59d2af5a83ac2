"""Limits on what routers send by TGI's shard protocol."""

from __future__ import annotations

import math

from tokenpod.core.sampling import MOST_TOP_TOKENS
from tokenpod.service.calls.call import ShardBatch, ShardRequest
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.limits import (
    RequestLimits,
    and_virtual,
    at_most,
    between,
    check_constraint,
    few_entries,
    refuse,
)

#: Routers enforce a limit of their own on stop sequences; this one only bounds the work of a token.
STOP_SEQUENCES = 256


def check_batch(batch: ShardBatch) -> None:
    """A Prefill's batch as a whole."""
    if not batch.requests:
        raise InvalidArgument("batch.requests", "is empty; at least one request is needed")
    if len({request.id for request in batch.requests}) < len(batch.requests):
        raise InvalidArgument("batch.requests", "holds two requests with the same id")


def check_request(request: ShardRequest, at: int, limits: RequestLimits) -> None:
    """Request number `at` of a Prefill's batch, before its prompt is tokenised."""
    field = f"batch.requests[{at}]"
    if request.constraint is not None:
        check_constraint(request.constraint, limits)
    if not request.inputs:
        raise InvalidArgument(f"{field}.inputs", "is empty")
    parameters = f"{field}.parameters"
    between(f"{parameters}.temperature", request.temperature, 0, math.inf)
    between(f"{parameters}.top_p", request.top_p, 0, 1)
    between(f"{parameters}.typical_p", request.typical_p, 0, 1)
    between(f"{parameters}.repetition_penalty", request.repetition_penalty, 0, math.inf)
    between(f"{parameters}.frequency_penalty", request.frequency_penalty, -2, 2)
    if request.max_new_tokens == 0:
        problem = "is 0; at least 1 is needed"
        raise InvalidArgument(f"{field}.stopping_parameters.max_new_tokens", problem)
    stops = f"{field}.stopping_parameters.stop_sequences"
    few_entries(stops, len(request.stop_sequences), STOP_SEQUENCES)
    most_top = min(MOST_TOP_TOKENS, limits.vocab_size)
    at_most(f"{field}.top_n_tokens", request.top_n_tokens, most_top, None)
    if request.chunk_len == 0:
        raise InvalidArgument(f"{field}.chunk_len", "is 0; at least 1 is needed")


def check_length(
    request: ShardRequest,
    at: int,
    prompt_tokens: int,
    limits: RequestLimits,
    virtual_tokens: int = 0,
) -> None:
    """A tokenised prompt and its bound."""
    field = f"batch.requests[{at}]"
    if prompt_tokens == 0:
        raise InvalidArgument(f"{field}.inputs", "has no tokens; at least 1 is needed")
    before = prompt_tokens + virtual_tokens
    total = before + request.max_new_tokens
    if total > limits.max_total_tokens:
        raise InvalidArgument(
            f"{field}.stopping_parameters.max_new_tokens",
            f"is {request.max_new_tokens}; with {prompt_tokens} prompt tokens"
            f"{and_virtual(virtual_tokens)} at most"
            f" {max(limits.max_total_tokens - before, 0)} are possible"
            f" (--max-total-tokens {limits.max_total_tokens})",
        )


def check_warmup(
    max_input_tokens: int | None, max_total_tokens: int | None, limits: RequestLimits
) -> tuple[int, int]:
    """A router's limits on prompt and total, or where it names none this server's."""
    if max_total_tokens is not None and max_total_tokens < 2:
        problem = f"is {max_total_tokens}; a prompt and its output have at least 2 tokens"
        raise InvalidArgument("max_total_tokens", problem)
    total = max_total_tokens or limits.max_total_tokens
    at_most("max_total_tokens", total, limits.max_total_tokens, "--max-total-tokens")
    most_in = max_input_tokens or min(limits.max_input_tokens, total - 1)
    at_most("max_input_tokens", most_in, limits.max_input_tokens, "--max-input-tokens")
    if most_in >= total:
        refuse("max_input_tokens", most_in, f"it must be below max_total_tokens, {total}")
    return most_in, total
