"""The generated servicer classes, one a wire generation, over the same two services."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

import grpc

from tokenpod.core.messages import Ready
from tokenpod.protos.generate.v1 import generate_pb2_grpc as v1_grpc
from tokenpod.protos.generate.v2 import generate_pb2_grpc as v2_grpc
from tokenpod.protos.generate.v3 import generate_pb2_grpc as v3_grpc
from tokenpod.service.dialects import convert
from tokenpod.service.dialects.convert import ShardCodec
from tokenpod.service.rpc.admission import Admission
from tokenpod.service.rpc.errors import ServiceError, Unavailable
from tokenpod.service.rpc.memory_budget import Lease
from tokenpod.service.serving.calls import CachedBatch, PrefillCall, ShardStep, WarmupCall
from tokenpod.service.serving.generate import GenerateService

log = logging.getLogger("tokenpod.shard")

#: grpc.aio.ServicerContext, which is generic in its stubs only.
Context = Any

#: Token ids that are written to a message before others get their turn on the event loop.
_IDS_AT_ONCE = 16_384
#: Initial metadata of Info: the model's name.
MODEL_ID_KEY = "tokenpod-model-id"


#: What `Shard` is behind.
_SHARD_RPCS = frozenset(
    {
        *("Health", "Info", "ServiceDiscovery", "ClearCache"),
        *("FilterBatch", "Warmup", "Prefill", "Decode"),
    }
)


class Shard(Protocol):
    """The shard rpcs of a pod, whether it leads or follows."""

    @property
    def urls(self) -> Sequence[str]:
        """Where the leader is: it speaks for every rank."""
        ...

    async def prefill(self, call: PrefillCall) -> ShardStep:
        """New prompts."""
        ...

    async def decode(self, batch_ids: Sequence[int]) -> ShardStep:
        """One more token for each."""
        ...

    async def filter(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch | None:
        """Drop what is not named; None: nothing is left."""
        ...

    async def clear(self, batch_id: int | None) -> None:
        """Forget one batch, or all."""
        ...

    def warmup(self, call: WarmupCall) -> tuple[int, int, int]:
        """(tokens that fit in all, max_input_tokens, max_total_tokens)."""
        ...

    def awaited(self, since: float) -> bool:
        """Whether a router's call runs or is to be expected; see `Batches.awaited`."""
        ...

    async def end(self, sleep: Callable[[float], Awaitable[None]]) -> int:
        """Refuse Prefill and Decode from now on, the open ones too; how many batches were cut.

        Args:
            sleep: may return early, if it has become urgent.
        """
        ...


class Rpcs:
    """What the servicers share: the services behind them, and whether these are there yet.

    Args:
        admission: says no while the server starts or drains.
        generate: the rpcs for applications.
        healthy: whether the engine moves.
    """

    def __init__(
        self, admission: Admission, generate: GenerateService, healthy: Callable[[], bool]
    ) -> None:
        self.admission = admission
        self.generate = generate
        self.healthy = healthy
        self.model_id = ""
        self._shard: Shard | None = None
        self._ready: Ready | None = None

    def start(self, ready: Ready, shard: Shard, *, model_id: str) -> None:
        """The model is ready."""
        self.model_id = model_id
        self._ready = ready
        self._shard = shard

    def check(self, method: str, seconds: float | None = None) -> Lease | None:
        """See `GenerateService.check`."""
        if method.rpartition("/")[2] in _SHARD_RPCS:
            _ = self.shard
            return None
        return self.generate.check(method, seconds)

    @property
    def shard(self) -> Shard:
        """Raises Unavailable until the model is ready."""
        if self._shard is None:
            self.admission.check_open()
            raise Unavailable("the model is not loaded yet", retry_after=1.0)
        return self._shard

    @property
    def ready(self) -> Ready:
        """Raises Unavailable until the model is ready."""
        _ = self.shard
        assert self._ready is not None
        return self._ready


class ShardServicer:
    """The rpcs that every wire generation has.

    Args:
        rpcs: what is behind them.
        codec: this generation's messages.
    """

    def __init__(self, rpcs: Rpcs, codec: ShardCodec) -> None:
        self.rpcs = rpcs
        self.codec = codec

    async def Health(self, request: Any, context: Context) -> Any:
        """OK while the engine moves."""
        _ = self.rpcs.shard
        if not self.rpcs.healthy():
            raise Unavailable("the engine makes no progress", retry_after=1.0)
        return self.codec.pb.HealthResponse()

    async def Info(self, request: Any, context: Context) -> Any:
        """What a router must know about the model."""
        ready = self.rpcs.ready
        # The protocol has no field for it.
        await context.send_initial_metadata(((MODEL_ID_KEY, self.rpcs.model_id),))
        fields = self.codec.pb.InfoResponse.DESCRIPTOR.fields_by_name
        # window_size stays unset: keys and values beyond a window are kept, so it saves no budget.
        values = {
            "requires_padding": False,
            "dtype": f"torch.{ready.dtype}",
            "device_type": ready.device_type,
            "speculate": 0,
            "support_chunking": True,
            # Routers would count shared prefixes in their own way; the engine does it by itself.
            "use_prefix_caching": False,
            "attention_impl": "paged",
            "block_size": 1,
        }
        return self.codec.pb.InfoResponse(**{k: v for k, v in values.items() if k in fields})

    async def ServiceDiscovery(self, request: Any, context: Context) -> Any:
        """The leader alone: it speaks for every rank."""
        return self.codec.pb.ServiceDiscoveryResponse(urls=self.rpcs.shard.urls)

    async def ClearCache(self, request: Any, context: Context) -> Any:
        """Forget one batch, or all."""
        with _logged("ClearCache"):
            await self.rpcs.shard.clear(request.id if request.HasField("id") else None)
        return self.codec.pb.ClearCacheResponse()

    async def FilterBatch(self, request: Any, context: Context) -> Any:
        """Drop what is not named; without a batch in the answer nothing is left."""
        with _logged("FilterBatch", request.batch_id):
            batch = await self.rpcs.shard.filter(request.batch_id, list(request.request_ids))
        filtered = self.codec.cached_batch(batch) if batch else None
        return self.codec.pb.FilterBatchResponse(batch=filtered)

    async def Warmup(self, request: Any, context: Context) -> Any:
        """The true token budget."""
        with _logged("Warmup"):
            slots, most_in, total = self.rpcs.shard.warmup(self.codec.warmup(request))
        response = self.codec.pb.WarmupResponse(max_supported_total_tokens=slots)
        if "max_input_tokens" in response.DESCRIPTOR.fields_by_name:
            response.max_input_tokens = most_in
            response.max_total_tokens = total
        return response

    async def Prefill(self, request: Any, context: Context) -> Any:
        """New prompts."""
        with _logged("Prefill", request.batch.id):
            step = await self.rpcs.shard.prefill(await self.codec.prefill(request))
        return self.codec.step(self.codec.pb.PrefillResponse(), step)

    async def Decode(self, request: Any, context: Context) -> Any:
        """One more token for each."""
        batch_ids = [batch.id for batch in request.batches]
        with _logged("Decode", *batch_ids):
            step = await self.rpcs.shard.decode(batch_ids)
        return self.codec.step(self.codec.pb.DecodeResponse(), step)


@contextlib.contextmanager
def _logged(rpc: str, *batch_ids: int) -> Iterator[None]:
    """A line for a shard rpc that is refused or fails: its router shows clients no code of ours."""
    try:
        yield
    except ServiceError as error:
        extra = {"rpc": rpc, "batches": list(batch_ids), "code": error.code.name}
        log.warning("a shard rpc was refused", extra={**extra, "reason": error.message})
        raise


class ServicerV1(ShardServicer, v1_grpc.TextGenerationServiceServicer):
    """`generate.v1`, with the LightLLM fork's Tokens."""

    async def Tokens(self, request: Any, context: Context) -> Any:
        """Count a text's tokens."""
        tokenised = await self.rpcs.generate.tokens(convert.tokens_call(request))
        return self.codec.pb.TokensResponse(ntokens=tokenised.count)


class ServicerV2(ShardServicer, v2_grpc.TextGenerationServiceServicer):
    """`generate.v2`."""


class ServicerV3(ShardServicer, v3_grpc.TextGenerationServiceServicer):
    """`generate.v3`, with Tokenpod's own Generate and Tokens."""

    async def Tokens(self, request: Any, context: Context) -> Any:
        """Count, or list, the tokens of a text or chat."""
        tokenised = await self.rpcs.generate.tokens(convert.tokens_call(request))
        response = self.codec.pb.TokensResponse(ntokens=tokenised.count)
        for at in range(0, len(tokenised.ids), _IDS_AT_ONCE):
            response.ids.extend(tokenised.ids[at : at + _IDS_AT_ONCE])
            await asyncio.sleep(0)
        return response

    async def Generate(self, request: Any, context: Context) -> None:  # type: ignore[override]
        """Stream a generation."""
        await self.rpcs.generate.generate(request, context)


def add_servicers(rpcs: Rpcs, server: grpc.aio.Server) -> list[str]:
    """Serve every wire generation; returns the services' full names."""
    v1, v2, v3 = convert.codecs()
    v1_grpc.add_TextGenerationServiceServicer_to_server(ServicerV1(rpcs, v1), server)
    v2_grpc.add_TextGenerationServiceServicer_to_server(ServicerV2(rpcs, v2), server)
    v3_grpc.add_TextGenerationServiceServicer_to_server(ServicerV3(rpcs, v3), server)
    services = (codec.pb.DESCRIPTOR.services_by_name for codec in (v1, v2, v3))
    return [service["TextGenerationService"].full_name for service in services]
