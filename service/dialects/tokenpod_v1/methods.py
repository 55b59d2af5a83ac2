"""The rpcs of `tokenpod.v1`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from tokenpod.core.task import Task
from tokenpod.service.dialects.fields import copied, field_names, within
from tokenpod.service.dialects.streams import REQUEST_ID_KEY, request_id_of, write_all
from tokenpod.service.dialects.tokenpod_v1.codec import generate_call, skips_special, tokens_call
from tokenpod.service.dialects.tokenpod_v1.model import load_of, model_of
from tokenpod.service.dialects.tokenpod_v1.writer import EventWriter
from tokenpod.service.rpc.interceptors import Context, caller_of
from tokenpod.service.rpc.methods import PROMPT, SMALL, Gate, Method, method_of
from tokenpod.service.rpc.wire import MethodLimits
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import AdmittedCall
from tokenpod_client.protos.tokenpod.v1 import generation_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as pb

#: Numbers that are written to a message before others get their turn on the event loop.
_NUMBERS_AT_ONCE = 16_384


async def generate(
    backend: Backend, request: generation_pb2.GenerateRequest, context: Context
) -> None:
    """Write the stream of one generation."""
    with backend.generate.admit(context.time_remaining()) as admitted:
        writer = await _submitted(backend, admitted, request, context, stream=True)
        await write_all(writer, context)


async def generate_once(
    backend: Backend, request: pb.GenerateOnceRequest, context: Context
) -> pb.GenerateOnceResponse:
    """Return one generation as a whole."""
    with backend.generate.admit(context.time_remaining()) as admitted:
        with within("request"):
            writer = await _submitted(backend, admitted, request.request, context, stream=False)
        while not writer.generation.finished:
            await writer.generation.news()
        if (failure := writer.generation.late_failure) is not None:
            raise failure
        await writer.prepare()
        return writer.whole()


async def _submitted(
    backend: Backend,
    admitted: AdmittedCall,
    request: generation_pb2.GenerateRequest,
    context: Context,
    *,
    stream: bool,
) -> EventWriter:
    """Check a request and hand it to the engine; who writes what becomes of it."""
    caller = caller_of(context)
    defaults = backend.generate.serving.encoder.defaults
    call = await generate_call(request, caller, stream=stream, defaults=defaults)
    backend.generate.check_model(request.model)
    admitted.check(call)
    request_id = request_id_of(call.request_id, context)
    admitted.hold_name(caller, request_id)
    await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
    generation = await admitted.submit(call, request_id, context.time_remaining())
    return EventWriter(
        call,
        generation,
        admitted.tokenizer,
        model_id=admitted.model_id,
        request_id=request_id,
    )


async def tokenize(
    backend: Backend, request: pb.TokenizeRequest, context: Context
) -> pb.TokenizeResponse:
    """Count, or list, the tokens of a text or chat."""
    call = await tokens_call(request)
    backend.generate.check_model(request.model)
    asked = "return_token_ids" if call.return_ids else "return_offsets"
    with field_names({"return_ids": asked}):
        tokenised = await backend.generate.tokens(call)
    response = pb.TokenizeResponse(token_count=tokenised.count)
    if call.return_ids:
        await _extend(response.token_ids, tokenised.ids)
    await _extend(response.start_offsets, tokenised.offsets[::2])
    await _extend(response.end_offsets, tokenised.offsets[1::2])
    return response


async def detokenize(
    backend: Backend, request: pb.DetokenizeRequest, context: Context
) -> pb.DetokenizeResponse:
    """The text of tokens."""
    backend.generate.check_model(request.model)
    ids = await copied(request.token_ids)
    text = await backend.generate.text_of(ids, skip_special=skips_special(request))
    return pb.DetokenizeResponse(text=text)


async def get_model(
    backend: Backend, request: pb.GetModelRequest, context: Context
) -> pb.GetModelResponse:
    """What is served, and within which limits."""
    backend.generate.check_model(request.name)
    # Finding the roles of a long template takes a while.
    serving = backend.generate.serving
    model = await backend.generate.aside.run(functools.partial(model_of, serving))
    return pb.GetModelResponse(model=model)


async def get_load(
    backend: Backend, request: pb.GetLoadRequest, context: Context
) -> pb.GetLoadResponse:
    """How busy the pod is."""
    return load_of(backend.generate.serving, backend.admission)


async def _extend(numbers: Any, more: Sequence[int]) -> None:
    """Add to a list of a message. Other tasks get their turn while a long one is written."""
    for at in range(0, len(more), _NUMBERS_AT_ONCE):
        numbers.extend(more[at : at + _NUMBERS_AT_ONCE])
        await asyncio.sleep(0)


def _row(name: str, limits: MethodLimits, serve: Any, **row: Any) -> Method:
    service = pb.DESCRIPTOR.services_by_name["GenerationService"]
    return method_of(service, name, limits, serve=serve, strict=True, **row)


METHODS = (
    _row("Generate", PROMPT, generate, gate=Gate.ROW, relayed=False, task=Task.GENERATE),
    _row("GenerateOnce", PROMPT, generate_once, gate=Gate.ROW, relayed=False, task=Task.GENERATE),
    _row("Tokenize", PROMPT, tokenize, gate=Gate.QUEUE, relayed=False, on_followers=True),
    _row("Detokenize", PROMPT, detokenize, gate=Gate.QUEUE, relayed=False, on_followers=True),
    _row("GetModel", SMALL, get_model, gate=Gate.READY, on_followers=True),
    _row("GetLoad", SMALL, get_load, gate=Gate.READY, frequent=True),
)
