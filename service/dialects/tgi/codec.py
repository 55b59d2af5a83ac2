"""Messages of TGI's shard protocol to plain values and back: the only module that knows both.

Three generations of the protocol are served; `Fields` says in what their messages differ.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from tokenpod.core.messages import Ready
from tokenpod.service.dialects.tgi.fields import Fields, given, known
from tokenpod.service.serving.calls import (
    CachedBatch,
    PrefillCall,
    ShardBatch,
    ShardGeneration,
    ShardRequest,
    ShardStep,
    TokenList,
    WarmupCall,
)

log = logging.getLogger("tokenpod.shard")

#: Requests that are converted before others get their turn: some milliseconds.
_SLICE_REQUESTS = 128
#: TGI's routers read messages of up to 4 MiB; some room is left for framing.
_MOST_ANSWER_BYTES = 4 * 1024 * 1024 - 4096
#: What generations before the third call a field of `WarmupCall`.
_OLD_WARMUP_NAMES = {"max_input_tokens": "max_input_length"}


class ShardCodec:
    """One generation of the shard protocol.

    Args:
        pb: its generated module.
    """

    def __init__(self, pb: Any) -> None:
        self.pb = pb
        self._has = Fields.of(pb)
        #: What this generation calls the fields of `WarmupCall`, where not by their names.
        self.warmup_names: Mapping[str, str] = (
            _OLD_WARMUP_NAMES
            if "max_input_length" in pb.WarmupRequest.DESCRIPTOR.fields_by_name
            else {}
        )

    # -- in ------------------------------------------------------------------------------------

    async def prefill(self, request: Any) -> PrefillCall:
        """A Prefill's batch, and the cached one to join. Others get their turn in a long one."""
        requests = []
        for at, each in enumerate(request.batch.requests, start=1):
            requests.append(self._request(each))
            if not at % _SLICE_REQUESTS:
                await asyncio.sleep(0)
        batch = ShardBatch(request.batch.id, tuple(requests))
        joins = self._has.cached_batch and request.HasField("cached_batch")
        return PrefillCall(batch, request.cached_batch.id if joins else None)

    def warmup(self, request: Any) -> WarmupCall:
        """A Warmup's limits, of which the first generation has none."""
        return WarmupCall(
            given(request, self.warmup_names.get("max_input_tokens", "max_input_tokens")),
            given(request, "max_total_tokens"),
        )

    def _request(self, request: Any) -> ShardRequest:
        parameters, stopping = request.parameters, request.stopping_parameters
        has, inputs = self._has, request.inputs
        if has.input_chunks and request.input_chunks.chunks:
            # Authoritative where present; `inputs` is the same for shards that know no chunks. A
            # model for text skips images.
            chunks = request.input_chunks.chunks
            inputs = "".join(c.text for c in chunks if c.WhichOneof("chunk") == "text")
        return ShardRequest(
            id=request.id,
            inputs=inputs,
            truncate=request.truncate,
            # Routers before v3 always want them.
            add_special_tokens=request.add_special_tokens if has.add_special_tokens else True,
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
            frequency_penalty=parameters.frequency_penalty if has.frequency_penalty else 0.0,
            seed=parameters.seed,
            watermark=parameters.watermark,
            grammar=parameters.grammar if has.grammar else "",
            grammar_type=parameters.grammar_type if has.grammar else 0,
            adapter_id=request.adapter_id
            if has.adapter_id and request.HasField("adapter_id")
            else None,
            chunk_len=request.chunk_len
            if has.chunk_len and request.HasField("chunk_len")
            else None,
        )

    # -- out -----------------------------------------------------------------------------------

    def info(self, ready: Ready) -> Any:
        """`InfoResponse`: what a router must know of the model."""
        # window_size stays unset: keys and values beyond a window are kept, so it saves no budget.
        return known(
            self.pb.InfoResponse,
            requires_padding=False,
            dtype=f"torch.{ready.dtype}",
            device_type=ready.device_type,
            speculate=0,
            support_chunking=True,
            # Routers would count shared prefixes in their own way; the engine does it by itself.
            use_prefix_caching=False,
            attention_impl="paged",
            block_size=1,
        )

    def warm(self, slots: int, max_input_tokens: int, max_total_tokens: int) -> Any:
        """`WarmupResponse`: tokens that fit in all, and the lengths of one request."""
        return known(
            self.pb.WarmupResponse,
            max_supported_total_tokens=slots,
            max_input_tokens=max_input_tokens,
            max_total_tokens=max_total_tokens,
        )

    def cached_batch(self, batch: CachedBatch) -> Any:
        """`CachedBatch`."""
        message = self.pb.CachedBatch(
            id=batch.id,
            request_ids=batch.request_ids,
            size=len(batch.request_ids),
            max_tokens=batch.max_tokens,
        )
        if self._has.current_tokens:
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
        if self._has.timings:
            response.forward_ns = step.forward_ns
            response.decode_ns = step.decode_ns
            response.total_ns = step.total_ns
            if step.concat_ns is not None and "concat_ns" in response.DESCRIPTOR.fields_by_name:
                response.concat_ns = step.concat_ns
        return response

    def _generation(self, generation: ShardGeneration) -> Any:
        token, text = generation.token, generation.text
        if self._has.scalar_token:
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
            kind = self.pb.PrefillTokens if self._has.scalar_token else self.pb.Tokens
            message.prefill_tokens.CopyFrom(self._tokens(kind, generation.prefill))
        if generation.top is not None:
            if self._has.scalar_token:
                message.top_tokens.CopyFrom(self._tokens(self.pb.TopTokens, generation.top))
            else:
                message.top_tokens.append(self._tokens(self.pb.Tokens, generation.top))
        if text is not None:
            message.generated_text.text = text.text
            message.generated_text.generated_tokens = text.generated_tokens
            message.generated_text.finish_reason = text.finish_reason
            if text.seed is not None:
                message.generated_text.seed = text.seed
            if self._has.prompt_tokens:
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
