"""Spans and metrics over OTLP; nothing at all unless an endpoint is set.

This module is the switch. With no endpoint it is all there is: no interceptor is installed, no call
is recorded, and neither OpenTelemetry's SDK nor its exporters are imported. With one, `start`
returns the `OtlpTelemetry` of otlp.py. Either way nothing is done per token.

Prompts and generated texts never leave through here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import grpc

from tokenpod.core.messages import Load
from tokenpod.service.config import ServerSettings
from tokenpod.service.serving.generation import Generation


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Where telemetry goes. No endpoint: nowhere.

    Args:
        otlp_endpoint: of an OTLP collector that speaks gRPC: `http://host:4317` in plaintext,
            `https://host:4317` with TLS.
        otlp_service_name: the resource's `service.name`.
        otlp_sample_ratio: share of traces kept, 0 to 1, where the caller has not decided already.
    """

    otlp_endpoint: str | None = None
    otlp_service_name: str = "tokenpod"
    otlp_sample_ratio: float = 1.0

    @classmethod
    def of(cls, settings: ServerSettings) -> TelemetrySettings:
        """The operator's."""
        return cls(settings.otlp_endpoint, settings.otlp_service_name, settings.otlp_sample_ratio)


class RecordedCall(Protocol):
    """The rpc being served, as telemetry sees it."""

    def generated(self, generation: Generation, *, model_id: str, request_id: str) -> None:
        """What the call generated; said once, when it is over, however it ended."""


class Telemetry:
    """What records calls: this one nothing. Make it with `start`."""

    @classmethod
    def start(cls, settings: TelemetrySettings) -> Telemetry:
        """Connect to the endpoint, if there is one; a collector that is away stops nobody."""
        if settings.otlp_endpoint is None:
            return cls()
        # Imported late: what is off costs no start-up time and no memory.
        from tokenpod.service.telemetry.otlp import OtlpTelemetry

        return OtlpTelemetry(settings)

    def interceptors(self, untraced: Collection[str] = ()) -> list[grpc.aio.ServerInterceptor]:
        """What to put around rpcs: outermost, so that what other interceptors do is seen.

        Args:
            untraced: full names of the methods that are not recorded.
        """
        return []

    def current_call(self) -> RecordedCall | None:
        """The rpc that this task serves; None if it is not recorded."""
        return None

    def watch(self, load: Callable[[], Load]) -> None:
        """Report the engine's load; `load` is called from another thread, now and then."""

    def shutdown(self) -> None:
        """Send what is left; returns within 5 seconds even if the collector is gone."""
