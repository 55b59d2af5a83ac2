"""Server spans, and metrics of rpcs: one observer of calls makes both.

opentelemetry-instrumentation-grpc has an interceptor for asyncio, too. It (0.66b2) breaks handlers
that call `context.write`, records cancelled calls, expired ones and rich errors as OK, and
exceptions twice, since it follows calls by a proxy around the context, which sees only what it
knows to override. A `ServerCall` asks the context itself for its code once the handler has ended,
whichever way that came about. Names and first attributes of spans are as that package has them.

    server span       /---------------- pkg.Service/Method ----------------\\
    its children         /-- queue --\\/-- prefill --\\/----- decode -----\\

The children are made when the call is over, from times that the engine noted anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
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
    format_trace_id,
    set_span_in_context,
)

from tokenpod.service.calls.generation import Generation
from tokenpod.service.telemetry.instruments import Instruments
from tokenpod.service.telemetry.server_calls import (
    SERVER_ERRORS,
    CallObserver,
    ServerCall,
    finish_reasons,
    generation_phases,
)

_GEN_AI = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "tokenpod"}


class CallTracing(CallObserver):
    """Makes a span of each rpc, and times it.

    Args:
        tracer: makes the spans; None: nobody wants any, and rpcs are only counted and timed.
        instruments: hear how long each rpc took, and what it generated.
    """

    def __init__(self, tracer: Tracer | None, instruments: Instruments) -> None:
        self._tracer = tracer
        self._instruments = instruments
        #: Of calls under way.
        self._spans: dict[ServerCall, Span] = {}

    def begin(self, call: ServerCall) -> None:
        """The call's span, which is the current one of this task from now on."""
        if self._tracer is None:
            return
        metadata = call.metadata
        span = self._tracer.start_span(call.method, context=extract(metadata), kind=SpanKind.SERVER)
        call.trace_id = format_trace_id(span.get_span_context().trace_id)
        if span.is_recording():
            span.set_attributes(dict(_first_attributes(call.method, metadata, call.context.peer())))
        # Each rpc has a task of its own, whose context ends with it: nothing to detach.
        otel_context.attach(set_span_in_context(span))
        self._spans[call] = span

    def adapt(self, adapter: str) -> None:
        """One more request with this adapter is under way."""
        self._instruments.add_adapter_requests(adapter, 1)

    def end(self, call: ServerCall) -> None:
        """Count and time the call, and end its span."""
        code, span = call.code, self._spans.pop(call, INVALID_SPAN)
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": call.method,
            "rpc.response.status_code": code.name,
        }
        if code in SERVER_ERRORS:
            attributes["error.type"] = code.name
        self._instruments.record_call(call.seconds, attributes)
        if reason := call.reason:
            self._instruments.record_failure(attributes, reason, call.phase)
        for adapter in call.adapters:
            self._instruments.add_adapter_requests(adapter, -1)
        for generation in call.generations:
            self._end_generation(call, generation, span)
        if span.is_recording():
            span.set_attributes(attributes)
            # The older attribute, which existing dashboards read.
            span.set_attribute("rpc.grpc.status_code", code.value[0])
            if code in SERVER_ERRORS:
                span.set_status(Status(StatusCode.ERROR, call.context.details() or None))
                fault = _fault(call.error)
                if fault is not None:
                    span.record_exception(fault)
        span.end()

    def _end_generation(self, call: ServerCall, generation: Generation, span: Span) -> None:
        error = None if call.code is grpc.StatusCode.OK else call.code.name
        named = {
            "tokenpod.adapter": call.adapter,
            "tokenpod.quantization": call.quantization,
        }
        attributes = {
            **_GEN_AI,
            "gen_ai.request.model": call.model_id,
            **{name: value for name, value in named.items() if value},
        }
        self._instruments.record_generation(generation, call.seconds, attributes, error)
        if not span.is_recording() or self._tracer is None:
            return
        span.set_attributes(attributes)
        span.set_attribute("gen_ai.response.id", call.request_id)
        span.set_attributes(dict(_generation_attributes(generation)))
        parent = set_span_in_context(span, otel_context.Context())
        to_unix = time.time_ns() - time.monotonic_ns()
        now = time.monotonic_ns()
        for name, began, ended in generation_phases(generation):
            phase = self._tracer.start_span(name, context=parent, start_time=began + to_unix)
            phase.end(max(began, now if ended is None else ended) + to_unix)


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
    if reasons := finish_reasons(generation):
        yield "gen_ai.response.finish_reasons", reasons
