"""Requests of tokenpod.v1, and what comes of them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service

PROMPT = "def fibonacci(n):\n"
SHORT = {"max_new_tokens": 8, "ignore_eos": True}


def ask(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": PROMPT, "stopping": SHORT} | fields)


def stream(api: Any, request: pb.GenerateRequest, **call: Any) -> list[Any]:
    return list(api.Generate(request, **{"timeout": 120} | call))


def once(api: Any, request: pb.GenerateRequest, **call: Any) -> service.GenerateOnceResponse:
    asked = service.GenerateOnceRequest(request=request)
    found: service.GenerateOnceResponse = api.GenerateOnce(asked, **{"timeout": 120} | call)
    return found


def tokens_of(events: list[Any], index: int = 0) -> list[Any]:
    found = [e.tokens for e in events if e.WhichOneof("event") == "tokens"]
    return [tokens for tokens in found if tokens.sample_index == index]


def finished_of(events: list[Any]) -> list[Any]:
    return [e.finished for e in events if e.WhichOneof("event") == "finished"]


def refused(code: grpc.StatusCode, call: Any, *arguments: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    assert caught.value.code() is code, caught.value
    return caught.value


def said(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [{"text": text}]} for role, text in turns]}
