"""The rpcs of `generate.v3`: TGI's, and Tokenpod's own `Generate` and `Tokens`."""

from __future__ import annotations

import asyncio
from typing import Any

from tokenpod.core.task import Task
from tokenpod.service.dialects.generate_v3.codec import generate_call, tokens_call
from tokenpod.service.dialects.generate_v3.writer import EventWriter
from tokenpod.service.dialects.streams import REQUEST_ID_KEY, request_id_of, write_all
from tokenpod.service.dialects.tgi.methods import service_of, shard_methods
from tokenpod.service.rpc.interceptors import Context
from tokenpod.service.rpc.methods import PROMPT, Gate, method_of
from tokenpod.service.serving.backend import Backend
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

#: Token ids that are written to a message before others get their turn on the event loop.
_IDS_AT_ONCE = 16_384


async def generate(backend: Backend, request: pb.GenerateRequest, context: Context) -> None:
    """Write the stream of one generation."""
    with backend.generate.admit(context.time_remaining()) as admitted:
        call = await generate_call(request)
        admitted.check(call)
        request_id = request_id_of(call.request_id, context)
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        generation = await admitted.submit(call, request_id, context.time_remaining())
        writer = EventWriter(
            call,
            generation,
            admitted.tokenizer,
            model_id=admitted.model_id,
            request_id=request_id,
        )
        await write_all(writer, context)


async def tokens(backend: Backend, request: pb.TokensRequest, context: Context) -> Any:
    """Count, or list, the tokens of a text or chat."""
    tokenised = await backend.generate.tokens(tokens_call(request))
    response = pb.TokensResponse(ntokens=tokenised.count)
    for at in range(0, len(tokenised.ids), _IDS_AT_ONCE):
        response.ids.extend(tokenised.ids[at : at + _IDS_AT_ONCE])
        await asyncio.sleep(0)
    return response


METHODS = (
    *shard_methods(pb, tokens),
    method_of(
        service_of(pb),
        "Generate",
        PROMPT,
        gate=Gate.ROW,
        relayed=False,
        task=Task.GENERATE,
        serve=generate,
    ),
)
