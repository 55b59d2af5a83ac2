"""A shard that obeys the protocol over a unix socket, with a model that costs nothing.

It exists to test the router double and the conformance checks before, and apart from, the real
server. v1 and v2 requests are subsets of v3's on the wire, so all three are read as v3; only v1's
generations need another message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from router import fake_model as model
from router.fake_sequence import Refused, Sequence, invalid
from tokenpod.protos.generate.v1 import generate_pb2 as v1_pb2
from tokenpod.protos.generate.v3 import generate_pb2 as pb

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
        capacity: int = 20_000,
        max_total_tokens: int = 4096,
        tamper: Tamper | None = None,
        urls: tuple[str, ...] = (),
        rank: int = 0,
    ) -> None:
        self.path = path
        self.batches: dict[int, list[Sequence]] = {}
        #: Every call as (method, batch ids).
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._info = pb.InfoResponse(
            requires_padding=requires_padding,
            dtype="torch.float32",
            device_type="cpu",
            support_chunking=support_chunking,
            use_prefix_caching=use_prefix_caching,
            attention_impl="fake",
            block_size=block_size,
        )
        self._capacity = capacity
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
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def _handlers(self, package: str) -> grpc.GenericRpcHandler:
        methods = {
            "Health": (pb.HealthRequest, lambda _: pb.HealthResponse()),
            "Info": (pb.InfoRequest, lambda _: self._info),
            "ServiceDiscovery": (
                pb.ServiceDiscoveryRequest,
                lambda _: pb.ServiceDiscoveryResponse(urls=self._urls),
            ),
            "ClearCache": (pb.ClearCacheRequest, self.clear_cache),
            "FilterBatch": (pb.FilterBatchRequest, self.filter_batch),
            "Warmup": (pb.WarmupRequest, self.warmup),
            "Prefill": (pb.PrefillRequest, self.prefill),
            "Decode": (pb.DecodeRequest, self.decode),
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
                    response_serializer=_serialize_v1
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
            try:
                reply = call(request)
                if self._tamper is not None:
                    self._tamper(name, reply)
            except Refused as error:
                await context.abort(error.code, str(error))
            return reply

        return handle

    # --- the rpcs -----------------------------------------------------------------------------

    def clear_cache(self, request: Any) -> Any:
        if request.HasField("id"):
            self.calls.append(("ClearCache", (request.id,)))
            self.batches.pop(request.id, None)
        else:
            self.calls.append(("ClearCache", ()))
            self.batches.clear()
        return pb.ClearCacheResponse()

    def warmup(self, request: Any) -> Any:
        self.calls.append(("Warmup", (request.batch.id,)))
        self.batches.clear()
        for each in request.batch.requests:
            Sequence(_without_images(each)).advance(len(each.inputs))
        total = request.max_total_tokens or self._max_total_tokens
        return pb.WarmupResponse(
            max_supported_total_tokens=self._capacity,
            max_input_tokens=request.max_input_tokens or total - 1,
            max_total_tokens=total,
        )

    def filter_batch(self, request: Any) -> Any:
        self.calls.append(("FilterBatch", (request.batch_id,)))
        held = self._pop(request.batch_id)
        kept = [each for each in held if each.request.id in set(request.request_ids)]
        if not kept:
            return pb.FilterBatchResponse(batch=pb.CachedBatch(id=request.batch_id))
        self.batches[request.batch_id] = kept
        return pb.FilterBatchResponse(batch=self._describe(request.batch_id))

    def prefill(self, request: Any) -> Any:
        batch = request.batch
        self.calls.append(("Prefill", (batch.id,)))
        joined = request.HasField("cached_batch")
        # Popped first: a router forgets it when this call fails.
        cached = self._pop(request.cached_batch.id) if joined else []
        fresh = [Sequence(each) for each in batch.requests]
        if not fresh:
            raise invalid("batch.requests is empty")
        self.batches.pop(batch.id, None)
        held = sum(each.bound for sequences in self.batches.values() for each in sequences)
        if held + sum(each.bound for each in fresh) > self._capacity:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._capacity} tokens fit")
        chunks = [each.next_tokens for each in cached]
        chunks += [
            each.request.chunk_len if each.request.HasField("chunk_len") else len(each.prompt)
            for each in fresh
        ]
        batch_id = request.cached_batch.id if joined else batch.id
        return self._step(pb.PrefillResponse(), batch_id, cached + fresh, chunks, joined)

    def decode(self, request: Any) -> Any:
        ids = tuple(batch.id for batch in request.batches)
        self.calls.append(("Decode", ids))
        if not ids:
            raise invalid("Must provide at least one batch")
        sequences = [each for batch_id in ids for each in self._pop(batch_id)]
        chunks = [each.next_tokens for each in sequences]
        return self._step(pb.DecodeResponse(), ids[0], sequences, chunks, len(ids) > 1)

    def _step(
        self,
        reply: Any,
        batch_id: int,
        sequences: list[Sequence],
        chunks: list[int],
        joined: bool,
    ) -> Any:
        for index, (sequence, chunk) in enumerate(zip(sequences, chunks, strict=True)):
            if sequence.stopped:
                continue
            generation = sequence.advance(chunk)
            # Each request's generation comes from one shard only.
            if generation is not None and index % len(self._urls) == self._rank:
                reply.generations.append(generation)
        if not all(each.stopped for each in sequences):
            self.batches[batch_id] = sequences
            reply.batch.CopyFrom(self._describe(batch_id))
        reply.forward_ns, reply.decode_ns, reply.total_ns = 2, 1, 4
        if joined:
            reply.concat_ns = 1
        return reply

    def _pop(self, batch_id: int) -> list[Sequence]:
        try:
            return self.batches.pop(batch_id)
        except KeyError:
            raise Refused(
                grpc.StatusCode.NOT_FOUND, f"Batch ID {batch_id} not found in cache."
            ) from None

    def _describe(self, batch_id: int) -> Any:
        held = self.batches[batch_id]
        return pb.CachedBatch(
            id=batch_id,
            request_ids=[each.request.id for each in held],
            size=len(held),
            max_tokens=sum(each.bound for each in held),
            current_tokens=sum(each.next_tokens for each in held),
        )


def _tokens(ids: list[int]) -> Any:
    return pb.TokensResponse(ntokens=len(ids), ids=ids)


def _without_images(request: Any) -> Any:
    chunks = [chunk for chunk in request.input_chunks.chunks if not chunk.HasField("image")]
    del request.input_chunks.chunks[:]
    request.input_chunks.chunks.extend(chunks)
    return request


def _serialize_v1(reply: Any) -> bytes:
    if not isinstance(reply, pb.PrefillResponse | pb.DecodeResponse):
        return bytes(reply.SerializeToString())
    generations = [_generation_v1(each) for each in reply.generations]
    # PrefillResponse and DecodeResponse have one form in v1.
    converted = v1_pb2.DecodeResponse(generations=generations)
    if reply.HasField("batch"):
        converted.batch.ParseFromString(reply.batch.SerializeToString())
    return bytes(converted.SerializeToString())


def _generation_v1(generation: Any) -> Any:
    tokens = generation.tokens
    converted = v1_pb2.Generation(
        request_id=generation.request_id,
        token_id=tokens.ids[0],
        token_logprob=tokens.logprobs[0],
        token_text=tokens.texts[0],
        token_is_special=tokens.is_special[0],
    )
    if generation.HasField("prefill_tokens"):
        converted.prefill_tokens.ParseFromString(generation.prefill_tokens.SerializeToString())
    if generation.HasField("generated_text"):
        converted.generated_text.ParseFromString(generation.generated_text.SerializeToString())
    if generation.top_tokens:
        (top,) = generation.top_tokens
        converted.top_tokens.ids.extend(top.ids)
        converted.top_tokens.logprobs.extend(top.logprobs)
        converted.top_tokens.texts.extend(top.texts)
        converted.top_tokens.is_special.extend(top.is_special)
    return converted
