"""The row of a method: all that the layers around a handler must know of an rpc.

Each protocol lists its rpcs once, as rows. Relay, authorisation, closing, telemetry, reflection,
health, message limits, admission and followers read the rows; none of them knows an rpc by its
name. docs/contract.md shows the whole table, and a test compares the two.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from tokenpod.core.task import Task
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.memory_budget import MemoryBudget
from tokenpod.service.rpc.wire import MESSAGE_FIELDS, MethodLimits, Size

#: What answers a call: (backend, request, context) -> response, or None where it writes a stream.
Serve = Callable[[Any, Any, Any], Awaitable[Any]]


class Access(enum.Enum):
    """Who may call a method."""

    #: Callers that show a token, where the operator asks for one (--auth-token-file).
    TOKEN = "token"  # noqa: S105 (a kind, not a token)
    #: Callers that show one of --adapter-token-file, wherever they call; nobody without that file.
    ADAPTERS = "adapters"
    #: The same, of --admin-token-file.
    ADMIN = "admin"
    #: All callers, also while the server closes: probes carry no token and must not wait.
    HEALTH = "health"


class Gate(enum.Enum):
    """What is checked before a call's message is read."""

    #: Nothing.
    NONE = "none"
    #: Whether the model is ready.
    READY = "ready"
    #: Whether the bounded queue has a place, and the front ends memory for the message.
    QUEUE = "queue"
    #: The same, and whether the call would get a row so early that it ends by its deadline.
    ROW = "row"


_KILOBYTE = 1024

#: Messages that say next to nothing.
SMALL = MethodLimits(4 * _KILOBYTE, Size(fields=64, elements=64))
#: A prompt, with a list of stops and biases or a long chat.
PROMPT = MethodLimits(None, Size(fields=32_768, elements=262_144), lists=True)
#: Thousands of prompts, each with a router's own table of slots. What a router has reserved by its
#: own count is never refused: on its socket a batch may be four times as long.
BATCH = MethodLimits(
    None,
    Size(fields=131_072, elements=1_310_720),
    trusted=Size(fields=524_288, elements=2_097_152),
)
#: Numbers of requests.
NAMES = MethodLimits(1024 * _KILOBYTE, Size(fields=8192, elements=131_072))


@dataclass(frozen=True, slots=True)
class Method:
    """One rpc.

    Args:
        name: `/package.Service/Method`.
        limits: of its messages.
        access: who may call it.
        gate: what is checked before its message is read.
        streams: it answers with a stream.
        takes_stream: it is asked by a stream: `serve` gets an iterator of requests.
        relayed: a further front end passes it on to the first one; else it serves it itself.
        on_followers: a pod that follows answers it; others are refused with the leader's address.
        traced: it makes a span and an access line, and counts in the metrics of rpcs.
        frequent: programs call it all the time, for each step or to look at the load: a call that
            ends with OK has an access line at severity debug alone.
        strict: messages with fields that it does not know are refused, unless the operator says
            otherwise (--unknown-fields).
        task: what a model must be for; None: any will do.
        serve: what answers it; None: a servicer of grpcio's.
        request, response: the classes of its messages, where `serve` is set.
    """

    name: str
    limits: MethodLimits
    access: Access = Access.TOKEN
    gate: Gate = Gate.NONE
    streams: bool = False
    takes_stream: bool = False
    relayed: bool = True
    on_followers: bool = False
    traced: bool = True
    frequent: bool = False
    strict: bool = False
    task: Task | None = None
    serve: Serve | None = None
    request: Any = None
    response: Any = None

    @property
    def service(self) -> str:
        """`package.Service`."""
        return self.name.split("/")[1]


def method_of(service: ServiceDescriptor, name: str, limits: MethodLimits, **row: Any) -> Method:
    """The row of an rpc that `service` has; raises KeyError if it has none of that name.

    Args:
        service: says the messages, and whether the rpc streams.
        name: without the service's.
        limits: of its messages.
        row: the rest of `Method`.
    """
    found = service.methods_by_name[name]
    return Method(
        name=f"/{service.full_name}/{name}",
        limits=limits,
        streams=found.server_streaming,
        takes_stream=found.client_streaming,
        request=GetMessageClass(found.input_type),
        response=GetMessageClass(found.output_type),
        **row,
    )


class MethodTable:
    """The rows of all rpcs of a server.

    Args:
        rows: no two of one name.
    """

    def __init__(self, rows: Iterable[Method]) -> None:
        #: By their names.
        self.rows: Mapping[str, Method] = MappingProxyType({row.name: row for row in rows})

    def __iter__(self) -> Iterator[Method]:
        return iter(self.rows.values())

    @property
    def open(self) -> frozenset[str]:
        """Names of the methods that need no token, and are answered while the server closes."""
        return self.named(Access.HEALTH)

    def named(self, access: Access) -> frozenset[str]:
        """Names of the methods that such callers may call."""
        return frozenset(row.name for row in self if row.access is access)

    @property
    def served(self) -> list[str]:
        """Names of the services that this project implements: they have a health status each."""
        return list(dict.fromkeys(row.service for row in self if row.serve is not None))

    def limits(
        self,
        *,
        max_logit_bias: int = 0,
        max_stop_sequences: int = 0,
        trusted: bool = False,
        strict: bool = True,
    ) -> dict[str, MethodLimits]:
        """The limits of every method, by name.

        Args:
            max_logit_bias, max_stop_sequences: what the operator lets a request have; each counts.
            trusted: routers alone can reach the listener.
            strict: methods that refuse unknown fields do so.
        """
        # An entry of a map is a message with two fields; each bias may come with a bad word.
        chosen = (MESSAGE_FIELDS + 3) * max_logit_bias + max_stop_sequences

        def limits(row: Method) -> MethodLimits:
            own = row.limits
            size = (own.trusted if trusted else None) or own.size
            if own.lists:
                size = Size(size.fields + chosen, size.elements)
            return replace(own, size=size, strict=row.strict and strict)

        return {row.name: limits(row) for row in self}


class Services(Protocol):
    """What serves the rpcs of a table, as far as listeners know it."""

    table: MethodTable
    admission: Admission

    def check(self, method: str, remaining: float | None = None) -> MemoryBudget | None:
        """Raise what a call of `method` would be refused with, whatever its message says.

        Args:
            method: its full name.
            remaining: seconds until the call's deadline; None: it has none.

        Returns:
            Where the bytes of the message are to be counted; None: nowhere.
        """
