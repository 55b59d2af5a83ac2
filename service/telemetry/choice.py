"""What is recorded of calls, by the settings."""

from __future__ import annotations

from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.telemetry.recorder import Telemetry
from tokenpod.service.telemetry.server_calls import AccessLog, CallCounts, CallObserver


def telemetry_of(settings: ServerSettings, counters: PodCounters | None = None) -> Telemetry:
    """What records calls by these settings; a server starts without its collector, too.

    `counters`: where calls are counted for the pod; None: nowhere.
    """
    observers = list[CallObserver]()
    if counters is not None:
        observers.append(CallCounts(counters))
    if settings.access_log_ratio:
        observers.append(AccessLog(settings.access_log_ratio))
    if settings.otlp_endpoint is None and not settings.metrics_port:
        return Telemetry(observers)
    # Imported late: what is off costs no start-up time and no memory.
    from tokenpod.service.telemetry.recording import RecordingTelemetry

    return RecordingTelemetry(settings, observers)
