"""Requests of tokenpod.v1, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service

PROMPT = "def fibonacci(n):\n"
SHORT = {"max_new_tokens": 8, "ignore_eos": True}


@dataclass
class Sample:
    """One sample of a `Generate` stream, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    special: list[bool] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    finished: Any = None

    def take(self, tokens: Any) -> None:
        """Of `tokenpod.v1` or `generate.v3`."""
        self.text += tokens.text
        self.token_ids += tokens.token_ids
        self.logprobs += tokens.logprobs
        self.special += tokens.special
        self.tops += tokens.top_tokens
        assert len(tokens.special) == len(tokens.token_ids)


@dataclass
class Stream:
    """A whole `Generate` stream."""

    started: Any
    samples: list[Sample]
    events: list[Any]


def generate(stub: Any, request: pb.GenerateRequest, **call: Any) -> Stream:
    """Run `Generate` to its end and check the order of events that the protocol promises."""
    return collect(stream(stub, request, **call), request.sampling.n or 1)


def collect(events: Sequence[Any], n: int) -> Stream:
    """The events of a whole stream of `n` samples."""
    *events_of_samples, completed = events
    assert completed.WhichOneof("event") == "completed"
    started, samples = samples_of(events_of_samples, n, attrgetter("sample_index"))
    for sample in samples:
        assert len(sample.token_ids) == sample.finished.generated_token_count
    return Stream(started, samples, list(events))


def samples_of(
    events: Sequence[Any], n: int, index: Callable[[Any], int]
) -> tuple[Any, list[Sample]]:
    """What `started` says, and `n` samples; `index` reads which one an event's part is of."""
    samples = [Sample() for _ in range(n)]
    started, *rest = events
    assert started.WhichOneof("event") == "started"
    for event in rest:
        kind = event.WhichOneof("event")
        assert kind in ("tokens", "finished"), kind
        part = getattr(event, kind)
        sample = samples[index(part)]
        assert sample.finished is None, "an event after `finished`"
        if kind == "finished":
            sample.finished = part
        else:
            sample.take(part)
    for sample in samples:
        assert sample.finished is not None
        assert sample.text == sample.finished.text
    return started.started, samples


def until_refused(stub: Any, request: pb.GenerateRequest, **options: Any) -> grpc.RpcError:
    """Call `Generate` until the server refuses it, and return how it did."""
    while True:
        try:
            generate(stub, request, **options)
        except grpc.RpcError as error:
            return error


def text_request(text: str, **fields: Any) -> pb.GenerateRequest:
    """A request for `text`; fields by their group's name: stopping={...}, sampling={...}."""
    return pb.GenerateRequest(text=text, **fields)


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


def violations(error: grpc.RpcError) -> dict[str, str]:
    """field -> description of a status's BadRequest details."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    found: dict[str, str] = {}
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found |= {v.field: v.description for v in bad.field_violations}
    return found
