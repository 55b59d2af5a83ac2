"""Whether anything is recorded: the switch between a telemetry that is on and one that is off."""

from __future__ import annotations

from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.telemetry.recorder import Telemetry


def telemetry_of(settings: ServerSettings) -> Telemetry:
    """What records calls by these settings; a server starts without its collector, too."""
    if settings.otlp_endpoint is None and not settings.metrics_port:
        return Telemetry()
    # Imported late: what is off costs no start-up time and no memory.
    from tokenpod.service.telemetry.recording import RecordingTelemetry

    return RecordingTelemetry(settings)
