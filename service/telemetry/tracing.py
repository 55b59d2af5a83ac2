"""Server spans: one for each rpc, by one interceptor of ours.

opentelemetry-instrumentation-grpc has an interceptor for asyncio, too. It (0.66b2) breaks handlers
that call `context.write`, records cancelled calls, expired ones and rich errors as OK, and
exceptions twice, since it follows calls by a proxy around the context, which sees only what it
knows to override. Here the context itself is asked for its code once the handler has ended,
whichever way that came about. Names and first attributes of spans are as that package has them.

    server span       /---------------- pkg.Service/Method ----------------\\
    its children         /-- queue --\\/-- prefill --\\/----- decode -----\\

The children are made when the call is over, from times that the engine noted anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

import grpc
from opentelemetry import context as otel_context
from opentelemetry.propagate import extract
from opentelemetry.trace import (
    INVALID_SPAN,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)

from tokenpod.core.outputs import FinishCode
from tokenpod.service.calls.generation import Generation
from tokenpod.service.rpc.interceptors import (
    Context,
    Handler,
    Interceptor,
    Wrapped,
    behaviour_of,
    with_behaviour,
)
from tokenpod.service.telemetry.instruments import Instruments, generation_phases

#: On a server only these are errors: the others are the client's doing (RPC conventions).
_ERRORS = frozenset(
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
_GEN_AI = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "tokenpod"}

_current: ContextVar[ServerCall | None] = ContextVar("tokenpod_server_call", default=None)


def current_call() -> ServerCall | None:
    """The recorded rpc that this task serves."""
    return _current.get()


class ServerCall:
    """One rpc, from the moment its handler is found.

    Args:
        span: its server span, begun.
        method: `pkg.Service/Method`.
        context: tells the deadline now and the code in the end.
        tracer: makes the spans of phases; None: there are none.
    """

    def __init__(
        self,
        span: Span,
        method: str,
        context: Context,
        tracer: Tracer | None,
        instruments: Instruments,
    ) -> None:
        self._span = span
        self._method = method
        self._context = context
        self._tracer = tracer
        self._instruments = instruments
        self._began = time.perf_counter()
        #: Most calls have one; a batch of prompts has one for each.
        self._generations: list[Generation] = []
        self._model_id = self._request_id = ""
        #: Of its requests.
        self._adapters: list[str] = []
        #: What metrics and spans of the call's generations say besides.
        self._named: dict[str, str] = {}
        allowed = context.time_remaining()
        # A client whose deadline passes cancels the call, and its word comes before our clock says
        # so. A deadline is also rounded up on its way, by 1 % at most.
        self._slack = None if allowed is None else max(0.05, 0.01 * allowed)

    def generated(
        self,
        generation: Generation,
        *,
        model_id: str,
        request_id: str,
        adapter: str = "",
        quantization: str = "",
    ) -> None:
        """What the call generated; said when it is over, however it ended."""
        named = {"tokenpod.adapter": adapter, "tokenpod.quantization": quantization}
        self._named = {name: value for name, value in named.items() if value}
        self._generations.append(generation)
        self._model_id, self._request_id = model_id, request_id

    def adapts(self, adapter: str) -> None:
        """A request of the call names this adapter, and is under way until the call ends."""
        self._adapters.append(adapter)
        self._instruments.add_adapter_requests(adapter, 1)

    def end(self, error: BaseException | None) -> None:
        """The handler has ended, with `error` if by an exception."""
        code = self._code(error)
        seconds = time.perf_counter() - self._began
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": self._method,
            "rpc.response.status_code": code.name,
        }
        if code in _ERRORS:
            attributes["error.type"] = code.name
        self._instruments.record_call(seconds, attributes)
        if code is not grpc.StatusCode.OK:
            reason = getattr(error, "reason", None) or code.name.lower()
            self._instruments.record_failure(attributes, reason, self._phase)
        for adapter in self._adapters:
            self._instruments.add_adapter_requests(adapter, -1)
        for generation in self._generations:
            self._end_generation(generation, seconds, code)
        if self._span.is_recording():
            self._span.set_attributes(attributes)
            # The older attribute, which existing dashboards read.
            self._span.set_attribute("rpc.grpc.status_code", code.value[0])
            if code in _ERRORS:
                self._span.set_status(Status(StatusCode.ERROR, self._context.details() or None))
                fault = _fault(error)
                if fault is not None:
                    self._span.record_exception(fault)
        self._span.end()

    @property
    def _phase(self) -> str:
        """How far the call's text had come."""
        if not self._generations:
            return "admission"
        *_, (name, _, _) = generation_phases(self._generations[-1])
        return name

    def _code(self, error: BaseException | None) -> grpc.StatusCode:
        told: grpc.StatusCode | int | None = self._context.code()
        if isinstance(error, asyncio.CancelledError):
            remaining = self._context.time_remaining()
            late = self._slack is not None and remaining is not None and remaining <= self._slack
            return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        if isinstance(told, grpc.StatusCode) and (error is None or told is not grpc.StatusCode.OK):
            return told
        return grpc.StatusCode.OK if error is None else grpc.StatusCode.UNKNOWN

    def _end_generation(
        self, generation: Generation, seconds: float, code: grpc.StatusCode
    ) -> None:
        error = None if code is grpc.StatusCode.OK else code.name
        attributes = {**_GEN_AI, "gen_ai.request.model": self._model_id, **self._named}
        self._instruments.record_generation(generation, seconds, attributes, error)
        if not self._span.is_recording() or self._tracer is None:
            return
        self._span.set_attributes(attributes)
        self._span.set_attribute("gen_ai.response.id", self._request_id)
        self._span.set_attributes(dict(_generation_attributes(generation)))
        parent = set_span_in_context(self._span, otel_context.Context())
        to_unix = time.time_ns() - time.monotonic_ns()
        now = time.monotonic_ns()
        for name, began, ended in generation_phases(generation):
            phase = self._tracer.start_span(name, context=parent, start_time=began + to_unix)
            phase.end(max(began, now if ended is None else ended) + to_unix)


class TracingInterceptor(Interceptor):
    """Makes a span of each rpc, and times it.

    Args:
        tracer: makes the spans; None: nobody wants any, and rpcs are only counted and timed.
        instruments: hear how long each rpc took.
        untraced: full names of the methods that pass: spans of probes would bury the others.
    """

    def __init__(
        self, tracer: Tracer | None, instruments: Instruments, untraced: Collection[str] = ()
    ) -> None:
        self._tracer = tracer
        self._instruments = instruments
        self._untraced = untraced
        self._wrapped = Wrapped(self._recorded)

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Record every call of a method that is traced."""
        if details.method in self._untraced:
            return handler
        return self._wrapped(handler, details.method)

    def _recorded(self, handler: Handler, name: str) -> Handler:
        inner, method = behaviour_of(handler), name.lstrip("/")

        async def record(request: Any, context: Context) -> Any:
            call, error = self._begin(method, context), None
            try:
                return await inner(request, context)
            except BaseException as raised:
                error = raised
                raise
            finally:
                call.end(error)

        return with_behaviour(handler, record)

    def _begin(self, method: str, context: Context) -> ServerCall:
        span = INVALID_SPAN if self._tracer is None else _begun(self._tracer, method, context)
        call = ServerCall(span, method, context, self._tracer, self._instruments)
        _current.set(call)
        return call


def _begun(tracer: Tracer, method: str, context: Context) -> Span:
    """The server span of a call, which is the current one of this task from now on."""
    metadata = dict(context.invocation_metadata() or ())
    span = tracer.start_span(method, context=extract(metadata), kind=SpanKind.SERVER)
    if span.is_recording():
        span.set_attributes(dict(_first_attributes(method, metadata, context.peer())))
    # Each rpc has a task of its own, whose context ends with it: nothing to detach.
    otel_context.attach(set_span_in_context(span))
    return span


def _first_attributes(
    method: str, metadata: Mapping[str, Any], peer: str
) -> Iterator[tuple[str, str | int]]:
    """What a span says from its beginning on: the RPC conventions' attributes, old and new."""
    yield "rpc.system", "grpc"
    yield "rpc.grpc.status_code", 0
    yield "rpc.service", method.partition("/")[0]
    yield "rpc.method", method.partition("/")[2]
    if "user-agent" in metadata:
        yield "rpc.user_agent", metadata["user-agent"]
    yield from _peer(peer)


def _peer(peer: str) -> Iterator[tuple[str, str | int]]:
    """Attributes of `ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5` or `unix:path` (the path may be empty)."""
    transport, _, address = unquote(peer).partition(":")
    if transport.startswith("unix"):
        yield "network.transport", "unix"
        if address:
            yield "network.peer.address", address
        return
    host, _, port = address.rpartition(":")
    # The older names, which existing dashboards read.
    yield "net.peer.ip", host
    yield "net.peer.port", port
    if host in ("[::1]", "127.0.0.1"):
        yield "net.peer.name", "localhost"
    yield "network.transport", "tcp"
    if host and port.isdecimal():
        yield "network.peer.address", host.strip("[]")
        yield "network.peer.port", int(port)


def _fault(error: BaseException | None) -> BaseException | None:
    """The exception that a status stands for; None where the handler chose the status."""
    if isinstance(error, grpc.aio.AbortError):
        return error.__context__
    return error if isinstance(error, Exception) else None


def _generation_attributes(generation: Generation) -> Iterator[tuple[str, Any]]:
    request, sampling = generation.request, generation.request.sampling
    yield "gen_ai.request.max_tokens", request.stopping.max_new_tokens
    yield "gen_ai.request.choice.count", len(request.reported)
    if sampling.do_sample:
        yield "gen_ai.request.temperature", sampling.temperature
        yield "gen_ai.request.top_p", sampling.top_p
        yield "gen_ai.request.top_k", sampling.top_k
        # OpenTelemetry's integers are signed, seeds are not.
        yield "gen_ai.request.seed", str(sampling.seed)
    yield "gen_ai.request.frequency_penalty", sampling.frequency_penalty
    yield "gen_ai.request.presence_penalty", sampling.presence_penalty
    yield "gen_ai.usage.input_tokens", len(request.prompt)
    yield "gen_ai.usage.output_tokens", sum(sample.generated for sample in generation.samples)
    if generation.started is not None:
        yield "gen_ai.usage.cache_read.input_tokens", generation.started.cached_tokens
    endings = [sample.ending for sample in generation.samples if sample.ending]
    if endings:
        yield "gen_ai.response.finish_reasons", [_FINISH[ending.reason] for ending in endings]
