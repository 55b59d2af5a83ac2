"""Messages of `generate.v1.Tokens`, which a LightLLM fork added to TGI's protocol."""

from __future__ import annotations

from tokenpod.protos.generate.v1 import generate_pb2 as pb
from tokenpod.service.serving.calls import TokensCall


def tokens_call(request: pb.TokensRequest) -> TokensCall:
    """What `request` asks for: it has a text alone."""
    return TokensCall(prompt=request.text)
