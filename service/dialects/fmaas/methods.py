"""The rpcs of `fmaas.GenerationService`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenpod.core.task import Task
from tokenpod.service.calls.call import TokensCall
from tokenpod.service.calls.limits import PromptTooLong, check_returned_ids
from tokenpod.service.dialects.fields import field_names
from tokenpod.service.dialects.fmaas.codec import (
    FIELDS,
    MOST_STOP_BYTES,
    MOST_STOPS,
    MOST_TOP_TOKENS,
    adapter_of,
    check_params,
    check_room,
    generate_call,
    most_new_tokens,
    too_long,
)
from tokenpod.service.dialects.fmaas.writer import ResponseWriter
from tokenpod.service.dialects.streams import request_id_of, write_all
from tokenpod.service.rpc.interceptors import Context
from tokenpod.service.rpc.methods import PROMPT, SMALL, Gate, Method, method_of
from tokenpod.service.rpc.wire import MethodLimits
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import AdmittedCall
from tokenpod_client.protos.fmaas import generation_pb2 as pb

#: Metadata of a call, and of its answer: the request's name.
CORRELATION_KEY = "x-correlation-id"
#: Tokens that are written to a message before others get their turn on the event loop.
_TOKENS_AT_ONCE = 2048


async def generate(
    backend: Backend, request: pb.BatchedGenerationRequest, context: Context
) -> pb.BatchedGenerationResponse:
    """Return the texts that follow several prompts; each takes a place in the queue."""
    check_params(request.params, backend.generate.serving.limits)
    adapter = adapter_of(request, backend.generate.serving.adapters)
    name = await _name(context)
    with contextlib.ExitStack() as places:
        writers = []
        for at, each in enumerate(request.requests):
            admitted = places.enter_context(backend.generate.admit(context.time_remaining()))
            prompt = _Prompt(each.text, f"requests[{at}].text", f"{name}-{at}", adapter)
            writers.append(await _submitted(admitted, prompt, request.params, context))
        for writer in writers:
            while not writer.generation.finished:
                await writer.generation.news()
            await writer.prepare()
        return pb.BatchedGenerationResponse(responses=[writer.whole() for writer in writers])


async def generate_stream(
    backend: Backend, request: pb.SingleGenerationRequest, context: Context
) -> None:
    """Write the text that follows a prompt, token by token."""
    check_params(request.params, backend.generate.serving.limits)
    adapter = adapter_of(request, backend.generate.serving.adapters)
    name = await _name(context)
    with backend.generate.admit(context.time_remaining()) as admitted:
        prompt = _Prompt(request.request.text, "request.text", name, adapter)
        writer = await _submitted(admitted, prompt, request.params, context, stream=True)
        await write_all(writer, context)


async def tokenize(
    backend: Backend, request: pb.BatchedTokenizeRequest, context: Context
) -> pb.BatchedTokenizeResponse:
    """Count, or list, the tokens of texts."""
    adapter_of(request, backend.generate.serving.adapters)
    response = pb.BatchedTokenizeResponse()
    listed = 0
    for at, each in enumerate(request.requests):
        await asyncio.sleep(0)
        with field_names({"text": f"requests[{at}].text", "return_ids": "return_tokens"}):
            tokenised = await backend.generate.tokens(
                TokensCall(
                    each.text,
                    return_ids=request.return_tokens,
                    return_offsets=request.return_offsets,
                )
            )
            listed += len(tokenised.ids)
            check_returned_ids(listed)
        kept = min(request.truncate_input_tokens or tokenised.count, tokenised.count)
        found = response.responses.add(token_count=kept)
        ids = tokenised.ids[-kept:] if request.return_tokens else []
        await _tell_tokens(found, ids, tokenised.offsets[-2 * kept :], backend)
    return response


async def _tell_tokens(
    message: pb.TokenizeResponse, ids: Sequence[int], offsets: Sequence[int], backend: Backend
) -> None:
    """Write names and places of tokens. Other tasks get their turn while a list is written."""
    name = backend.generate.serving.tokenizer.backend.id_to_token
    for at in range(0, len(ids), _TOKENS_AT_ONCE):
        message.tokens.extend(name(token) or "" for token in ids[at : at + _TOKENS_AT_ONCE])
        await asyncio.sleep(0)
    for at in range(0, len(offsets), 2 * _TOKENS_AT_ONCE):
        places = offsets[at : at + 2 * _TOKENS_AT_ONCE]
        for start, end in zip(places[::2], places[1::2], strict=True):
            message.offsets.add(start=start, end=end)
        await asyncio.sleep(0)


async def model_info(
    backend: Backend, request: pb.ModelInfoRequest, context: Context
) -> pb.ModelInfoResponse:
    """What is served, and within which limits."""
    limits = backend.generate.serving.limits
    return pb.ModelInfoResponse(
        model_kind=pb.ModelInfoResponse.DECODER_ONLY,
        max_sequence_length=limits.max_total_tokens,
        max_new_tokens=most_new_tokens(limits),
    )


# -- parts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One of a call's prompts, the field that has it, its name in the log, and its adapter's."""

    text: str
    field: str
    name: str
    adapter: str = ""


async def _submitted(
    admitted: AdmittedCall,
    prompt: _Prompt,
    params: pb.Parameters,
    context: Context,
    *,
    stream: bool = False,
) -> ResponseWriter:
    """Hand a prompt with checked parameters to the engine; who writes what becomes of it."""
    limits = replace(
        admitted.limits,
        max_stop_sequences=MOST_STOPS,
        max_stop_sequence_bytes=MOST_STOP_BYTES,
        max_top_n_tokens=MOST_TOP_TOKENS,
    )
    names = {**FIELDS, "text": prompt.field, "prompt": prompt.field}
    try:
        with field_names(names):
            call = replace(
                generate_call(prompt.text, params, stream=stream), adapter=prompt.adapter
            )
            admitted.check(call, limits)
            generation = await admitted.submit(call, prompt.name, context.time_remaining())
    except PromptTooLong as error:
        raise too_long(error) from None
    check_room(len(generation.request.prompt), params, limits)
    return ResponseWriter(call, params.response, generation, admitted.tokenizer)


async def _name(context: Context) -> str:
    """The call's name, which its client hears first."""
    name = request_id_of("", context, CORRELATION_KEY)
    await context.send_initial_metadata(((CORRELATION_KEY, name),))
    return name


def _row(name: str, limits: MethodLimits, serve: Any, **row: Any) -> Method:
    service = pb.DESCRIPTOR.services_by_name["GenerationService"]
    return method_of(service, name, limits, serve=serve, **row)


METHODS = (
    _row("Generate", PROMPT, generate, gate=Gate.ROW, relayed=False, task=Task.GENERATE),
    _row(
        "GenerateStream",
        PROMPT,
        generate_stream,
        gate=Gate.ROW,
        relayed=False,
        task=Task.GENERATE,
    ),
    _row("Tokenize", PROMPT, tokenize, gate=Gate.QUEUE, relayed=False, on_followers=True),
    _row("ModelInfo", SMALL, model_info, gate=Gate.READY, on_followers=True),
)
