"""The three wire generations: each turns records into its protobuf messages and back.

Field numbers are what is under test, so each generation uses the stubs of its own proto file.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import grpc

from router.records import (
    Batch,
    CachedBatch,
    GeneratedText,
    Generation,
    Request,
    Sampling,
    ShardInfo,
    StepReply,
    TokenRun,
    WarmupReply,
)
from tokenpod_client.protos.generate.v1 import generate_pb2 as v1_pb2
from tokenpod_client.protos.generate.v1 import generate_pb2_grpc as v1_grpc
from tokenpod_client.protos.generate.v2 import generate_pb2 as v2_pb2
from tokenpod_client.protos.generate.v2 import generate_pb2_grpc as v2_grpc
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3_pb2
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as v3_grpc


class Wire:
    """What the generations share; v2 as it is."""

    name = "v2"
    pb: ModuleType = v2_pb2
    stubs: ModuleType = v2_grpc

    def __repr__(self) -> str:
        return self.name

    def stub(self, channel: grpc.aio.Channel) -> Any:
        return self.stubs.TextGenerationServiceStub(channel)

    # --- records to messages ------------------------------------------------------------------

    def batch(self, batch: Batch) -> Any:
        return self.pb.Batch(
            id=batch.id,
            requests=[self.request(each) for each in batch.requests],
            size=len(batch.requests),
            max_tokens=batch.max_tokens,
            **self._batch_extras(batch),
        )

    def request(self, request: Request) -> Any:
        return self.pb.Request(
            id=request.id,
            inputs=request.inputs,
            truncate=request.truncate,
            parameters=self._sampling(request.sampling),
            stopping_parameters=self.pb.StoppingCriteriaParameters(
                max_new_tokens=request.max_new_tokens,
                stop_sequences=request.stop_sequences,
                ignore_eos_token=request.ignore_eos_token,
            ),
            prefill_logprobs=request.prefill_logprobs,
            top_n_tokens=request.top_n_tokens,
            **self._request_extras(request),
        )

    def cached_batch(self, batch: CachedBatch) -> Any:
        return self.pb.CachedBatch(
            id=batch.id,
            request_ids=batch.request_ids,
            size=batch.size,
            max_tokens=batch.max_tokens,
            **self._cached_batch_extras(batch),
        )

    def prefill_request(self, batch: Batch, cached: CachedBatch | None) -> Any:
        if cached is not None:
            raise AssertionError(f"{self.name} has no Prefill with a cached batch")
        return self.pb.PrefillRequest(batch=self.batch(batch))

    def warmup_request(
        self, batch: Batch, max_input: int | None, max_prefill: int, max_total: int | None
    ) -> Any:
        return self.pb.WarmupRequest(
            batch=self.batch(batch),
            max_input_length=max_input,
            max_prefill_tokens=max_prefill,
            max_total_tokens=max_total,
        )

    def _sampling(self, sampling: Sampling) -> Any:
        return self.pb.NextTokenChooserParameters(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            typical_p=sampling.typical_p,
            do_sample=sampling.do_sample,
            seed=sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            watermark=sampling.watermark,
            **self._sampling_extras(sampling),
        )

    def _sampling_extras(self, sampling: Sampling) -> dict[str, Any]:
        return {
            "frequency_penalty": sampling.frequency_penalty,
            "grammar": sampling.grammar,
            "grammar_type": int(sampling.grammar_type),
        }

    def _request_extras(self, request: Request) -> dict[str, Any]:
        return {}

    def _batch_extras(self, batch: Batch) -> dict[str, Any]:
        return {}

    def _cached_batch_extras(self, batch: CachedBatch) -> dict[str, Any]:
        return {}

    # --- messages to records ------------------------------------------------------------------

    def read_info(self, info: Any) -> ShardInfo:
        return ShardInfo(
            requires_padding=info.requires_padding,
            dtype=info.dtype,
            device_type=info.device_type,
            window_size=info.window_size if info.HasField("window_size") else None,
            speculate=info.speculate,
        )

    def read_warmup(self, reply: Any) -> WarmupReply:
        budget = reply.max_supported_total_tokens
        known = reply.HasField("max_supported_total_tokens")
        return WarmupReply(budget if known else -1, 0, 0)

    def read_step(self, reply: Any) -> StepReply:
        generations = tuple(self.read_generation(each) for each in reply.generations)
        batch = self.read_cached_batch(reply.batch) if reply.HasField("batch") else None
        return StepReply(generations, batch, **self._read_timings(reply))

    def _read_timings(self, reply: Any) -> dict[str, Any]:
        # v2's PrefillResponse joins nothing and has no concat_ns.
        joins = "concat_ns" in reply.DESCRIPTOR.fields_by_name
        return {
            "forward_ns": reply.forward_ns,
            "decode_ns": reply.decode_ns,
            "total_ns": reply.total_ns,
            "concat_ns": reply.concat_ns if joins and reply.HasField("concat_ns") else None,
        }

    def read_cached_batch(self, batch: Any) -> CachedBatch:
        return CachedBatch(batch.id, tuple(batch.request_ids), batch.size, batch.max_tokens)

    def read_generation(self, generation: Any) -> Generation:
        has = generation.HasField
        return Generation(
            request_id=generation.request_id,
            prefill_tokens=_run(generation.prefill_tokens) if has("prefill_tokens") else None,
            tokens=_run(generation.tokens) if has("tokens") else None,
            generated_text=_text(generation),
            top_tokens=tuple(_run(each) for each in generation.top_tokens),
        )


class V1(Wire):
    """TGI 0.9.4 to 1.2.0: one token a generation, no timings, warm-up without limits."""

    name = "v1"
    pb = v1_pb2
    stubs = v1_grpc

    def warmup_request(
        self, batch: Batch, max_input: int | None, max_prefill: int, max_total: int | None
    ) -> Any:
        return self.pb.WarmupRequest(batch=self.batch(batch))

    def _sampling_extras(self, sampling: Sampling) -> dict[str, Any]:
        return {}

    def read_info(self, info: Any) -> ShardInfo:
        return ShardInfo(
            requires_padding=info.requires_padding,
            dtype=info.dtype,
            device_type=info.device_type,
            window_size=info.window_size if info.HasField("window_size") else None,
        )

    def _read_timings(self, reply: Any) -> dict[str, Any]:
        return {}

    def read_generation(self, generation: Any) -> Generation:
        prefill, top = generation.prefill_tokens, generation.top_tokens
        return Generation(
            request_id=generation.request_id,
            prefill_tokens=TokenRun(
                tuple(prefill.ids), tuple(prefill.logprobs), tuple(prefill.texts)
            )
            if generation.HasField("prefill_tokens")
            else None,
            tokens=TokenRun(
                (generation.token_id,),
                (generation.token_logprob,),
                (generation.token_text,),
                (generation.token_is_special,),
            ),
            generated_text=_text(generation),
            top_tokens=(_run(top),) if generation.HasField("top_tokens") else (),
        )


class V2(Wire):
    """TGI 1.4.1 to 2.0.4, and `text-generation-router-v2` ever since."""


class V3(Wire):
    """TGI 2.4.1 to 3.3.7."""

    name = "v3"
    pb = v3_pb2
    stubs = v3_grpc

    def prefill_request(self, batch: Batch, cached: CachedBatch | None) -> Any:
        return self.pb.PrefillRequest(
            batch=self.batch(batch),
            cached_batch=None if cached is None else self.cached_batch(cached),
        )

    def warmup_request(
        self, batch: Batch, max_input: int | None, max_prefill: int, max_total: int | None
    ) -> Any:
        return self.pb.WarmupRequest(
            batch=self.batch(batch),
            max_input_tokens=max_input,
            max_prefill_tokens=max_prefill,
            max_total_tokens=max_total,
        )

    def _request_extras(self, request: Request) -> dict[str, Any]:
        chunks = request.chunks if request.chunks is not None else (request.inputs,)
        return {
            "input_chunks": self.pb.Input(chunks=[self._chunk(each) for each in chunks]),
            "blocks": request.blocks,
            "slots": request.slots,
            "cache_len": request.cache_len,
            "add_special_tokens": request.add_special_tokens,
            "chunk_len": request.chunk_len,
            "adapter_id": request.adapter_id,
        }

    def _chunk(self, chunk: Any) -> Any:
        if isinstance(chunk, str):
            return self.pb.InputChunk(text=chunk)
        return self.pb.InputChunk(image=self.pb.Image(data=chunk.data, mimetype=chunk.mimetype))

    def _batch_extras(self, batch: Batch) -> dict[str, Any]:
        return {"max_blocks": batch.max_blocks}

    def _cached_batch_extras(self, batch: CachedBatch) -> dict[str, Any]:
        return {"current_tokens": batch.current_tokens}

    def read_info(self, info: Any) -> ShardInfo:
        return ShardInfo(
            requires_padding=info.requires_padding,
            dtype=info.dtype,
            device_type=info.device_type,
            window_size=info.window_size if info.HasField("window_size") else None,
            speculate=info.speculate,
            support_chunking=info.support_chunking,
            use_prefix_caching=info.use_prefix_caching,
            attention_impl=info.attention_impl,
            block_size=info.block_size,
        )

    def read_warmup(self, reply: Any) -> WarmupReply:
        known = reply.HasField("max_supported_total_tokens")
        return WarmupReply(
            reply.max_supported_total_tokens if known else -1,
            reply.max_input_tokens,
            reply.max_total_tokens,
        )

    def read_cached_batch(self, batch: Any) -> CachedBatch:
        return CachedBatch(
            batch.id,
            tuple(batch.request_ids),
            batch.size,
            batch.max_tokens,
            batch.current_tokens,
        )


WIRES: tuple[Wire, ...] = (V1(), V2(), V3())


def _run(tokens: Any) -> TokenRun:
    return TokenRun(
        tuple(tokens.ids), tuple(tokens.logprobs), tuple(tokens.texts), tuple(tokens.is_special)
    )


def _text(generation: Any) -> GeneratedText | None:
    if not generation.HasField("generated_text"):
        return None
    text = generation.generated_text
    return GeneratedText(
        text=text.text,
        generated_tokens=text.generated_tokens,
        finish_reason=int(text.finish_reason),
        seed=text.seed if text.HasField("seed") else None,
    )
