"""The `Generate` of generate.v3, for tests whose subject it is; others speak tokenpod.v1."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from support.clients.public_api import Stream, samples_of
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb


def generate(stub: Any, request: pb.GenerateRequest, **call: Any) -> Stream:
    """Run `Generate` to its end and check the order of events that the protocol promises."""
    call.setdefault("timeout", 120)
    return collect(list(stub.Generate(request, **call)), request.sampling.n or 1)


def collect(events: Sequence[Any], n: int) -> Stream:
    """The events of a whole stream of `n` samples."""
    started, samples = samples_of(events, n, attrgetter("index"))
    for sample in samples:
        assert len(sample.token_ids) == sample.finished.usage.generated_tokens
    return Stream(started, samples, list(events))


def text_request(text: str, **fields: Any) -> pb.GenerateRequest:
    """A request for `text`; fields by their group's name: stopping={...}, sampling={...}."""
    return pb.GenerateRequest(text=text, **fields)
