"""What the client commands do once their arguments are read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenpod_client import requests
from tokenpod_client.cli.connection import Remote
from tokenpod_client.cli.remote import RemoteError, calling, connected
from tokenpod_client.cli.terminal import LiveText, json_line, table
from tokenpod_client.protos.tokenpod.v1 import (
    adapter_pb2,
    generation_pb2,
    model_pb2,
)
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

Result = TypeVar("Result")

#: Seconds that a health check may take where no deadline is given: no answer is one too.
HEALTH_SECONDS = 5.0


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
        raise click.exceptions.Exit(1) from error


def generate_request(
    prompt: str, given: Mapping[str, Any], *, chat: bool, system: str | None
) -> generation_pb2.GenerateRequest:
    """The message with these fields."""
    return requests.generate_request(_chat(prompt, system) if chat else prompt, **given)


async def generate(
    remote: Remote, request: generation_pb2.GenerateRequest, *, stream: bool, json_lines: bool
) -> None:
    """Show one request's answer. Raises RemoteError; cancelling it cancels the call.

    Args:
        stream: as it comes; else at its end.
        json_lines: each message of the server as JSON.
    """
    several = max(request.sampling.n, request.sampling.beam.n) > 1
    live = None if json_lines else LiveText(several=several)
    async with calling(remote) as channel:
        async for message in _messages(GenerationServiceStub(channel), request, remote, stream):
            if live is None:
                print(json_line(message), flush=True)
            else:
                live.show(message)
    if live is not None:
        live.close()


async def _messages(
    stub: Any, request: generation_pb2.GenerateRequest, remote: Remote, stream: bool
) -> AsyncIterator[generation_pb2.GenerateResponse | pb.GenerateOnceResponse]:
    options = _call_options(remote)
    if stream:
        async for event in stub.Generate(request, **options):
            yield event
    else:
        yield await stub.GenerateOnce(pb.GenerateOnceRequest(request=request), **options)


async def health(remote: Remote, service: str, *, watch: bool) -> bool:
    """Print the state of one service, or with `watch` each change; whether the last is SERVING."""
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2.HealthCheckResponse()
    async with calling(remote) as channel, _known(service):
        stub = health_pb2_grpc.HealthStub(channel)
        if watch:
            async for answer in stub.Watch(request, **_call_options(remote)):
                print(_state(answer), flush=True)
        else:
            timeout = remote.deadline or HEALTH_SECONDS
            answer = await stub.Check(request, timeout=timeout, metadata=remote.metadata)
            print(_state(answer), flush=True)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def _known(service: str) -> AsyncIterator[None]:
    """A server that knows no such service says so without words."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        problem = f"--service is {service!r}: the server tells the health of no such service"
        raise RemoteError(problem) from error


async def ask_model(remote: Remote) -> model_pb2.Model:
    """What a server serves, and its limits. Raises RemoteError."""
    async with connected(remote) as client:
        return await client.model()


async def info(remote: Remote, *, json_output: bool) -> None:
    """Print what a server serves, and its limits. Raises RemoteError."""
    async with connected(remote) as client:
        model = await client.model()
        adapters = await client.adapters() if model.adapter_count and not json_output else []
    if json_output:
        print(json_line(model))
        return
    print(table([*_rows(model), ("adapters", ", ".join(map(_adapter, adapters)))]))


def _adapter(adapter: adapter_pb2.Adapter) -> str:
    if adapter.virtual_token_count:
        return f"{adapter.name} ({adapter.virtual_token_count} virtual tokens)"
    return f"{adapter.name} (rank {adapter.lora_rank})"


def _rows(model: model_pb2.Model) -> Iterator[tuple[str, object]]:
    """A line for each field of a model and of its limits. Only --json has what is long."""
    for field, value in _fields(model):
        if field == "limits":
            yield from ((name.replace("_", " "), limit) for name, limit in _fields(value))
        elif field == "chat_template":
            yield "chat template", model.HasField("chat_template")
        elif field == "sampling_defaults":
            yield "sampling defaults", ", ".join(f"{f.name} {x:g}" for f, x in value.ListFields())
        elif field == "embedding":
            # Of labels and prompts their names.
            yield from (
                (f.name.replace("_", " "), x if isinstance(x, str | int) else ", ".join(x))
                for f, x in value.ListFields()
            )
        elif field == "eos_token_ids":
            yield "eos token ids", ", ".join(map(str, value))
        elif field == "task":
            yield field, model_pb2.Task.Name(value).removeprefix("TASK_").lower()
        elif field != "features":
            yield field.replace("_", " "), value


def _fields(message: Any) -> Iterator[tuple[str, Any]]:
    for field in message.DESCRIPTOR.fields:
        yield field.name, getattr(message, field.name)


def tokens_request(text: str, *, chat: bool, ids: bool, special: bool) -> pb.TokenizeRequest:
    """The message of `tokens`."""
    request = requests.tokenize_request(_chat(text, None) if chat else text)
    request.return_token_ids = ids
    if not chat:
        request.add_special_tokens = special
    return request


async def tokens(remote: Remote, request: pb.TokenizeRequest, *, json_output: bool) -> None:
    """Print how many tokens a text has. Raises RemoteError."""
    async with calling(remote) as channel:
        stub = GenerationServiceStub(channel)
        answer = await stub.Tokenize(request, **_call_options(remote))
    if json_output:
        print(json_line(answer))
        return
    print(answer.token_count)
    if request.return_token_ids:
        print(*answer.token_ids)


def _call_options(remote: Remote) -> dict[str, Any]:
    return {"timeout": remote.deadline, "metadata": remote.metadata}


def _chat(message: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": message}]


def _state(answer: health_pb2.HealthCheckResponse) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
