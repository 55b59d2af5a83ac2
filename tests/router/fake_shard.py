"""A shard that obeys the protocol over a unix socket, with a model that costs nothing.

It exists to test the router double, its stories and the conformance checks before, and apart from,
the real server. v1 and v2 requests are subsets of v3's on the wire, so all three are read as v3;
only v1's generations need another message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

import grpc

from router import fake_model as model
from router.fake_batches import Batches, Refused
from router.fake_rows import Rows
from router.fake_sequence import Sequence
from router.fake_v1 import serialize_v1
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

#: Called with (method, reply) before a reply leaves; may change it or raise `Refused`.
Tamper = Callable[[str, Any], None]


class FakeShard:
    """Serve with `async with FakeShard(path)`. `path` is the socket's, `-0` included."""

    def __init__(
        self,
        path: str,
        *,
        support_chunking: bool = False,
        use_prefix_caching: bool = False,
        requires_padding: bool = False,
        block_size: int = 1,
        rows: int = 64,
        capacity: int = 20_000,
        max_total_tokens: int = 4096,
        lease: float = 30.0,
        tamper: Tamper | None = None,
        urls: tuple[str, ...] = (),
        rank: int = 0,
    ) -> None:
        self.path = path
        self.rows = Rows(rows, capacity)
        #: Every call as (method, batch ids).
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        #: Every request of a Prefill, as it came.
        self.requests: list[Any] = []
        self._batches = Batches(self.rows, max_total_tokens=max_total_tokens, lease=lease)
        self._info = pb.InfoResponse(
            requires_padding=requires_padding,
            dtype="torch.float32",
            device_type="cpu",
            support_chunking=support_chunking,
            use_prefix_caching=use_prefix_caching,
            attention_impl="fake",
            block_size=block_size,
        )
        self._max_total_tokens = max_total_tokens
        self._tamper = tamper
        self._urls = urls or (f"unix://{path}",)
        self._rank = rank
        self._server = grpc.aio.server()
        for package in ("generate.v1", "generate.v2", "generate.v3"):
            self._server.add_generic_rpc_handlers((self._handlers(package),))
        self._server.add_insecure_port(f"unix:{path}")

    async def __aenter__(self) -> FakeShard:
        await self._server.start()
        self._expiry = asyncio.create_task(self._batches.expire())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    @property
    def batches(self) -> dict[int, list[Sequence]]:
        return self._batches.held

    async def drain(self, seconds: float) -> None:
        """Stop as SIGTERM does: what was taken is served for this long, then all is refused."""
        await self._batches.drain(seconds)
        # The last answer may still be on its way.
        await self._server.stop(1)
        self._expiry.cancel()

    async def kill(self) -> None:
        await self._server.stop(None)
        self._expiry.cancel()

    # --- the rpcs -----------------------------------------------------------------------------

    def _handlers(self, package: str) -> grpc.GenericRpcHandler:
        methods = {
            "Health": (pb.HealthRequest, lambda _: pb.HealthResponse()),
            "Info": (pb.InfoRequest, lambda _: self._info),
            "ServiceDiscovery": (
                pb.ServiceDiscoveryRequest,
                lambda _: pb.ServiceDiscoveryResponse(urls=self._urls),
            ),
            "ClearCache": (pb.ClearCacheRequest, self._clear_cache),
            "FilterBatch": (pb.FilterBatchRequest, self._filter_batch),
            "Warmup": (pb.WarmupRequest, self._warmup),
            "Prefill": (pb.PrefillRequest, self._prefill),
            "Decode": (pb.DecodeRequest, self._decode),
            "Tokens": (
                pb.TokensRequest,
                lambda r: _tokens(model.encode(r.text, special=True)),
            ),
        }
        return grpc.method_handlers_generic_handler(
            f"{package}.TextGenerationService",
            {
                name: grpc.unary_unary_rpc_method_handler(
                    self._handler(name, call, package),
                    request_deserializer=request.FromString,
                    response_serializer=serialize_v1
                    if package == "generate.v1"
                    else lambda reply: reply.SerializeToString(),
                )
                for name, (request, call) in methods.items()
            },
        )

    def _handler(self, name: str, call: Callable[[Any], Any], package: str) -> Any:
        async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if package != "generate.v3" and name in ("Prefill", "Warmup"):
                # Routers before v3 could not turn them off.
                for each in request.batch.requests:
                    each.add_special_tokens = True
            reply = None
            try:
                answer = call(request)
                reply = await answer if isawaitable(answer) else answer
                if name in ("Prefill", "Decode"):
                    self._keep_own(reply)
                if self._tamper is not None:
                    self._tamper(name, reply)
            except Refused as error:
                if name in ("Prefill", "Decode") and reply is not None:
                    self._batches.release([reply.batch.id])
                await context.abort(error.code, str(error))
            return reply

        return handle

    def _keep_own(self, reply: Any) -> None:
        """Each request's generation comes from one shard only."""
        if len(self._urls) > 1:
            own = [each for each in reply.generations if self._is_own(each.request_id)]
            del reply.generations[:]
            reply.generations.extend(own)

    def _is_own(self, request_id: int) -> bool:
        return request_id % len(self._urls) == self._rank

    def _clear_cache(self, request: Any) -> Any:
        batch_id = request.id if request.HasField("id") else None
        self.calls.append(("ClearCache", () if batch_id is None else (batch_id,)))
        self._batches.clear(batch_id)
        return pb.ClearCacheResponse()

    def _warmup(self, request: Any) -> Any:
        self.calls.append(("Warmup", (request.batch.id,)))
        self._batches.clear(None)
        self._batches.max_prefill_tokens = request.max_prefill_tokens
        for each in request.batch.requests:
            # What costs most here, for nothing.
            each.prefill_logprobs = False
            Sequence(each).advance(len(each.inputs))
        total = request.max_total_tokens or self._max_total_tokens
        return pb.WarmupResponse(
            max_supported_total_tokens=self.rows.slots,
            max_input_tokens=request.max_input_tokens or total - 1,
            max_total_tokens=total,
        )

    def _filter_batch(self, request: Any) -> Any:
        self.calls.append(("FilterBatch", (request.batch_id,)))
        return self._batches.filter(request.batch_id, request.request_ids)

    def _prefill(self, request: Any) -> Any:
        self.calls.append(("Prefill", (request.batch.id,)))
        self.requests.extend(request.batch.requests)
        return self._batches.prefill(request)

    def _decode(self, request: Any) -> Any:
        self.calls.append(("Decode", tuple(batch.id for batch in request.batches)))
        return self._batches.decode(request)


def _tokens(ids: list[int]) -> Any:
    return pb.TokensResponse(ntokens=len(ids), ids=ids)
