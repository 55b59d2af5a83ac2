"""A shard that obeys the protocol over a unix socket, with a model that costs nothing.

It exists to test the router double and the conformance checks before, and apart from, the real
server. v1 and v2 requests are subsets of v3's on the wire, so all three are read as v3; only v1's
generations need another message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grpc

from router import fake_model as model
from tokenpod.protos.generate.v1 import generate_pb2 as v1_pb2
from tokenpod.protos.generate.v3 import generate_pb2 as pb

#: Called with (method, reply) before a reply leaves; may change it or raise `Refused`.
Tamper = Callable[[str, Any], None]

#: TGI matches stop sequences in the last 200 characters once a text exceeds 300.
STOP_WINDOW, STOP_LIMIT = 200, 300


class Refused(Exception):
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def invalid(message: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)


class Sequence:
    """One request in a batch."""

    def __init__(self, request: Any) -> None:
        _refuse_unsupported(request)
        chunks = request.input_chunks.chunks
        text = "".join(chunk.text for chunk in chunks) if chunks else request.inputs
        prompt = model.encode(text, special=request.add_special_tokens)
        self.request = request
        self.prompt = prompt[-request.truncate :] if request.truncate else prompt
        self.done = 0
        self.output: list[int] = []
        self.stopped = False
        self._matched = ""
        self._context = model.digest(self.prompt)

    @property
    def bound(self) -> int:
        """Tokens that it may come to hold."""
        return len(self.prompt) + self.request.stopping_parameters.max_new_tokens

    @property
    def next_tokens(self) -> int:
        """Tokens that its next forward processes."""
        return 0 if self.stopped else max(1, len(self.prompt) - self.done)

    def advance(self, chunk: int) -> Any | None:
        """Process up to `chunk` prompt tokens; the generation that follows a complete prompt."""
        if self.done < len(self.prompt):
            self.done = min(len(self.prompt), self.done + chunk)
            if self.done < len(self.prompt):
                return None
        return self._generate()

    def _generate(self) -> Any:
        params, request = self.request.parameters, self.request
        temperature = params.temperature or 1.0
        sampled = params.do_sample or temperature != 1.0 or params.top_k != 0
        sampled = sampled or 0 < params.top_p < 1 or 0 < params.typical_p < 1
        scores = model.logits(self._context)
        index = model.choose(
            scores, temperature, params.seed if sampled else None, len(self.output)
        )
        token = model.CANDIDATES[index]
        generation = pb.Generation(
            request_id=request.id,
            tokens=_run([token], [model.logprobs(scores, temperature)[index]], flags=True),
        )
        if request.top_n_tokens:
            raw = model.logprobs(scores)
            best = model.top(raw, request.top_n_tokens)
            generation.top_tokens.append(
                _run([model.CANDIDATES[i] for i in best], [raw[i] for i in best], flags=True)
            )
        if request.prefill_logprobs and not self.output:
            generation.prefill_tokens.CopyFrom(_run(self.prompt, self._prompt_logprobs()))
        self.output.append(token)
        self._context = model.digest([token], self._context)
        reason = self._finish_reason(token)
        if reason is not None:
            self.stopped = True
            generation.generated_text.text = "".join(map(model.piece, self.output))
            generation.generated_text.generated_tokens = len(self.output)
            generation.generated_text.finish_reason = reason
            if sampled:
                generation.generated_text.seed = params.seed
        return generation

    def _prompt_logprobs(self) -> list[float]:
        values, context = [float("nan")], 0
        for last, token in zip(self.prompt, self.prompt[1:], strict=False):
            context = model.digest([last], context)
            known = token in model.CANDIDATES
            values.append(
                model.logprobs(model.logits(context))[model.CANDIDATES.index(token)]
                if known
                else -20.0
            )
        return values

    def _finish_reason(self, token: int) -> int | None:
        stopping = self.request.stopping_parameters
        if len(self.output) >= stopping.max_new_tokens:
            return int(pb.FINISH_REASON_LENGTH)
        if token == model.EOS and not stopping.ignore_eos_token:
            return int(pb.FINISH_REASON_EOS_TOKEN)
        self._matched += model.piece(token)
        if len(self._matched) > STOP_LIMIT:
            self._matched = self._matched[-STOP_WINDOW:]
        if any(re.search(re.escape(s) + "$", self._matched) for s in stopping.stop_sequences):
            return int(pb.FINISH_REASON_STOP_SEQUENCE)
        return None


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
        if not request.request_ids:
            raise invalid("request_ids is empty: at least one request must stay")
        held = self._pop(request.batch_id)
        kept = [each for each in held if each.request.id in set(request.request_ids)]
        self.batches[request.batch_id] = kept
        return pb.FilterBatchResponse(batch=self._describe(request.batch_id))

    def prefill(self, request: Any) -> Any:
        batch = request.batch
        self.calls.append(("Prefill", (batch.id,)))
        fresh = [Sequence(each) for each in batch.requests]
        if not fresh:
            raise invalid("batch.requests is empty")
        self.batches.pop(batch.id, None)
        held = sum(each.bound for sequences in self.batches.values() for each in sequences)
        if held + sum(each.bound for each in fresh) > self._capacity:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._capacity} tokens fit")
        joined = request.HasField("cached_batch")
        cached = self._pop(request.cached_batch.id) if joined else []
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


def _refuse_unsupported(request: Any) -> None:
    if request.parameters.grammar or request.parameters.grammar_type:
        raise invalid("parameters.grammar is not supported")
    if request.HasField("adapter_id"):
        raise invalid(f"adapter_id {request.adapter_id!r} is not supported")
    if any(chunk.HasField("image") for chunk in request.input_chunks.chunks):
        raise invalid("input_chunks has an image; this model takes text only")


def _tokens(ids: list[int]) -> Any:
    return pb.TokensResponse(ntokens=len(ids), ids=ids)


def _without_images(request: Any) -> Any:
    chunks = [chunk for chunk in request.input_chunks.chunks if not chunk.HasField("image")]
    del request.input_chunks.chunks[:]
    request.input_chunks.chunks.extend(chunks)
    return request


def _run(ids: list[int], logprobs: list[float], *, flags: bool = False) -> Any:
    return pb.Tokens(
        ids=ids,
        logprobs=logprobs,
        texts=[model.piece(token) for token in ids],
        is_special=[token in model.SPECIAL for token in ids] if flags else None,
    )


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
