"""What the client commands do once their arguments are read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenpod.cli.connection import Remote
from tokenpod.cli.remote import RemoteError, calling
from tokenpod.cli.terminal import LiveText, json_line, table
from tokenpod.protos.generate.v3 import generate_pb2 as v3
from tokenpod.protos.generate.v3.generate_pb2_grpc import TextGenerationServiceStub

Result = TypeVar("Result")

#: Initial metadata in which a server names its model.
MODEL_ID_KEY = "tokenpod-model-id"
#: Seconds that a health check may take where no deadline is given: no answer is one too.
HEALTH_SECONDS = 5.0

#: Parts of a request, by the names of its fields.
_PARTS: dict[str, Any] = {
    "sampling": v3.SamplingOptions,
    "stopping": v3.StoppingOptions,
    "output": v3.OutputOptions,
}


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command to its end, within `remote_errors`."""
    with remote_errors():
        return asyncio.run(work)


@contextmanager
def remote_errors() -> Iterator[None]:
    """A RemoteError within becomes lines on standard error and exit status 1."""
    try:
        yield
    except RemoteError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(1) from error


def generate_request(
    prompt: str, given: Mapping[str, object], *, chat: bool, system: str | None
) -> v3.GenerateRequest:
    """The message with these fields, each in the part that has one of its name."""
    parts = {name: kind(**_fields_of(kind, given)) for name, kind in _PARTS.items()}
    request = v3.GenerateRequest(**_fields_of(v3.GenerateRequest, given), **parts)
    if chat:
        request.chat.CopyFrom(_chat(prompt, system))
    else:
        request.text = prompt
    return request


def _fields_of(kind: Any, given: Mapping[str, object]) -> dict[str, Any]:
    return {name: given[name] for name in kind.DESCRIPTOR.fields_by_name if name in given}


async def generate(remote: Remote, request: v3.GenerateRequest, *, json_lines: bool) -> None:
    """Stream one request to the terminal. Raises RemoteError; cancelling it cancels the call."""
    several = max(request.sampling.n, 1) > 1
    live = None if json_lines else LiveText(several=several)
    async with calling(remote) as channel:
        stub = TextGenerationServiceStub(channel)
        async for event in stub.Generate(request, **_call_options(remote)):
            if live is None:
                print(json_line(event), flush=True)
            else:
                live.event(event)
    if live is not None:
        live.close()


async def health(remote: Remote, service: str, *, watch: bool) -> bool:
    """Print the state of one service, or with `watch` each change; whether the last is SERVING."""
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2.HealthCheckResponse()
    async with calling(remote) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        if watch:
            async for answer in stub.Watch(request, **_call_options(remote)):
                print(_state(answer), flush=True)
        else:
            timeout = remote.deadline or HEALTH_SECONDS
            answer = await stub.Check(request, timeout=timeout, metadata=remote.metadata)
            print(_state(answer), flush=True)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def ask_info(remote: Remote) -> tuple[str | None, v3.InfoResponse]:
    """The name of a server's model, and what the server tells of it. Raises RemoteError."""
    async with calling(remote) as channel:
        stub = TextGenerationServiceStub(channel)
        call = stub.Info(v3.InfoRequest(), **_call_options(remote))
        metadata = await call.initial_metadata()
        answer = await call
    found = metadata.get(MODEL_ID_KEY) if metadata else None
    return None if found is None else str(found), answer


async def info(remote: Remote, *, json_output: bool) -> None:
    """Print what the server tells of its model. Raises RemoteError."""
    model_id, answer = await ask_info(remote)
    if json_output:
        print(json_line(answer, model_id=model_id))
        return
    rows: list[tuple[str, object]] = [("model", model_id)] if model_id else []
    # A field that is not set, such as the window of a model without one, has no row.
    present = {field.name: value for field, value in answer.ListFields()}
    for field in answer.DESCRIPTOR.fields:
        if field.name in present or not field.has_presence:
            name = field.name.replace("_", " ")
            rows.append((name, present.get(field.name, field.default_value)))
    print(table(rows))


def tokens_request(text: str, *, chat: bool, ids: bool, special: bool) -> v3.TokensRequest:
    """The message of `tokens`."""
    request = v3.TokensRequest(add_special_tokens=special, return_ids=ids)
    if chat:
        request.chat.CopyFrom(_chat(text, None))
    else:
        request.text = text
    return request


async def tokens(remote: Remote, request: v3.TokensRequest, *, json_output: bool) -> None:
    """Print how many tokens a text has. Raises RemoteError."""
    async with calling(remote) as channel:
        stub = TextGenerationServiceStub(channel)
        answer = await stub.Tokens(request, **_call_options(remote))
    if json_output:
        print(json_line(answer))
        return
    print(answer.ntokens)
    if request.return_ids:
        print(*answer.ids)


def _call_options(remote: Remote) -> dict[str, Any]:
    return {"timeout": remote.deadline, "metadata": remote.metadata}


def _chat(message: str, system: str | None) -> v3.Chat:
    first = [v3.ChatMessage(role="system", content=system)] if system is not None else []
    return v3.Chat(messages=[*first, v3.ChatMessage(role="user", content=message)])


def _state(answer: health_pb2.HealthCheckResponse) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
