"""Spans and metrics over OTLP; nothing at all unless an endpoint is set."""

from __future__ import annotations

from dataclasses import dataclass

import grpc


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Where telemetry goes. No endpoint: nowhere."""

    otlp_endpoint: str | None = None
    otlp_service_name: str = "tokenpod"
    otlp_sample_ratio: float = 1.0


class Telemetry:
    """What records calls. Make it with `start`."""

    @classmethod
    def start(cls, settings: TelemetrySettings) -> Telemetry:
        """Connect to the endpoint, if there is one."""
        return cls()

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """What to put around rpcs."""
        return []

    def shutdown(self) -> None:
        """Flush, within bounds."""
