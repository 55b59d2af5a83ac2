"""Reads requests: calls that are refused anyway are refused first, then bytes are checked, parsed.

grpcio reads and parses a unary request before it calls the handler. So handlers of one request are
served as handlers of a stream, which read the message when they need it: the message of a call that
is refused is never read.

    token, drain (other interceptors) -> gate -> read -> bytes, fields -> parse -> the handler
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from tokenpod.service.config import ServerSettings
from tokenpod.service.rpc.errors import DeadlineExceeded, InvalidArgument
from tokenpod.service.rpc.interceptors import (
    Context,
    Handler,
    Interceptor,
    Wrapped,
    behaviour_of,
    unparsed,
)
from tokenpod.service.rpc.memory_budget import Lease
from tokenpod.service.rpc.methods import MethodLimits
from tokenpod.service.rpc.wire import WHOLE, Shape, count, fault_in, shape_of
from tokenpod.service.rpc.wire_rules import LENIENT, Rules, Strict, rules_of
from tokenpod.service.rpc.wire_types import Malformed
from tokenpod.service.serving.backend import Backend

#: Seconds that a message may take to arrive; a call without one is ended then.
ARRIVAL_SECONDS = 60.0

#: Messages from this size on are parsed in a turn of their own.
_LONG_BYTES = 64 * 1024


#: Called with a method's full name and the seconds until the deadline (None: it has none).
Check = Callable[[str, float | None], Lease | None]


def open_to_all(method: str, seconds: float | None) -> Lease | None:
    """A gate that refuses no call."""
    return None


def intake_of(settings: ServerSettings, backend: Backend, *, trusted: bool = False) -> Intake:
    """A listener's, by the operator's settings. `trusted`: routers alone can reach it."""
    limits = backend.table.limits(
        max_logit_bias=settings.max_logit_bias,
        max_stop_sequences=settings.max_stop_sequences,
        trusted=trusted,
        strict=settings.unknown_fields == "refuse",
    )
    return Intake(limits, backend.check)


@dataclass(frozen=True, slots=True)
class Parser:
    """Bytes of one method's messages to messages.

    Args:
        deserialize: what grpcio's stubs have for it; None: bytes are wanted as they are.
        limits: of the method.
    """

    deserialize: Callable[[bytes], Any] | None
    limits: MethodLimits
    kind: Descriptor | None = None
    shape: Shape | None = None
    rules: Rules | None = None

    @classmethod
    def of(cls, deserialize: Callable[[bytes], Any] | None, limits: MethodLimits) -> Parser:
        """Knows the message from its deserialiser, which is its class's own method."""
        owner = getattr(deserialize, "__self__", None)
        kind: Descriptor | None = getattr(owner, "DESCRIPTOR", None)
        if kind is None:
            return cls(deserialize, limits)
        rules = rules_of(kind) if limits.strict else None
        return cls(deserialize, limits, kind, shape_of(kind), rules)

    async def parse(self, data: bytes) -> Any:
        """Raises InvalidArgument. Other tasks get their turn while a long message is walked."""
        size = self.limits.size_for(len(data))
        if self.deserialize is None:
            return data
        if self.kind is None or self.shape is None:
            return self.deserialize(data)
        if len(data) > _LONG_BYTES:
            # To copy it took some of this turn.
            await asyncio.sleep(0)
        try:
            strict = Strict(self.rules) if self.rules is not None else LENIENT
            for _ in count(self.kind, self.shape, data, size, strict):
                await asyncio.sleep(0)
            if len(data) > _LONG_BYTES:
                # Parsing is one piece of work, and so is what the handler begins with.
                await asyncio.sleep(0)
                message = self.deserialize(data)
                await asyncio.sleep(0)
                return message
            return self.deserialize(data)
        except (Malformed, DecodeError):
            pass
        raise await _fault(self.kind, data)


async def _fault(kind: Descriptor, data: bytes) -> InvalidArgument:
    """What is wrong with a message that can't be parsed."""
    search = fault_in(kind, data)
    while True:
        try:
            next(search)
        except StopIteration as found:
            fault: InvalidArgument = found.value
            return fault
        await asyncio.sleep(0)


class Intake(Interceptor):
    """Reads and parses every request. Within it are only handlers that serve.

    Args:
        limits: of each method, by its full name; methods that are not there are not limited.
        gate: called before a message is read; raises a ServiceError if the call would be refused
            whatever it says. What it returns holds memory for the message, until that has been
            parsed.
        arrival: seconds that a message may take to arrive.
    """

    def __init__(
        self,
        limits: Mapping[str, MethodLimits],
        gate: Check = open_to_all,
        arrival: float = ARRIVAL_SECONDS,
    ) -> None:
        self._limits = limits
        self._gate = gate
        self._arrival = arrival
        self._wrapped = Wrapped(self._parsing)

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Read and parse the requests of a method with limits."""
        method = details.method
        if method not in self._limits:
            return handler
        return self._wrapped(handler, method)

    def _parsing(self, handler: Handler, method: str) -> Handler:
        parser = Parser.of(handler.request_deserializer, self._limits[method])
        if handler.request_streaming:
            return _parsing_all(handler, parser)
        return self._parsing_one(handler, parser, method)

    def _parsing_one(self, handler: Handler, parser: Parser, method: str) -> Handler:
        inner, gate, arrival = behaviour_of(handler), self._gate, self._arrival

        async def parse(requests: Any, context: Context) -> Any:
            lease = gate(method, context.time_remaining())
            request = await _request(parser, context, arrival, lease)
            return await inner(request, context)

        return unparsed(handler, parse)


async def _request(parser: Parser, context: Context, seconds: float, lease: Lease | None) -> Any:
    """The call's only message, parsed."""
    with lease or contextlib.nullcontext():
        data = await _message(context, seconds)
        if lease is not None:
            lease.resize(len(data))
        return await parser.parse(data)


async def _message(context: Context, seconds: float) -> bytes:
    """The call's only message. Raises InvalidArgument or DeadlineExceeded if it does not come."""
    try:
        async with asyncio.timeout(seconds):
            data = await context.read()
    except TimeoutError:
        problem = f"the request did not arrive within {seconds:g} s"
        raise DeadlineExceeded(problem) from None
    if data is grpc.aio.EOF:
        raise InvalidArgument(WHOLE, "is missing: the call has no message")
    return bytes(data)


def _parsing_all(handler: Handler, parser: Parser) -> Handler:
    """A handler of a stream of requests, each of which is parsed as it is asked for."""
    inner = behaviour_of(handler)

    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield await parser.parse(data)

    async def parse(requests: Any, context: Context) -> Any:
        return await inner(parsed(requests), context)

    return unparsed(handler, parse)
