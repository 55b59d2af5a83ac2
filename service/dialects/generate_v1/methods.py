"""The rpcs of `generate.v1`: TGI's, and the `Tokens` of a LightLLM fork."""

from __future__ import annotations

from typing import Any

from tokenpod.service.calls.call import TokensCall
from tokenpod.service.dialects.tgi.methods import shard_methods
from tokenpod.service.serving.backend import Backend
from tokenpod_client.protos.generate.v1 import generate_pb2 as pb


async def tokens(backend: Backend, request: pb.TokensRequest, context: Any) -> pb.TokensResponse:
    """Count a text's tokens."""
    tokenised = await backend.generate.tokens(TokensCall(prompt=request.text))
    return pb.TokensResponse(ntokens=tokenised.count)


METHODS = shard_methods(pb, tokens)
