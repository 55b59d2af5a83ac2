"""A router's start-up: discovery, ClearCache, Info, Warmup, and the checks that refuse to start."""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace

from router.client import ShardClient, ShardError, Shards
from router.faults import RouterPanic, StartupError
from router.records import Batch, Image, Request, Sampling, ShardInfo
from router.wire import Wire

#: A JPEG of one grey pixel. Text models must not mind it.
WARMUP_IMAGE = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwc"
    "KDcpLDAxNDQ0Hyc5PTgyPC4zNDL/wAALCAABAAEBAREA/8QAFAABAAAAAAAAAAAAAAAAAAAACf/EABQQAQAAAAAAAAAA"
    "AAAAAAAAAAD/2gAIAQEAAD8AVN//2Q=="
)
WARMUP_MIMETYPE = "image/jpeg;base64"


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """A router's flags, with the launcher's defaults. None: unset.

    v1 and v2 routers have 1024 and 2048 for unset input and total limits.
    """

    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int = 4096
    max_batch_total_tokens: int | None = None
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_batch_size: int | None = None
    max_concurrent_requests: int = 128
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    disable_grammar_support: bool = False
    #: New tokens after which a request is sent again as a fresh prompt; a constant of the router.
    generation_length: int = 1024


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the settings and the shards' answers amount to."""

    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int


async def connect(path: str, wire: Wire) -> Shards:
    """Find every shard through the one at `path`, connect to each, and clear them all."""
    master = ShardClient(path, wire)
    try:
        paths = await master.service_discovery()
    except ShardError as error:
        raise StartupError(f"unable to connect to the shards: {error}") from error
    finally:
        await master.close()
    if not paths:
        raise StartupError("ServiceDiscovery names no shard")
    shards = Shards([ShardClient(each, wire) for each in paths])
    await shards.clear_cache()
    return shards


async def agree_on_limits(
    shards: Shards, wire: Wire, settings: RouterSettings
) -> tuple[ShardInfo, Limits]:
    """Ask for Info, warm the shards up, and check both against the settings."""
    info = await shards.info()
    if info.block_size < 1:
        raise RouterPanic(f"InfoResponse.block_size is {info.block_size}: division by zero")
    if wire.name != "v3":
        settings = replace(
            settings,
            max_input_tokens=settings.max_input_tokens or 1024,
            max_total_tokens=settings.max_total_tokens or 2048,
        )
        _check_older_flags(settings)
    max_input, max_total = settings.max_input_tokens, settings.max_total_tokens
    max_prefill = settings.max_batch_prefill_tokens
    warmup = await shards.warmup(warmup_batch(wire, settings), max_input, max_prefill, max_total)
    if wire.name == "v3":
        max_input = _echoed("max_input_tokens", max_input, warmup.max_input_tokens)
        max_total = _echoed("max_total_tokens", max_total, warmup.max_total_tokens)
    assert max_input is not None
    assert max_total is not None
    budget = warmup.max_supported_total_tokens
    if budget < 0:
        budget = settings.max_batch_total_tokens or max(16000, max_total, max_prefill)
    limits = Limits(
        max_input_tokens=max_input, max_total_tokens=max_total, max_batch_total_tokens=budget
    )
    _check_limits(limits, settings, info, v3=wire.name == "v3")
    return info, limits


def warmup_batch(wire: Wire, settings: RouterSettings) -> Batch:
    """The hostile payload: requests all with id 0, and in the first an image."""
    requests: list[Request] = []
    left = settings.max_batch_prefill_tokens
    while left > 0 and len(requests) != settings.max_batch_size:
        truncate = min(settings.max_input_tokens or left, left)
        requests.append(_warmup_request(wire, settings, truncate, first=not requests))
        left -= truncate
    max_tokens = settings.max_input_tokens or 0
    return Batch(0, tuple(requests), max_tokens=max_tokens if wire.name == "v3" else 0)


def _warmup_request(wire: Wire, settings: RouterSettings, truncate: int, *, first: bool) -> Request:
    repeats = truncate if wire.name == "v3" else settings.max_input_tokens or truncate
    text = "_test " * repeats
    chunks: tuple[str | Image, ...] = (text,)
    inputs = text
    if first and wire.name != "v1":
        chunks = (text, Image(WARMUP_IMAGE, WARMUP_MIMETYPE))
        encoded = base64.b64encode(WARMUP_IMAGE).decode("ascii")
        inputs = f"{text}![](data:{WARMUP_MIMETYPE},{encoded})"
    if wire.name == "v1":
        max_new_tokens = 2
    elif settings.max_total_tokens is None:
        max_new_tokens = 1
    else:
        max_new_tokens = settings.max_total_tokens - truncate
    return Request(
        id=0,
        inputs=inputs,
        chunks=chunks,
        truncate=truncate,
        max_new_tokens=max_new_tokens,
        ignore_eos_token=True,
        prefill_logprobs=True,
        top_n_tokens=20,
        sampling=Sampling(
            temperature=0.9,
            top_k=10,
            top_p=0.9,
            typical_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            watermark=True,
        ),
    )


def _echoed(name: str, flag: int | None, answer: int) -> int:
    if flag is not None and flag != answer:
        raise RouterPanic(f"WarmupResponse.{name} is {answer}; the router was started with {flag}")
    return answer


def _check_older_flags(settings: RouterSettings) -> None:
    """What routers before v3 compare before they ask any shard."""
    budget, prefill = settings.max_batch_total_tokens, settings.max_batch_prefill_tokens
    total = settings.max_total_tokens or 0
    if (settings.max_input_tokens or 0) > prefill:
        raise StartupError(
            f"max_input_tokens is {settings.max_input_tokens}; "
            f"it must be <= max_batch_prefill_tokens, {prefill}"
        )
    if budget is not None and max(prefill, total) > budget:
        raise StartupError(
            f"max_batch_prefill_tokens is {prefill} and max_total_tokens is {total}; "
            f"both must be <= max_batch_total_tokens, {budget}"
        )


def _check_limits(limits: Limits, settings: RouterSettings, info: ShardInfo, *, v3: bool) -> None:
    if limits.max_input_tokens >= limits.max_total_tokens:
        raise StartupError(
            f"max_input_tokens is {limits.max_input_tokens}; "
            f"it must be < max_total_tokens, {limits.max_total_tokens}"
        )
    prefill = settings.max_batch_prefill_tokens
    if limits.max_input_tokens > prefill and not info.support_chunking:
        raise StartupError(
            f"max_input_tokens is {limits.max_input_tokens}; without chunking "
            f"it must be <= max_batch_prefill_tokens, {prefill}"
        )
    if v3 and prefill > limits.max_batch_total_tokens:
        raise StartupError(
            f"max_batch_prefill_tokens is {prefill}; the shards fit {limits.max_batch_total_tokens}"
        )
    if limits.max_total_tokens > limits.max_batch_total_tokens:
        raise StartupError(
            f"max_total_tokens is {limits.max_total_tokens}; "
            f"the shards fit {limits.max_batch_total_tokens}"
        )
