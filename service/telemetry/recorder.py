"""Spans and metrics over OTLP, and metrics to pull; nothing unless an endpoint or a port is set.

With neither, the class here is all there is: no interceptor is installed, no call is recorded, and
neither OpenTelemetry's SDK nor its exporters are imported. With one of them there is a
`RecordingTelemetry`. Either way nothing is done per token.

Prompts and generated texts never leave through here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tokenpod.core.outputs import Load

if TYPE_CHECKING:
    # Not imported while telemetry is off.
    from tokenpod.service.rpc.interceptors import Interceptor
    from tokenpod.service.telemetry.readings import PodReadings
    from tokenpod.service.telemetry.tracing import ServerCall


class Telemetry:
    """Records calls; this class records nothing. Make it with `telemetry_of`."""

    def interceptors(self, untraced: Collection[str] = ()) -> list[Interceptor]:
        """The interceptors that record rpcs; outermost, so that they see what the others do.

        Args:
            untraced: full names of the methods that are not recorded.
        """
        return []

    def current_call(self) -> ServerCall | None:
        """The rpc that this task serves; None if it is not recorded."""
        return None

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
