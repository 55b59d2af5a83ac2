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

from tokenpod.service.admission.memory_budget import LATE_SECONDS, LateMessages, MemoryBudget
from tokenpod.service.calls.errors import DeadlineExceeded, InvalidArgument
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.rpc.interceptors import (
    Context,
    Handler,
    Interceptor,
    Wrapped,
    behaviour_of,
    unparsed,
)
from tokenpod.service.rpc.methods import Services
from tokenpod.service.rpc.open_streams import OpenStreams
from tokenpod.service.rpc.wire import (
    LENIENT,
    PLAIN_BYTES,
    WHOLE,
    Fields,
    Malformed,
    MethodLimits,
    Strict,
    count,
    fault_in,
    fields_of,
)

#: Seconds that a message may take to arrive, and bytes of it that count as one second more: the
#: longest message of a method sets its time, since what has arrived of a message can't be seen. A
#: call whose message is not there in time is ended.
ARRIVAL_SECONDS = 5.0
ARRIVAL_BYTES_PER_SECOND = 512 * 1024

#: Calls of a listener that send a stream of requests, at once: they end when their clients like.
MOST_REQUEST_STREAMS = 4000

#: Messages from this size on are parsed in a turn of their own.
_LONG_BYTES = 64 * 1024


#: Called with a method's full name and the seconds until the deadline (None: it has none). Returns
#: where the message's bytes are to be counted; None: nowhere.
Check = Callable[[str, float | None], MemoryBudget | None]


def open_to_all(method: str, seconds: float | None) -> MemoryBudget | None:
    """A gate that refuses no call."""
    return None


def intake_of(settings: ServerSettings, services: Services, *, trusted: bool = False) -> Intake:
    """A listener's, by the operator's settings. `trusted`: routers alone can reach it."""
    limits = services.table.limits(
        max_logit_bias=settings.max_logit_bias,
        max_stop_sequences=settings.max_stop_sequences,
        trusted=trusted,
        strict=settings.unknown_fields == "refuse",
    )
    if trusted:
        return Intake(limits, services.check, longest=settings.max_router_message_bytes)
    late, longest = services.admission.late, settings.max_message_bytes
    return Intake(limits, services.check, late, longest=longest)


@dataclass(frozen=True, slots=True)
class Parser:
    """Bytes of one method's messages to messages.

    Args:
        deserialize: what grpcio's stubs have for it; None: bytes are wanted as they are.
        limits: of the method.
        fields: of its messages; None: they are not looked into.
    """

    deserialize: Callable[[bytes], Any] | None
    limits: MethodLimits
    fields: Fields | None = None

    @classmethod
    def of(cls, deserialize: Callable[[bytes], Any] | None, limits: MethodLimits) -> Parser:
        """Knows the message from its deserialiser, which is its class's own method."""
        owner = getattr(deserialize, "__self__", None)
        kind: Descriptor | None = getattr(owner, "DESCRIPTOR", None)
        return cls(deserialize, limits, None if kind is None else fields_of(kind))

    async def parse(self, data: bytes) -> Any:
        """Raises InvalidArgument. Other tasks get their turn while a long message is walked."""
        size = self.limits.size_for(len(data))
        if self.deserialize is None:
            return data
        if self.fields is None:
            return self.deserialize(data)
        if len(data) > _LONG_BYTES:
            # To copy it took some of this turn.
            await asyncio.sleep(0)
        try:
            strict = Strict() if self.limits.strict else LENIENT
            for _ in count(self.fields, data, size, strict):
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
        raise await _fault(self.fields, data)


async def _fault(fields: Fields, data: bytes) -> InvalidArgument:
    """What is wrong with a message that can't be parsed."""
    search = fault_in(fields, data)
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
            whatever it says. What it returns counts the message, until that has been parsed.
        late: counts messages that are late; None: they are not counted.
        longest: bytes that a message of the listener may have.
        arrival: seconds that the shortest message may take to arrive; see ARRIVAL_SECONDS.
        most_streams: calls with a stream of requests, at once.
    """

    def __init__(
        self,
        limits: Mapping[str, MethodLimits],
        gate: Check = open_to_all,
        late: LateMessages | None = None,
        *,
        longest: int = PLAIN_BYTES,
        arrival: float = ARRIVAL_SECONDS,
        most_streams: int = MOST_REQUEST_STREAMS,
    ) -> None:
        self._limits = limits
        self._gate = gate
        self._late = late
        self._longest = longest
        self._arrival = arrival
        self._streams = OpenStreams("request", most_streams)
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
            return self._parsing_all(handler, parser, method)
        return self._parsing_one(handler, parser, method)

    def _parsing_all(self, handler: Handler, parser: Parser, method: str) -> Handler:
        """A handler of a stream of requests, each of which is parsed as it is asked for."""
        inner, gate = behaviour_of(handler), self._gate

        async def parsed(requests: Any, memory: MemoryBudget | None) -> AsyncIterator[Any]:
            async for data in requests:
                with contextlib.nullcontext() if memory is None else memory.reserve(len(data)):
                    message = await parser.parse(data)
                yield message

        async def parse(requests: Any, context: Context) -> Any:
            memory = gate(method, context.time_remaining())
            with self._streams.place(context.peer()):
                return await inner(parsed(requests, memory), context)

        return unparsed(handler, parse)

    def _parsing_one(self, handler: Handler, parser: Parser, method: str) -> Handler:
        inner, gate, late = behaviour_of(handler), self._gate, self._late
        longest = parser.limits.bytes or self._longest
        seconds = self._arrival + longest / ARRIVAL_BYTES_PER_SECOND

        async def parse(requests: Any, context: Context) -> Any:
            remaining = context.time_remaining()
            if remaining == 0:
                # It waited too long in gRPC's queue: an answer would reach nobody.
                raise asyncio.CancelledError
            memory = gate(method, remaining)
            request = await _request(parser, context, seconds, late, memory)
            return await inner(request, context)

        return unparsed(handler, parse)


async def _request(
    parser: Parser,
    context: Context,
    seconds: float,
    late: LateMessages | None,
    memory: MemoryBudget | None,
) -> Any:
    """The call's only message, parsed."""
    data = await _message(context, seconds, late)
    with contextlib.nullcontext() if memory is None else memory.reserve(len(data)):
        return await parser.parse(data)


async def _message(context: Context, seconds: float, late: LateMessages | None) -> bytes:
    """The call's only message.

    Args:
        context: the call.
        seconds: that it may take to arrive.
        late: counts it if it is late.

    Raises:
        InvalidArgument: there is none.
        DeadlineExceeded: it has not arrived in time.
        ResourceExhausted: it is late, and so are too many others.
    """
    reading = asyncio.ensure_future(context.read())
    try:
        # Twice, so that a message that is there is not late because the event loop was.
        for _ in range(2):
            if not reading.done():
                await asyncio.wait([reading], timeout=LATE_SECONDS / 2)
        if not reading.done():
            with contextlib.nullcontext() if late is None else late.wait(context.peer()):
                await asyncio.wait([reading], timeout=seconds - LATE_SECONDS)
        if not reading.done():
            raise DeadlineExceeded(f"the request did not arrive within {seconds:.0f} s")
        data = reading.result()
    finally:
        reading.cancel()
    if data is grpc.aio.EOF:
        raise InvalidArgument(WHOLE, "is missing: the call has no message")
    return bytes(data)
