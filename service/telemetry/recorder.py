"""What is recorded of calls: access lines and counts; spans and metrics if they are asked for.

Without an endpoint and a metrics port the class here is all there is, and neither OpenTelemetry's
SDK nor its exporters are imported. With one of them there is a `RecordingTelemetry`. Either way
nothing is done per token.

Prompts and generated texts never leave through here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenpod.core.outputs import Load
from tokenpod.service.rpc.methods import MethodTable
from tokenpod.service.telemetry.server_calls import (
    CallObserver,
    CallRecorder,
)

if TYPE_CHECKING:
    # Not imported while telemetry is off.
    from tokenpod.service.rpc.interceptors import Interceptor


@dataclass(frozen=True, slots=True)
class PodReadings:
    """What the first front end knows of the pod, besides the engine's load.

    `started_at` and `certificate_expires` are Unix times; the latter is None without TLS, or where
    the file can't be read.
    """

    started_at: float
    ready: bool
    stalled: bool
    admitted: int
    call_bytes: int
    most_call_bytes: int
    certificate_expires: float | None


class Telemetry:
    """Records calls, but no spans or metrics. Make it with `telemetry_of`.

    Args:
        observers: what is made of calls.
    """

    def __init__(self, observers: Sequence[CallObserver] = ()) -> None:
        self._observers = observers

    def interceptors(self, table: MethodTable) -> list[Interceptor]:
        """The interceptors that record rpcs; outermost, so that they see what the others do.

        Args:
            table: says which methods are not recorded.
        """
        return [CallRecorder(self._observers, table)]

    def watch(self, load: Callable[[], Load]) -> None:
        """Report the engine's load; `load` is called from another thread, now and then."""

    def watch_pod(self, read: Callable[[], PodReadings]) -> None:
        """Report what the first front end knows; `read` is called from another thread."""

    def watch_loop(self) -> Callable[[], None]:
        """Record how late this event loop is, from now on; call the result to stop."""
        return _nothing

    def listen(self) -> Callable[[], None]:
        """Open the metrics port, if it is set; call the result to close it. Raises OSError."""
        return _nothing

    def front_end_socket(self) -> socket.socket | None:
        """The end that a new front end inherits, to answer scrapes; None: nobody scrapes."""
        return None

    def answer_scrapes(self, descriptor: int) -> None:
        """Answer the first front end's scrapes, from a thread of its own."""

    def shutdown(self) -> None:
        """Send what is left; returns within 5 seconds even if the collector is gone."""


def _nothing() -> None:
    """There is nothing to end."""
