"""What is noted of each rpc, from the moment its handler is found to its end: a `ServerCall`.

One interceptor makes it, outermost, so that it sees what the others do: refusals, cancelled calls,
and errors as their statuses. Access lines, spans, metrics and the pod's counts are made of it by
observers. Nothing here is done per token.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import grpc

from tokenpod.core.outputs import FinishCode
from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.calls.generation import Generation
from tokenpod.service.rpc.interceptors import (
    Context,
    Handler,
    Interceptor,
    Wrapped,
    behaviour_of,
    caller_of,
    with_behaviour,
)
from tokenpod.service.rpc.methods import MethodTable
from tokenpod.service.telemetry.logs import ACCESS, plain_record

#: On a server only these are errors: the others are the client's doing (RPC conventions).
SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)

_FINISH = {
    FinishCode.LENGTH: "length",
    FinishCode.EOS: "stop",
    FinishCode.STOP_TOKEN: "stop",
    FinishCode.TIME_LIMIT: "time_limit",
    FinishCode.ABORTED: "abort",
    FinishCode.CONSTRAINT: "constraint",
}

_current: ContextVar[ServerCall | None] = ContextVar("tokenpod_server_call", default=None)


def current_call() -> ServerCall | None:
    """The recorded rpc that this task serves; None for probes and reflection."""
    return _current.get()


class CallObserver:
    """Makes something of calls. Its methods run on the event loop and must not wait."""

    def begin(self, call: ServerCall) -> None:
        """A call has come."""

    def adapt(self, adapter: str) -> None:
        """A request of a running call names this adapter, and is under way until the call ends."""

    def end(self, call: ServerCall) -> None:
        """A call is over: its code, reason and times are known."""


class ServerCall:
    """One rpc.

    Args:
        method: `pkg.Service/Method`.
        context: tells the deadline now, the caller, and the code in the end.
        observers: hear of it.
        frequent: programs call the method all the time, as a router does for each step.
    """

    def __init__(
        self,
        method: str,
        context: Context,
        observers: Sequence[CallObserver],
        *,
        frequent: bool = False,
    ) -> None:
        self.method = method
        self.context = context
        self.frequent = frequent
        self._observers = observers
        self._began = time.perf_counter()
        #: Most calls have one; a batch of prompts has one for each.
        self.generations: list[Generation] = []
        #: Of a call that wants numbers of texts: how many, their tokens, and nanoseconds of
        #: CLOCK_MONOTONIC at which the first came and was begun (None: none was).
        self.texts = self.read_tokens = self.arrived_at = 0
        self.began_at: int | None = None
        self.model_id = self.request_id = self.adapter = self.quantization = ""
        #: By which the client groups its calls.
        self.labels: Mapping[str, str] = {}
        #: Of its requests that are under way.
        self.adapters: list[str] = []
        #: Of W3C's trace context, in hexadecimal digits, where a span says it; "": none does.
        self.trace_id = ""
        #: Once it is over: what it ended with, how, and after how long.
        self.code = grpc.StatusCode.OK
        self.error: BaseException | None = None
        self.seconds = 0.0
        allowed = context.time_remaining()
        # A client whose deadline passes cancels the call, and its word comes before our clock says
        # so. A deadline is also rounded up on its way, by 1 % at most.
        self._slack = None if allowed is None else max(0.05, 0.01 * allowed)
        for observer in observers:
            observer.begin(self)

    def named(self, request_id: str, labels: Mapping[str, str]) -> None:
        """What the client calls it, or we do."""
        self.request_id, self.labels = request_id, labels

    def generated(
        self, generation: Generation, *, model_id: str, adapter: str = "", quantization: str = ""
    ) -> None:
        """What the call generated; said when it is over, however it ended."""
        self.generations.append(generation)
        self.model_id, self.adapter, self.quantization = model_id, adapter, quantization

    def reads(self, texts: int, tokens: int, *, arrived_at: int, began_at: int | None) -> None:
        """What the call has read; said when it is over, of a stream for each of its messages."""
        if not self.texts:
            self.arrived_at, self.began_at = arrived_at, began_at
        self.texts += texts
        self.read_tokens += tokens

    def adapts(self, adapter: str) -> None:
        """A request of the call names this adapter, and is under way until the call ends."""
        self.adapters.append(adapter)
        for observer in self._observers:
            observer.adapt(adapter)

    def end(self, error: BaseException | None) -> None:
        """The handler has ended, with `error` if by an exception."""
        self.error, self.code = error, self._code(error)
        self.seconds = time.perf_counter() - self._began
        for observer in self._observers:
            observer.end(self)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the client sent with it, by its keys."""
        return dict(self.context.invocation_metadata() or ())

    @property
    def reason(self) -> str:
        """Why it failed, as metrics count it: one of few words; "": it did not."""
        if self.code is grpc.StatusCode.OK:
            return ""
        return getattr(self.error, "reason", None) or self.code.name.lower()

    @property
    def phase(self) -> str:
        """How far the call's text had come."""
        if self.texts:
            return "queue" if self.began_at is None else "prefill"
        if not self.generations:
            return "admission"
        *_, (name, _, _) = generation_phases(self.generations[-1])
        return name

    def _code(self, error: BaseException | None) -> grpc.StatusCode:
        told: grpc.StatusCode | int | None = self.context.code()
        if isinstance(error, asyncio.CancelledError):
            remaining = self.context.time_remaining()
            late = self._slack is not None and remaining is not None and remaining <= self._slack
            return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        if isinstance(told, grpc.StatusCode) and (error is None or told is not grpc.StatusCode.OK):
            return told
        return grpc.StatusCode.OK if error is None else grpc.StatusCode.UNKNOWN


class CallCounts(CallObserver):
    """Counts calls by what they ended with, for the pod."""

    def __init__(self, counters: PodCounters) -> None:
        self._counters = counters

    def end(self, call: ServerCall) -> None:
        """One more."""
        self._counters.count_call(call.code.value[0])


class CallRecorder(Interceptor):
    """Makes a `ServerCall` of each rpc, and tells observers of it.

    Args:
        observers: in the order in which they hear.
        table: says which methods pass, since probes would bury the others; those that it does not
            have are recorded.
    """

    def __init__(self, observers: Sequence[CallObserver], table: MethodTable) -> None:
        self._observers = observers
        self._table = table
        self._wrapped = Wrapped(self._recorded)

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Record every call of a method that is traced."""
        return self._wrapped(handler, details.method)

    def _recorded(self, handler: Handler, name: str) -> Handler:
        row = self._table.rows.get(name)
        if row is not None and not row.traced:
            return handler
        inner, method = behaviour_of(handler), name.lstrip("/")
        frequent = row is not None and row.frequent

        async def record(request: Any, context: Context) -> Any:
            call, error = ServerCall(method, context, self._observers, frequent=frequent), None
            # Each rpc has a task of its own, whose context ends with it: nothing to reset.
            _current.set(call)
            try:
                return await inner(request, context)
            except BaseException as raised:
                error = raised
                raise
            finally:
                call.end(error)

        return with_behaviour(handler, record)


def finish_reasons(generation: Generation) -> list[str]:
    """How those samples have ended that have."""
    return [_FINISH[sample.ending.reason] for sample in generation.samples if sample.ending]


#: In their order.
PHASES = ("queue", "prefill", "decode")


def generation_phases(generation: Generation) -> Iterator[tuple[str, int, int | None]]:
    """(name, begin, end) in nanoseconds of CLOCK_MONOTONIC; None: the phase has not ended."""
    started = generation.started
    firsts = [sample.first_token_at for sample in generation.samples if sample.first_token_at]
    yield "queue", generation.request.arrived_at, started.began_at if started else None
    if started is not None:
        yield "prefill", started.began_at, min(firsts, default=None)
    if firsts:
        yield "decode", min(firsts), max(sample.last_token_at for sample in generation.samples)


# -- access lines -------------------------------------------------------------------------------

log = logging.getLogger(ACCESS)

#: Hexadecimal digits of a caller's digest: enough to tell callers apart, too few to tell a token.
_CALLER_DIGITS = 8
#: Characters of what a client's metadata say that a line repeats.
_MOST_SHOWN = 128


class AccessLog(CallObserver):
    """Writes a line for each call, or for some of them. Never a prompt, never a text of the model.

        call rpc=tokenpod.v1.GenerationService/Generate status=OK seconds=1.204 queue_seconds=0.002
        first_token_seconds=0.034 prompt_tokens=12 cached_tokens=0 output_tokens=64 finish=length
        request_id=... trace_id=... caller=9f3c01ab peer=ipv4:10.0.3.7:41802

    Calls that failed by the server's doing always have one. Calls of methods that programs call all
    the time have one at severity debug, unless they fail.

    Args:
        ratio: part of the other calls that have a line.
    """

    def __init__(self, ratio: float = 1.0) -> None:
        self._ratio = ratio

    def end(self, call: ServerCall) -> None:
        """Hand the line to the log, which writes it elsewhere."""
        quiet = call.frequent and call.code is grpc.StatusCode.OK
        level = logging.DEBUG if quiet else logging.INFO
        if not log.isEnabledFor(level):
            return
        if call.code not in SERVER_ERRORS and random.random() >= self._ratio:  # noqa: S311
            return
        log.handle(plain_record(ACCESS, level, "call", _fields(call)))


def _fields(call: ServerCall) -> dict[str, Any]:
    metadata = call.metadata
    fields: dict[str, Any] = {"rpc": call.method, "status": call.code.name}
    if reason := call.reason:
        fields |= {"reason": reason, "phase": call.phase}
    fields["seconds"] = round(call.seconds, 4)
    if call.generations:
        _add_generated(fields, call.generations)
    if call.texts:
        _add_read(fields, call)
    if request_id := call.request_id or _shown(metadata.get("x-request-id")):
        fields["request_id"] = request_id
    if trace_id := call.trace_id or _trace_id(metadata.get("traceparent")):
        fields["trace_id"] = trace_id
    if call.adapter:
        fields["adapter"] = call.adapter
    if call.labels:
        fields["labels"] = dict(call.labels)
    if "authorization" in metadata or call.context.peer_identities():
        fields["caller"] = caller_of(call.context)[:_CALLER_DIGITS]
    fields["peer"] = call.context.peer()
    return fields


def _add_generated(fields: dict[str, Any], generations: Sequence[Generation]) -> None:
    """Times of the first request, since they are about the same, and tokens of all."""
    first = generations[0]
    arrived, started = first.request.arrived_at, first.started
    if started is not None:
        fields["queue_seconds"] = _seconds(started.began_at - arrived)
    begun = [sample.first_token_at for sample in first.samples if sample.first_token_at]
    if begun:
        fields["first_token_seconds"] = _seconds(min(begun) - arrived)
    fields["prompt_tokens"] = sum([len(each.request.prompt) for each in generations])
    fields["cached_tokens"] = sum([each.cached_tokens for each in generations])
    fields["output_tokens"] = sum([each.generated_tokens for each in generations])
    reasons = [reason for each in generations for reason in finish_reasons(each)]
    if reasons:
        fields["finish"] = ",".join(dict.fromkeys(reasons))


def _add_read(fields: dict[str, Any], call: ServerCall) -> None:
    """When the first of the texts was begun, and tokens of all."""
    if call.began_at is not None:
        fields["queue_seconds"] = _seconds(call.began_at - call.arrived_at)
    fields |= {"texts": call.texts, "prompt_tokens": call.read_tokens}


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 4)


def _shown(value: Any) -> str:
    return value[:_MOST_SHOWN] if isinstance(value, str) else ""


def _trace_id(traceparent: Any) -> str:
    """Of `00-TRACE-PARENT-FLAGS`; "" of anything else."""
    if traceparent is None:
        return ""
    parts = _shown(traceparent).split("-")
    return parts[1] if len(parts) == 4 else ""
