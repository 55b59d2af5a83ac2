"""Spans and metrics over OTLP; nothing at all unless an endpoint is set.

This module is the switch. With no endpoint it is all there is: no interceptor is installed, no call
is recorded, and neither OpenTelemetry's SDK nor its exporters are imported. With one, `start`
returns the `OtlpTelemetry` of otlp.py. Either way nothing is done per token.

Prompts and generated texts never leave through here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import grpc

from tokenpod.core.outputs import Load
from tokenpod.service.config import ServerSettings

if TYPE_CHECKING:
    # Not imported while telemetry is off.
    from tokenpod.service.telemetry.tracing import ServerCall


class Telemetry:
    """Records calls; this class records nothing. Make it with `start`."""

    @classmethod
    def start(cls, settings: ServerSettings) -> Telemetry:
        """Connect to the endpoint, if there is one; the server starts without its collector."""
        if settings.otlp_endpoint is None:
            return cls()
        # Imported late: what is off costs no start-up time and no memory.
        from tokenpod.service.telemetry.otlp import OtlpTelemetry

        return OtlpTelemetry(settings)

    def interceptors(self, untraced: Collection[str] = ()) -> list[grpc.aio.ServerInterceptor]:
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

    def shutdown(self) -> None:
        """Send what is left; returns within 5 seconds even if the collector is gone."""
