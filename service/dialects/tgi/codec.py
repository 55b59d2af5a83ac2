"""Messages of TGI's shard protocol to plain values and back: the only module that knows both.

Three generations of the protocol are served. They differ in a few fields, which came or went one by
one; whether a generation has a field is read off its descriptors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tokenpod.core.messages import Ready
from tokenpod.service.calls.call import (
    AskedConstraint,
    CachedBatch,
    ConstraintKind,
    ShardBatch,
    ShardGeneration,
    ShardRequest,
    ShardStep,
    TokenList,
)
from tokenpod.service.calls.images import GivenImage

log = logging.getLogger("tokenpod.shard")

#: Requests that are converted before others get their turn: some milliseconds.
_SLICE_REQUESTS = 128
#: TGI's routers read messages of up to 4 MiB; some room is left for framing.
_MOST_ANSWER_BYTES = 4 * 1024 * 1024 - 4096
#: GRAMMAR_TYPE_NONE.
_NO_GRAMMAR = 0
#: What generations before the third call a field of `WarmupRequest`.
_OLD_WARMUP_NAMES = {"max_input_tokens": "max_input_length"}


class ShardCodec:
    """One generation of the shard protocol.

    Args:
        pb: its generated module.
    """

    def __init__(self, pb: Any) -> None:
        self.pb = pb
        #: Whether a step's token is written as scalars; else as lists of one.
        self._scalar = "token_id" in pb.Generation.DESCRIPTOR.fields_by_name
        #: What this generation calls the fields of a third one's `WarmupRequest`.
        self.warmup_names: Mapping[str, str] = (
            _OLD_WARMUP_NAMES
            if "max_input_length" in pb.WarmupRequest.DESCRIPTOR.fields_by_name
            else {}
        )

    # -- in ------------------------------------------------------------------------------------

    async def prefill(self, request: Any) -> tuple[ShardBatch, int | None]:
        """A Prefill's batch, and the id of the cached one that it joins.

        Other tasks get their turn while a long one is converted.
        """
        requests = []
        for at, each in enumerate(request.batch.requests, start=1):
            requests.append(self._request(each))
            if not at % _SLICE_REQUESTS:
                await asyncio.sleep(0)
        batch = ShardBatch(request.batch.id, tuple(requests))
        cached = _given(request, "cached_batch")
        return batch, cached.id if cached is not None else None

    def warmup(self, request: Any) -> tuple[int | None, int | None]:
        """A Warmup's limits on prompt and total, of which the first generation has none."""
        return (
            _given(request, self.warmup_names.get("max_input_tokens", "max_input_tokens")),
            _given(request, "max_total_tokens"),
        )

    def _request(self, request: Any) -> ShardRequest:
        parameters, stopping = request.parameters, request.stopping_parameters
        inputs, chunked = request.inputs, _given(request, "input_chunks")
        images: list[GivenImage] = []
        places: list[int] = []
        if chunked is not None and chunked.chunks:
            # Authoritative where present; `inputs` is the same for shards that know no chunks.
            inputs = ""
            for at, each in enumerate(chunked.chunks):
                if each.WhichOneof("chunk") == "image":
                    images.append(GivenImage(each.image.data, f"input_chunks[{at}].image.data"))
                    places.append(len(inputs))
                else:
                    inputs += each.text
        return ShardRequest(
            id=request.id,
            inputs=inputs,
            truncate=request.truncate,
            # Routers before v3 always want them.
            add_special_tokens=getattr(request, "add_special_tokens", True),
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
            frequency_penalty=getattr(parameters, "frequency_penalty", 0.0),
            seed=parameters.seed,
            watermark=parameters.watermark,
            constraint=_constraint(parameters),
            adapter_id=_given(request, "adapter_id"),
            chunk_len=_given(request, "chunk_len"),
            several_tokens=not self._scalar,
            images=images,
            image_places=places,
        )

    # -- out -----------------------------------------------------------------------------------

    def info(self, ready: Ready) -> Any:
        """`InfoResponse`: what a router must know of the model."""
        # window_size stays unset: keys and values beyond a window are kept, so it saves no budget.
        return _known(
            self.pb.InfoResponse,
            requires_padding=ready.requires_padding,
            dtype=f"torch.{ready.dtype}",
            device_type=ready.device_type,
            speculate=ready.speculate,
            support_chunking=True,
            # Routers would count shared prefixes in their own way; the engine does it by itself.
            use_prefix_caching=False,
            attention_impl="paged",
            block_size=1,
        )

    def warm(self, slots: int, max_input_tokens: int, max_total_tokens: int) -> Any:
        """`WarmupResponse`: tokens that fit in all, and the lengths of one request."""
        return _known(
            self.pb.WarmupResponse,
            max_supported_total_tokens=slots,
            max_input_tokens=max_input_tokens,
            max_total_tokens=max_total_tokens,
        )

    def cached_batch(self, batch: CachedBatch) -> Any:
        """`CachedBatch`."""
        return _known(
            self.pb.CachedBatch,
            id=batch.id,
            request_ids=batch.request_ids,
            size=len(batch.request_ids),
            max_tokens=batch.max_tokens,
            current_tokens=batch.current_tokens,
        )

    def step(self, response: Any, step: ShardStep) -> Any:
        """Fill a PrefillResponse or DecodeResponse; returns it.

        Log probabilities of prompts are left out where the answer would be too long for a router.
        """
        for generation in step.generations:
            # Written in place: a message is copied when it becomes part of another.
            self._tell(response.generations.add(), generation)
        _shorten(response)
        if step.batch is not None:
            response.batch.CopyFrom(self.cached_batch(step.batch))
        for name in ("forward_ns", "decode_ns", "total_ns", "concat_ns"):
            took = getattr(step, name)
            if took is not None and name in response.DESCRIPTOR.fields_by_name:
                setattr(response, name, took)
        return response

    def _tell(self, message: Any, generation: ShardGeneration) -> None:
        """Fill a `Generation`."""
        token, text = generation.tokens, generation.text
        message.request_id = generation.request_id
        if self._scalar:  # of one token: others are not drafted
            message.token_id = token.ids[0]
            message.token_logprob = token.logprobs[0]
            message.token_text = token.texts[0]
            message.token_is_special = token.special[0]
        else:
            _tell_tokens(message.tokens, token)
        if generation.prefill is not None:
            message.prefill_tokens.SetInParent()
            _tell_tokens(message.prefill_tokens, generation.prefill, special=not self._scalar)
        for top in generation.tops:
            if self._scalar:
                message.top_tokens.SetInParent()
            _tell_tokens(message.top_tokens if self._scalar else message.top_tokens.add(), top)
        if text is not None:
            message.generated_text.CopyFrom(_known(self.pb.GeneratedText, **asdict(text)))


def _tell_tokens(message: Any, tokens: TokenList, *, special: bool = True) -> None:
    """Fill a list of tokens. `special`: its generation says which tokens are."""
    message.ids.extend(tokens.ids)
    message.logprobs.extend(tokens.logprobs)
    message.texts.extend(tokens.texts)
    if special:
        message.is_special.extend(tokens.special)


def _constraint(parameters: Any) -> AskedConstraint | None:
    """A JSON schema (older routers) or a regular expression; the first generation has neither."""
    text, kind = (
        getattr(parameters, "grammar", ""),
        getattr(parameters, "grammar_type", _NO_GRAMMAR),
    )
    if kind == _NO_GRAMMAR and not text:
        return None
    field = "parameters.grammar"
    match kind:
        case 1:
            return AskedConstraint(ConstraintKind.JSON_SCHEMA, field, text)
        case 2:
            return AskedConstraint(ConstraintKind.REGEX, field, text)
        case _:
            # Refused with the request it belongs to.
            return AskedConstraint(ConstraintKind.UNKNOWN, "parameters.grammar_type", str(kind))


def _given(message: Any, field: str) -> Any:
    """The value of a field; None if its generation has no such field, or nothing is set.

    Where a message can't tell 0 from "not set", 0 is "not set".
    """
    found = message.DESCRIPTOR.fields_by_name.get(field)
    if found is None or (found.has_presence and not message.HasField(field)):
        return None
    value = getattr(message, field)
    return value if found.has_presence else value or None


def _known(kind: Any, **values: Any) -> Any:
    """A message of `kind` with those of `values` for which its generation has a field."""
    fields = kind.DESCRIPTOR.fields_by_name
    return kind(**{name: value for name, value in values.items() if name in fields})


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
