"""What the log says once a server serves."""

from __future__ import annotations

from tokenpod.core.messages import Ready
from tokenpod.service.config import ServerSettings
from tokenpod.service.pod.state import Listener


def summary(settings: ServerSettings, ready: Ready, listener: Listener) -> dict[str, object]:
    """By name: what was asked for, what was found, and what follows for callers."""
    return {
        "model_id": settings.model_id,
        "address": listener.address,
        "dtype": ready.dtype,
        "kv_cache_dtype": ready.kv_cache_dtype,
        "quantize": settings.quantize,
        "rope": ready.rope,
        "unused_tensors": ready.unused_tensors,
        "device": ready.device_type,
        "front_ends": settings.resolved_front_ends,
        "max_connections": settings.resolved_max_connections,
        "parameters": ready.parameters,
        "kv_slots": ready.slots,
        "kv_slots_from": ready.slots_from,
        "max_concurrent_requests": settings.resolved_concurrent_requests,
        "max_queue_tokens": settings.resolved_queue_tokens(ready.slots),
        "load_seconds": round(ready.load_seconds, 2),
        "warmup_seconds": round(ready.warmup_seconds, 2),
    }
