"""The rpcs of `vllm.grpc.engine.VllmEngine`. The stubs come with the extra `vllm`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2 as common

from tokenpod.core.task import Task
from tokenpod.service.calls.embedding import AskedText, ReadCall
from tokenpod.service.calls.errors import Unimplemented
from tokenpod.service.calls.limits import check_request_id
from tokenpod.service.dialects.fields import copied, field_names
from tokenpod.service.dialects.streams import request_id_of, write_all
from tokenpod.service.dialects.vllm.cache import flush_cache, subscribe
from tokenpod.service.dialects.vllm.codec import FIELDS, MOST_TOP_TOKENS, generate_call
from tokenpod.service.dialects.vllm.model import loads, model_info, server_info
from tokenpod.service.dialects.vllm.writer import EngineWriter
from tokenpod.service.rpc.interceptors import Context, caller_of
from tokenpod.service.rpc.methods import NAMES, PROMPT, SMALL, Gate, Method, method_of
from tokenpod.service.rpc.wire import MethodLimits
from tokenpod.service.serving.backend import Backend

#: Bytes of a tokenizer's zip in one message, and about what a call holds of them at a time.
_CHUNK_BYTES = 64 * 1024
_HELD_BYTES = 3 * _CHUNK_BYTES


async def generate(backend: Backend, request: pb.GenerateRequest, context: Context) -> None:
    """Write token ids as they come, or all of them at the end."""
    with backend.generate.admit(context.time_remaining()) as admitted:
        limits = replace(admitted.limits, max_top_n_tokens=MOST_TOP_TOKENS)
        with field_names(FIELDS):
            call = await generate_call(request, limits)
            admitted.check(call, limits)
            request_id = request_id_of(call.request_id, context)
            admitted.hold_name(_caller(context), request_id)
            generation = await admitted.submit(call, request_id, context.time_remaining())
        await write_all(EngineWriter(call, generation, admitted.tokenizer), context)


async def abort(backend: Backend, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
    """End calls of this caller by their ids, whichever front end has them."""
    caller = _caller(context)
    for name in request.request_ids:
        backend.generate.named.end(f"{caller} {name}")
    return pb.AbortResponse()


async def embed(backend: Backend, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
    """The vector of a text."""
    remaining = context.time_remaining()
    with backend.reading.admit(remaining) as admitted:
        ids = await copied(request.tokenized.input_ids)
        text = AskedText("tokenized.input_ids", tokens=ids)
        call = ReadCall([text])
        check_request_id(request.request_id)
        request_id = request_id_of(request.request_id, context)
        (read,) = await admitted.read(call, "tokenized", request_id, remaining)
        vector = read.vectors[0].tolist()
        return pb.EmbedResponse(
            embedding=vector, prompt_tokens=read.tokens, embedding_dim=len(vector)
        )


async def profile(backend: Backend, request: Any, context: Context) -> Any:
    """Clients can't profile an engine."""
    raise Unimplemented("request", "asks for a profile, which this server does not make")


async def health_check(
    backend: Backend, request: pb.HealthCheckRequest, context: Context
) -> pb.HealthCheckResponse:
    """Whether the engine moves."""
    healthy = backend.healthy()
    message = "" if healthy else "the engine makes no progress"
    return pb.HealthCheckResponse(healthy=healthy, message=message)


async def get_model_info(
    backend: Backend, request: pb.GetModelInfoRequest, context: Context
) -> pb.GetModelInfoResponse:
    """What is served."""
    serving = backend.generate.serving
    return await backend.generate.aside.run(functools.partial(model_info, serving))


async def get_server_info(
    backend: Backend, request: pb.GetServerInfoRequest, context: Context
) -> pb.GetServerInfoResponse:
    """What serves it."""
    return server_info(backend.generate.serving, backend.admission.counters.requests)


async def get_loads(
    backend: Backend, request: pb.GetLoadsRequest, context: Context
) -> pb.GetLoadsResponse:
    """How busy it is."""
    return loads(backend.generate.serving)


async def get_tokenizer(
    backend: Backend, request: common.GetTokenizerRequest, context: Context
) -> None:
    """Write the tokenizer's files as a zip; the last message has its SHA-256."""
    with backend.admission.memory.reserve(_HELD_BYTES):
        archive = await backend.generate.serving.archive.get()
        for at in range(0, len(archive.data), _CHUNK_BYTES):
            last = at + _CHUNK_BYTES >= len(archive.data)
            chunk = common.GetTokenizerChunk(data=archive.data[at : at + _CHUNK_BYTES])
            if last:
                chunk.sha256 = archive.sha256
            await context.write(chunk)


def _caller(context: Context) -> str:
    """Who calls; names of calls of other protocols are not of interest here."""
    return f"vllm {caller_of(context)}"


def _row(name: str, limits: MethodLimits, serve: Any, **row: Any) -> Method:
    service = pb.DESCRIPTOR.services_by_name["VllmEngine"]
    return method_of(service, name, limits, serve=serve, **row)


METHODS = (
    _row("Generate", PROMPT, generate, gate=Gate.ROW, relayed=False, task=Task.GENERATE),
    _row("Abort", NAMES, abort, relayed=False),
    _row("Embed", PROMPT, embed, gate=Gate.ROW, relayed=False, task=Task.EMBED),
    _row("HealthCheck", SMALL, health_check, gate=Gate.READY, on_followers=True, frequent=True),
    _row("GetModelInfo", SMALL, get_model_info, gate=Gate.READY, on_followers=True),
    _row("GetServerInfo", SMALL, get_server_info, gate=Gate.READY, on_followers=True),
    _row("GetLoads", SMALL, get_loads, gate=Gate.READY, frequent=True),
    _row("GetTokenizer", SMALL, get_tokenizer, gate=Gate.READY, on_followers=True),
    # It lasts for as long as its client does.
    _row("SubscribeKvEvents", SMALL, subscribe, gate=Gate.READY, traced=False),
    _row("FlushCache", SMALL, flush_cache, gate=Gate.READY),
    _row("StartProfile", SMALL, profile, gate=Gate.READY),
    _row("StopProfile", SMALL, profile, gate=Gate.READY),
)
