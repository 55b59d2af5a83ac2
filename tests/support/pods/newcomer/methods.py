"""The rpcs of `newcomer.v1`: a handler and a row for each."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from support.pods.newcomer import codec
from support.pods.newcomer.messages import DESCRIPTOR
from tokenpod.service.dialects.fields import field_names
from tokenpod.service.rpc.interceptors import Context
from tokenpod.service.rpc.methods import PROMPT, SMALL, Gate, method_of
from tokenpod.service.serving.backend import Backend


async def info(backend: Backend, request: Any, context: Context) -> Any:
    """What is served."""
    return codec.info(backend.generate.serving, version("tokenpod"))


async def tokenize(backend: Backend, request: Any, context: Context) -> Any:
    """The tokens of a text."""
    with field_names({"text": "inputs", "return_ids": "inputs"}):
        tokenised = await backend.generate.tokens(codec.tokens_call(request))
    return codec.encoded(tokenised, backend.generate.serving.tokenizer)


_SERVICES = DESCRIPTOR.services_by_name
METHODS = (
    method_of(_SERVICES["Info"], "Info", SMALL, gate=Gate.READY, serve=info),
    method_of(
        _SERVICES["Tokenize"], "Tokenize", PROMPT, gate=Gate.QUEUE, serve=tokenize, relayed=False
    ),
)
