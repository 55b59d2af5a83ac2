"""The rpcs that every generation of TGI's shard protocol has: their handlers and their rows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from tokenpod.core.task import Task
from tokenpod.service.calls.errors import RETRY_SECONDS, ServiceError, Unavailable
from tokenpod.service.dialects.fields import field_names
from tokenpod.service.dialects.tgi.codec import ShardCodec
from tokenpod.service.rpc.interceptors import Context
from tokenpod.service.rpc.methods import BATCH, NAMES, PROMPT, SMALL, Gate, Method, Serve, method_of
from tokenpod.service.serving.backend import Backend

log = logging.getLogger("tokenpod.shard")

#: Initial metadata of Info: the model's name, for which the protocol has no field.
MODEL_ID_KEY = "tokenpod-model-id"
#: Numbers of requests that are read in one turn.
_SLICE = 16_384


def service_of(pb: Any) -> ServiceDescriptor:
    """The service of the generation whose generated module is `pb`."""
    found: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["TextGenerationService"]
    return found


def shard_methods(pb: Any, tokens: Serve | None = None) -> tuple[Method, ...]:
    """The rows of the shard rpcs of the generation whose generated module is `pb`.

    `tokens`: what answers `Tokens`; None: the generation has no such rpc.
    """
    own, service = ShardHandlers(ShardCodec(pb)), service_of(pb)

    def row(name: str, limits: Any, serve: Any, gate: Gate = Gate.READY, **more: Any) -> Method:
        return method_of(service, name, limits, gate=gate, serve=serve, **more)

    rows = (
        row("Health", SMALL, own.health, on_followers=True, frequent=True),
        row("Info", SMALL, own.info, on_followers=True),
        row("ServiceDiscovery", SMALL, own.service_discovery, on_followers=True),
        row("ClearCache", SMALL, own.clear_cache),
        row("FilterBatch", NAMES, own.filter_batch, frequent=True),
        row("Warmup", BATCH, own.warmup, task=Task.GENERATE),
        row("Prefill", BATCH, own.prefill, frequent=True, task=Task.GENERATE),
        row("Decode", NAMES, own.decode, frequent=True, task=Task.GENERATE),
    )
    if tokens is None:
        return rows
    return *rows, row("Tokens", PROMPT, tokens, Gate.QUEUE, relayed=False, on_followers=True)


class ShardHandlers:
    """Answers the shard rpcs of one generation.

    Args:
        codec: its messages.
    """

    def __init__(self, codec: ShardCodec) -> None:
        self._codec = codec
        self._pb = codec.pb

    async def health(self, backend: Backend, request: Any, context: Context) -> Any:
        """OK while the engine moves."""
        if not backend.healthy():
            raise Unavailable("the engine makes no progress", retry_after=RETRY_SECONDS)
        return self._pb.HealthResponse()

    async def info(self, backend: Backend, request: Any, context: Context) -> Any:
        """What a router must know about the model."""
        await context.send_initial_metadata(((MODEL_ID_KEY, backend.model_id),))
        return self._codec.info(backend.ready)

    async def service_discovery(self, backend: Backend, request: Any, context: Context) -> Any:
        """The leader alone: it speaks for every rank."""
        return self._pb.ServiceDiscoveryResponse(urls=backend.urls)

    async def clear_cache(self, backend: Backend, request: Any, context: Context) -> Any:
        """Forget one batch, or all."""
        with _logged("ClearCache"):
            await backend.shard.clear(request.id if request.HasField("id") else None)
        return self._pb.ClearCacheResponse()

    async def filter_batch(self, backend: Backend, request: Any, context: Context) -> Any:
        """Drop the requests that are not named; without a batch in the answer none is left."""
        with _logged("FilterBatch", request.batch_id):
            keep = await _names(request.request_ids)
            batch = await backend.shard.filter(request.batch_id, keep)
        kept = self._codec.cached_batch(batch) if batch else None
        return self._pb.FilterBatchResponse(batch=kept)

    async def warmup(self, backend: Backend, request: Any, context: Context) -> Any:
        """The true token budget."""
        with _logged("Warmup"), field_names(self._codec.warmup_names):
            slots, most_in, total = backend.shard.warmup(*self._codec.warmup(request))
        return self._codec.warm(slots, most_in, total)

    async def prefill(self, backend: Backend, request: Any, context: Context) -> Any:
        """Process new prompts, and sample a token for each."""
        with _logged("Prefill", request.batch.id):
            step = await backend.shard.prefill(*await self._codec.prefill(request))
        return self._codec.step(self._pb.PrefillResponse(), step)

    async def decode(self, backend: Backend, request: Any, context: Context) -> Any:
        """Sample one more token for each request."""
        batch_ids = [batch.id for batch in request.batches]
        with _logged("Decode", *batch_ids):
            step = await backend.shard.decode(batch_ids)
        return self._codec.step(self._pb.DecodeResponse(), step)


async def _names(request_ids: Sequence[int]) -> set[int]:
    """As a set. Other tasks get their turn while a long list is read."""
    names: set[int] = set()
    for at in range(0, len(request_ids), _SLICE):
        if at:
            await asyncio.sleep(0)
        names.update(request_ids[at : at + _SLICE])
    return names


@contextlib.contextmanager
def _logged(rpc: str, *batch_ids: int) -> Iterator[None]:
    """Log that a shard rpc is refused or fails: its router shows clients no code of ours."""
    try:
        yield
    except ServiceError as error:
        extra = {"rpc": rpc, "batches": list(batch_ids), "code": error.code.name}
        log.warning("a shard rpc was refused", extra={**extra, "reason": error.message})
        raise
