"""Protobuf to plain values and back: the only module that knows both.

The three wire generations of the shard protocol differ in a few fields; one `ShardCodec` a
generation hides that. `generate.v2` and `generate.v3` share their layout, `generate.v1` has one
token a step as scalars.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from tokenpod.protos.generate.v1 import generate_pb2 as v1
from tokenpod.protos.generate.v2 import generate_pb2 as v2
from tokenpod.protos.generate.v3 import generate_pb2 as v3
from tokenpod.service.dialects import validate
from tokenpod.service.serving.calls import (
    CachedBatch,
    ChatPrompt,
    GenerateCall,
    Output,
    PrefillCall,
    Prompt,
    Sampling,
    ShardBatch,
    ShardGeneration,
    ShardRequest,
    ShardStep,
    Stopping,
    TokenList,
    TokensCall,
    WarmupCall,
)

log = logging.getLogger("tokenpod.shard")

#: What is converted before others get their turn: some milliseconds each.
_SLICE_IDS = 32_768
_SLICE_REQUESTS = 128

#: TGI's routers read messages of up to 4 MiB; some room is left for framing.
_MOST_ANSWER_BYTES = 4 * 1024 * 1024 - 4096


def _fields(message: Any) -> dict[str, Any]:
    """A message's fields by name; None where one that may be absent is."""
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
    }


async def generate_call(request: v3.GenerateRequest) -> GenerateCall:
    """What `request` asks for. Other tasks get their turn while long lists are copied."""
    sampling, stopping, output = request.sampling, request.stopping, request.output
    return GenerateCall(
        prompt=await _prompt(request),
        sampling=Sampling(**_fields(sampling) | {"logit_bias": dict(sampling.logit_bias)}),
        stopping=Stopping(
            max_new_tokens=stopping.max_new_tokens if stopping.HasField("max_new_tokens") else None,
            min_new_tokens=stopping.min_new_tokens,
            stop_sequences=tuple(stopping.stop_sequences),
            stop_token_ids=tuple(stopping.stop_token_ids),
            ignore_eos=stopping.ignore_eos,
            include_stop_sequence=stopping.include_stop_sequence,
            time_limit_ms=stopping.time_limit_ms,
        ),
        output=Output(
            stream=output.stream if output.HasField("stream") else True,
            logprobs=output.logprobs,
            top_n_tokens=output.top_n_tokens,
            prompt_logprobs=output.prompt_logprobs,
        ),
        truncate=request.truncate,
        request_id=request.request_id,
        priority=request.priority,
    )


def tokens_call(request: v3.TokensRequest | v1.TokensRequest) -> TokensCall:
    """What `request` asks for. v1 has the text alone."""
    if isinstance(request, v1.TokensRequest):
        return TokensCall(prompt=request.text)
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    prompt = _chat(request.chat) if request.HasField("chat") else request.text
    return TokensCall(prompt, special, request.return_ids)


async def _prompt(request: v3.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return await _copied(request.token_ids.ids)
        case "chat":
            return _chat(request.chat)
        case _:
            return None


async def _copied(ids: Sequence[int]) -> tuple[int, ...]:
    copied: list[int] = []
    for at in range(0, len(ids), _SLICE_IDS):
        if at:
            await asyncio.sleep(0)
        copied += ids[at : at + _SLICE_IDS]
    return tuple(copied)


def _chat(chat: v3.Chat) -> ChatPrompt:
    validate.check_chat_length(len(chat.messages))
    generation = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return ChatPrompt([(m.role, m.content) for m in chat.messages], generation)


class ShardCodec:
    """One wire generation of the shard protocol.

    Args:
        pb: its generated module.
    """

    def __init__(self, pb: Any) -> None:
        self.pb = pb
        fields = pb.Request.DESCRIPTOR.fields_by_name
        self._has_chunks = "input_chunks" in fields
        self._has_timings = "forward_ns" in pb.DecodeResponse.DESCRIPTOR.fields_by_name
        self._has_grammar = "grammar" in pb.NextTokenChooserParameters.DESCRIPTOR.fields_by_name
        self._has_current = "current_tokens" in pb.CachedBatch.DESCRIPTOR.fields_by_name
        self._scalar_token = "token_id" in pb.Generation.DESCRIPTOR.fields_by_name

    # -- in ------------------------------------------------------------------------------------

    async def prefill(self, request: Any) -> PrefillCall:
        """A Prefill's batch, and the cached one to join. Others get their turn in a long one."""
        requests = []
        for at, each in enumerate(request.batch.requests, start=1):
            requests.append(self._request(each))
            if not at % _SLICE_REQUESTS:
                await asyncio.sleep(0)
        batch = ShardBatch(request.batch.id, tuple(requests))
        joins = self._has_chunks and request.HasField("cached_batch")
        return PrefillCall(batch, request.cached_batch.id if joins else None)

    def warmup(self, request: Any) -> WarmupCall:
        """A Warmup's limits; v1 has none, v2 calls one of them max_input_length."""
        if self._has_chunks:
            most_in = request.max_input_tokens if request.HasField("max_input_tokens") else None
            total = request.max_total_tokens if request.HasField("max_total_tokens") else None
            return WarmupCall(most_in, request.max_prefill_tokens, total)
        if self._has_grammar:
            return WarmupCall(
                request.max_input_length or None,
                request.max_prefill_tokens,
                request.max_total_tokens or None,
                input_field="max_input_length",
            )
        return WarmupCall(None, 0, None)

    def _request(self, request: Any) -> ShardRequest:
        parameters, stopping = request.parameters, request.stopping_parameters
        inputs = request.inputs
        if self._has_chunks and request.input_chunks.chunks:
            # Authoritative where present; `inputs` is the same for shards that know no chunks. A
            # model for text skips images.
            chunks = request.input_chunks.chunks
            inputs = "".join(c.text for c in chunks if c.WhichOneof("chunk") == "text")
        newest = self._has_chunks
        grammar = self._has_grammar
        return ShardRequest(
            id=request.id,
            inputs=inputs,
            truncate=request.truncate,
            # Routers before v3 always want them.
            add_special_tokens=request.add_special_tokens if newest else True,
            prefill_logprobs=request.prefill_logprobs,
            top_n_tokens=request.top_n_tokens,
            max_new_tokens=stopping.max_new_tokens,
            stop_sequences=tuple(stopping.stop_sequences),
            ignore_eos=stopping.ignore_eos_token,
            do_sample=parameters.do_sample,
            temperature=parameters.temperature,
            top_k=parameters.top_k,
            top_p=parameters.top_p,
            typical_p=parameters.typical_p,
            repetition_penalty=parameters.repetition_penalty,
            frequency_penalty=parameters.frequency_penalty if grammar else 0.0,
            seed=parameters.seed,
            watermark=parameters.watermark,
            grammar=parameters.grammar if grammar else "",
            grammar_type=parameters.grammar_type if grammar else 0,
            adapter_id=request.adapter_id if newest and request.HasField("adapter_id") else None,
            chunk_len=request.chunk_len if newest and request.HasField("chunk_len") else None,
        )

    # -- out -----------------------------------------------------------------------------------

    def cached_batch(self, batch: CachedBatch) -> Any:
        """`CachedBatch`."""
        message = self.pb.CachedBatch(
            id=batch.id,
            request_ids=batch.request_ids,
            size=len(batch.request_ids),
            max_tokens=batch.max_tokens,
        )
        if self._has_current:
            message.current_tokens = batch.current_tokens
        return message

    def step(self, response: Any, step: ShardStep) -> Any:
        """Fill a PrefillResponse or DecodeResponse; returns it.

        Log probabilities of prompts are left out where the answer would be too long for a router.
        """
        response.generations.extend(self._generation(g) for g in step.generations)
        _shorten(response)
        if step.batch is not None:
            response.batch.CopyFrom(self.cached_batch(step.batch))
        if self._has_timings:
            response.forward_ns = step.forward_ns
            response.decode_ns = step.decode_ns
            response.total_ns = step.total_ns
            if step.concat_ns is not None and "concat_ns" in response.DESCRIPTOR.fields_by_name:
                response.concat_ns = step.concat_ns
        return response

    def _generation(self, generation: ShardGeneration) -> Any:
        token, text = generation.token, generation.text
        if self._scalar_token:
            message = self.pb.Generation(
                request_id=generation.request_id,
                token_id=token.ids[0],
                token_logprob=token.logprobs[0],
                token_text=token.texts[0],
                token_is_special=token.special[0],
            )
        else:
            message = self.pb.Generation(
                request_id=generation.request_id, tokens=self._tokens(self.pb.Tokens, token)
            )
        if generation.prefill is not None:
            kind = self.pb.PrefillTokens if self._scalar_token else self.pb.Tokens
            message.prefill_tokens.CopyFrom(self._tokens(kind, generation.prefill))
        if generation.top is not None:
            if self._scalar_token:
                message.top_tokens.CopyFrom(self._tokens(self.pb.TopTokens, generation.top))
            else:
                message.top_tokens.append(self._tokens(self.pb.Tokens, generation.top))
        if text is not None:
            message.generated_text.text = text.text
            message.generated_text.generated_tokens = text.generated_tokens
            message.generated_text.finish_reason = text.finish_reason
            if text.seed is not None:
                message.generated_text.seed = text.seed
            if self._scalar_token:
                message.generated_text.prompt_tokens = text.prompt_tokens
        return message

    @staticmethod
    def _tokens(kind: Any, tokens: TokenList) -> Any:
        message = kind(ids=tokens.ids, logprobs=tokens.logprobs, texts=tokens.texts)
        if "is_special" in kind.DESCRIPTOR.fields_by_name:
            message.is_special.extend(tokens.special)
        return message


def _shorten(response: Any) -> None:
    """Leave out prompts' log probabilities, the longest first, until a router can read the rest."""
    scored = [g for g in response.generations if g.HasField("prefill_tokens")]
    if not scored:
        return
    excess = response.ByteSize() - _MOST_ANSWER_BYTES
    for generation in sorted(scored, key=lambda g: len(g.prefill_tokens.ids), reverse=True):
        if excess <= 0:
            return
        size = generation.prefill_tokens.ByteSize()
        extra = {"request": generation.request_id, "bytes": size}
        log.warning(
            "log probabilities of a prompt are left out: a router can't read so much", extra=extra
        )
        generation.ClearField("prefill_tokens")
        excess -= size


def codecs() -> tuple[ShardCodec, ShardCodec, ShardCodec]:
    """Every wire generation, oldest first."""
    return (ShardCodec(v1), ShardCodec(v2), ShardCodec(v3))
