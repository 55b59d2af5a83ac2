"""Access lines: one for each call, however it ended. Never a prompt, never a text of the model.

call rpc=tokenpod.v1.GenerationService/Generate status=OK seconds=1.204 queue_seconds=0.002
first_token_seconds=0.034 prompt_tokens=12 cached_tokens=0 output_tokens=64 finish=length
request_id=... trace_id=... caller=9f3c01ab peer=ipv4:10.0.3.7:41802
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from tokenpod.service.calls.generation import Generation
from tokenpod.service.rpc.interceptors import caller_of
from tokenpod.service.telemetry.server_calls import (
    SERVER_ERRORS,
    CallObserver,
    ServerCall,
    finish_reasons,
)

log = logging.getLogger("tokenpod.access")

#: Hexadecimal digits of a caller's digest: enough to tell callers apart, too few to tell a token.
_CALLER_DIGITS = 8
#: Characters of what a client's metadata say that a line repeats.
_MOST_SHOWN = 128


class AccessLog(CallObserver):
    """Writes a line for each call, or for some of them.

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
        log.log(level, "call", extra=dict(_fields(call)))


def _fields(call: ServerCall) -> Iterator[tuple[str, Any]]:
    metadata = call.metadata
    yield "rpc", call.method
    yield "status", call.code.name
    if reason := call.reason:
        yield "reason", reason
        yield "phase", call.phase
    yield "seconds", round(call.seconds, 4)
    if call.generations:
        yield from _generated(call.generations)
    if call.texts:
        yield from _read(call)
    if request_id := call.request_id or _shown(metadata.get("x-request-id")):
        yield "request_id", request_id
    if trace_id := call.trace_id or _trace_id(metadata.get("traceparent")):
        yield "trace_id", trace_id
    if call.adapter:
        yield "adapter", call.adapter
    if call.labels:
        yield "labels", dict(call.labels)
    if "authorization" in metadata or call.context.peer_identities():
        yield "caller", caller_of(call.context)[:_CALLER_DIGITS]
    yield "peer", call.context.peer()


def _generated(generations: Sequence[Generation]) -> Iterator[tuple[str, Any]]:
    """Times of the first request, since they are about the same, and tokens of all."""
    first = generations[0]
    arrived, started = first.request.arrived_at, first.started
    if started is not None:
        yield "queue_seconds", _seconds(started.began_at - arrived)
    begun = [sample.first_token_at for sample in first.samples if sample.first_token_at]
    if begun:
        yield "first_token_seconds", _seconds(min(begun) - arrived)
    yield "prompt_tokens", sum(len(each.request.prompt) for each in generations)
    yield "cached_tokens", sum(each.cached_tokens for each in generations)
    yield "output_tokens", sum(each.generated_tokens for each in generations)
    reasons = [reason for each in generations for reason in finish_reasons(each)]
    if reasons:
        yield "finish", ",".join(dict.fromkeys(reasons))


def _read(call: ServerCall) -> Iterator[tuple[str, Any]]:
    """When the first of the texts was begun, and tokens of all."""
    if call.began_at is not None:
        yield "queue_seconds", _seconds(call.began_at - call.arrived_at)
    yield "texts", call.texts
    yield "prompt_tokens", call.read_tokens


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 4)


def _shown(value: Any) -> str:
    return value[:_MOST_SHOWN] if isinstance(value, str) else ""


def _trace_id(traceparent: Any) -> str:
    """Of `00-TRACE-PARENT-FLAGS`; "" of anything else."""
    parts = _shown(traceparent).split("-")
    return parts[1] if len(parts) == 4 else ""
