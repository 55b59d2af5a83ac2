"""Telemetry that is on: providers, exporters and their end.

Imported by telemetry.py only if an endpoint is set.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection

import grpc
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from tokenpod.core.outputs import Load
from tokenpod.service.config import ServerSettings
from tokenpod.service.telemetry.instruments import Instruments
from tokenpod.service.telemetry.recorder import Telemetry
from tokenpod.service.telemetry.tracing import ServerCall, TracingInterceptor, current_call

_SCOPE = "tokenpod"
_METRICS_EVERY_SECONDS = 15
_EXPORT_SECONDS = 4
_SHUTDOWN_SECONDS = 4.5


class OtlpTelemetry(Telemetry):
    """Sends spans and metrics to `settings.otlp_endpoint` from threads of its own.

    OpenTelemetry's own variables add to the settings: OTEL_RESOURCE_ATTRIBUTES (a chart puts the
    pod's name there) and OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, settings: ServerSettings) -> None:
        # A process, not a pod: the front ends of one pod count what each of them did, and a
        # collector that took them for one would see counters jump.
        instance = {"service.instance.id": str(uuid.uuid4())}
        resource = Resource.create({"service.name": settings.otlp_service_name, **instance})
        endpoint = settings.otlp_endpoint
        # The providers are ours, not the process's: nothing is registered globally or at exit.
        self._spans = TracerProvider(
            resource=resource,
            sampler=ParentBased(TraceIdRatioBased(settings.otlp_sample_ratio)),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
        self._spans.add_span_processor(BatchSpanProcessor(exporter))
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS),
            export_interval_millis=_METRICS_EVERY_SECONDS * 1000,
            export_timeout_millis=_EXPORT_SECONDS * 1000,
        )
        self._metrics = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._instruments = Instruments(self._metrics.get_meter(_SCOPE))
        self._tracer = self._spans.get_tracer(_SCOPE)

    def interceptors(self, untraced: Collection[str] = ()) -> list[grpc.aio.ServerInterceptor]:
        """One, that makes server spans and times calls."""
        return [TracingInterceptor(self._tracer, self._instruments, untraced)]

    def current_call(self) -> ServerCall | None:
        """The rpc that this task serves; None for probes and reflection."""
        return current_call()

    def watch(self, load: Callable[[], Load]) -> None:
        """Report the engine's load with every export of metrics."""
        self._instruments.watch(load)

    def shutdown(self) -> None:
        """Send what is left.

        The SDK's own shutdowns wait for retries, up to half a minute each. They run on daemon
        threads, side by side, and are left behind when time is up.
        """
        enders = [
            threading.Thread(target=end, name="telemetry-shutdown", daemon=True)
            for end in (self._spans.shutdown, self._metrics.shutdown)
        ]
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for thread in enders:
            thread.start()
        for thread in enders:
            thread.join(max(deadline - time.monotonic(), 0.0))
