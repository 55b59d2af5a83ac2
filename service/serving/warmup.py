"""What a router and a shard agree on before the first request."""

from __future__ import annotations

from tokenpod.service.dialects.validate import RequestLimits
from tokenpod.service.rpc.errors import InvalidArgument
from tokenpod.service.serving.calls import WarmupCall


def agreed_limits(call: WarmupCall, limits: RequestLimits) -> tuple[int, int, int]:
    """(tokens that fit in all, max_input_tokens, max_total_tokens).

    The model is warm already. A router with limits of its own insists on hearing them again.
    """
    if call.max_total_tokens is not None and call.max_total_tokens < 2:
        raise InvalidArgument(
            "max_total_tokens",
            f"is {call.max_total_tokens}; a prompt and its output have at least 2 tokens",
        )
    total = call.max_total_tokens or limits.max_total_tokens
    if total > limits.max_total_tokens:
        raise InvalidArgument(
            "max_total_tokens",
            f"is {total}; this server allows at most {limits.max_total_tokens}"
            " (--max-total-tokens)",
        )
    most_in = call.max_input_tokens or min(limits.max_input_tokens, total - 1)
    if most_in > limits.max_input_tokens:
        raise InvalidArgument(
            "max_input_tokens",
            f"is {most_in}; this server allows at most {limits.max_input_tokens}"
            " (--max-input-tokens)",
        )
    if most_in >= total:
        raise InvalidArgument(
            "max_input_tokens",
            f"is {most_in}; it must be below max_total_tokens, {total}",
        )
    return limits.slots, most_in, total
