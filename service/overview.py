"""What a server that has just started serves, and within which limits."""

from __future__ import annotations

from collections.abc import Iterator

from tokenpod.core.messages import Ready
from tokenpod.service.calls.limits import RequestLimits
from tokenpod.service.config.rules import flag
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.pod.model_store import EMBEDDED

#: What is said where nobody has named a model.
_UNNAMED = "the embedded demo model, since none was named: `tokenpod serve MODEL` serves another"


def summary(settings: ServerSettings, ready: Ready, address: str) -> dict[str, object]:
    """By name: what was asked for, what was found, and what follows for callers."""
    return {
        "model_id": settings.model_id,
        "task": ready.task.value,
        "address": address,
        "dtype": ready.dtype,
        "kv_cache_dtype": ready.kv_cache_dtype,
        "quantize": settings.quantize,
        "quantization": ready.quantization,
        "rope": ready.rope,
        "config_override": settings.config_override or "",
        "unused_tensors": ready.unused_tensors,
        "runs_on": ready.runs_on,
        "requires_padding": ready.requires_padding,
        "device": ready.device_type,
        "front_ends": settings.resolved_front_ends,
        "max_connections": settings.resolved_max_connections,
        "parameters": ready.parameters,
        "max_batch_size": ready.rows or settings.resolved_batch_size,
        "max_batch_prefill_tokens": ready.prefill_tokens,
        "kv_slots": ready.slots,
        "kv_slots_from": ready.slots_from,
        "kv_windows": ready.windows_kept,
        "host_slots": ready.offload_slots,
        "max_concurrent_requests": settings.requests_taken(
            ready.rows or settings.resolved_batch_size
        ),
        "max_queue_tokens": settings.resolved_queue_tokens(ready.slots),
        "load_seconds": round(ready.load_seconds, 2),
        "warmup_seconds": round(ready.warmup_seconds, 2),
    }


def overview(
    settings: ServerSettings, ready: Ready, limits: RequestLimits, address: str
) -> list[str]:
    """A table for people, in lines: what is served, then every limit by its flag."""
    rows = [*_facts(settings, ready, address), *_limits(settings, ready, limits)]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _facts(settings: ServerSettings, ready: Ready, address: str) -> Iterator[tuple[str, str]]:
    unnamed = settings.model_id == EMBEDDED and "model_id" not in settings.model_fields_set
    yield "model", _UNNAMED if unnamed else settings.model_id
    if settings.served_name != settings.model_id:
        yield "name for clients", settings.served_name
    if ready.task.pools:
        yield "task", ready.task.value
    yield "address", address
    if settings.health_address is not None:
        yield "health", settings.health_address
    yield "device", ready.device_type
    quantised = f", products {ready.quantization}" if ready.quantization else ""
    # On a CPU weights of 16 bits may be multiplied as float32: their size tells.
    weights = f"weights {ready.dtype}{quantised} in {ready.weight_bytes / 1e9:.2f} GB"
    yield "numbers", f"{weights}, KV cache {ready.kv_cache_dtype}"
    yield "context", f"{ready.max_positions} tokens"
    yield "KV cache", f"{ready.slots} tokens: {ready.slots_from}"
    if ready.windows_kept:
        yield "windows", ready.windows_kept
    if ready.offload_slots:
        yield "host's memory", f"{ready.offload_slots} tokens more (--host-kv-bytes)"


def _limits(
    settings: ServerSettings, ready: Ready, limits: RequestLimits
) -> Iterator[tuple[str, str]]:
    found = {
        "max_input_tokens": limits.max_input_tokens,
        "max_total_tokens": limits.max_total_tokens,
        "max_batch_total_tokens": limits.slots,
        "max_batch_prefill_tokens": ready.prefill_tokens or settings.resolved_prefill_tokens,
        "max_batch_size": limits.rows,
        "max_concurrent_requests": settings.requests_taken(limits.rows),
        "max_queue_tokens": settings.resolved_queue_tokens(limits.slots),
        "max_best_of": min(limits.max_samples, limits.rows),
        "max_stop_sequences": limits.max_stop_sequences,
        "max_stop_sequence_bytes": limits.max_stop_sequence_bytes,
        "max_top_n_tokens": min(limits.max_top_n_tokens, limits.vocab_size),
        "max_logit_bias": limits.max_logit_bias,
        "max_message_bytes": settings.max_message_bytes,
        "max_front_end_bytes": settings.resolved_front_end_bytes,
        "max_connections": settings.resolved_max_connections,
    }
    yield from ((flag(name), str(value)) for name, value in found.items())
