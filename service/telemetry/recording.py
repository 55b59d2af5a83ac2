"""Telemetry that is on: providers, where they send or show what is recorded, and their end.

Imported only if an endpoint or a metrics port is set.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from tokenpod.core.outputs import Load
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.telemetry.histograms import Histograms, PageReader
from tokenpod.service.telemetry.instruments import Instruments
from tokenpod.service.telemetry.recorder import PodReadings, Telemetry
from tokenpod.service.telemetry.server_calls import CallObserver
from tokenpod.service.telemetry.tracing import CallTracing

if TYPE_CHECKING:
    from tokenpod.service.telemetry.snapshots import FrontEndSnapshots

_SCOPE = "tokenpod"
_SHUTDOWN_SECONDS = 4.5
#: How often the lag of the event loop is looked at.
_LAG_EVERY_SECONDS = 0.25


class RecordingTelemetry(Telemetry):
    """Sends spans and metrics to `settings.otlp_endpoint`, and shows metrics to scrapers.

    OpenTelemetry's own variables add to the settings: OTEL_RESOURCE_ATTRIBUTES (a chart puts the
    pod's name there) and OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, settings: ServerSettings, observers: Sequence[CallObserver] = ()) -> None:
        # A process, not a pod: the front ends of one pod count what each of them did, and a
        # collector that took them for one would see counters jump.
        instance = {"service.instance.id": str(uuid.uuid4())}
        resource = Resource.create({"service.name": settings.otlp_service_name, **instance})
        self._settings = settings
        readers = list[MetricReader]()
        histograms = Histograms(traced=settings.otlp_endpoint is not None)
        # The providers are ours, not the process's: nothing is registered globally or at exit.
        self._spans: TracerProvider | None = None
        if (endpoint := settings.otlp_endpoint) is not None:
            # gRPC's exporters take memory and time to import.
            from tokenpod.service.telemetry.otlp import metric_sender, span_sender

            sampler = ParentBased(TraceIdRatioBased(settings.otlp_sample_ratio))
            self._spans = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
            self._spans.add_span_processor(span_sender(endpoint))
            readers.append(metric_sender(endpoint, histograms))
        self._front_ends: FrontEndSnapshots | None = None
        self._reader = PageReader(histograms) if settings.metrics_port else None
        if self._reader is not None:
            readers.append(self._reader)
        self._metrics = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self._instruments = Instruments(self._metrics.get_meter(_SCOPE), histograms)
        tracer = None if self._spans is None else self._spans.get_tracer(_SCOPE)
        super().__init__([CallTracing(tracer, self._instruments), *observers])

    def watch(self, load: Callable[[], Load]) -> None:
        """Report the engine's load whenever metrics are read."""
        self._instruments.watch(load)

    def watch_pod(self, read: Callable[[], PodReadings]) -> None:
        """Report what the first front end knows of the pod whenever metrics are read."""
        self._instruments.watch_pod(read)

    def watch_loop(self) -> Callable[[], None]:
        """Record how late this event loop is, from now on; call the result to stop."""
        task = asyncio.create_task(self._watch_loop())

        def stop() -> None:
            task.cancel()

        return stop

    async def _watch_loop(self) -> None:
        while True:
            due = time.perf_counter() + _LAG_EVERY_SECONDS
            await asyncio.sleep(_LAG_EVERY_SECONDS)
            self._instruments.record_lag(max(time.perf_counter() - due, 0.0))

    def listen(self) -> Callable[[], None]:
        """Open the metrics port, if it is set; call the result to close it. Raises OSError."""
        address = self._settings.metrics_address
        if address is None or self._reader is None:
            return lambda: None
        from tokenpod.service.telemetry.metrics_port import MetricsPort, Page
        from tokenpod.service.telemetry.snapshots import FrontEndSnapshots

        self._front_ends = FrontEndSnapshots()
        return MetricsPort(address, Page(self._settings, self._reader, self._front_ends)).close

    def front_end_socket(self) -> socket.socket | None:
        """The end that a new front end inherits, to answer scrapes; None: nobody scrapes."""
        return None if self._front_ends is None else self._front_ends.add()

    def answer_scrapes(self, descriptor: int) -> None:
        """Answer the first front end's scrapes, from a thread of its own."""
        assert self._reader is not None
        from tokenpod.service.telemetry.snapshots import answer_scrapes

        answer_scrapes(socket.socket(fileno=descriptor), self._reader)

    def shutdown(self) -> None:
        """Send what is left.

        The SDK's own shutdowns wait for retries, up to half a minute each. They run on daemon
        threads, side by side, and are left behind when time is up.
        """
        ends: list[Callable[[], object]] = [self._metrics.shutdown]
        if self._spans is not None:
            ends.append(self._spans.shutdown)
        enders = [
            threading.Thread(target=end, name="telemetry-shutdown", daemon=True) for end in ends
        ]
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for thread in enders:
            thread.start()
        for thread in enders:
            thread.join(max(deadline - time.monotonic(), 0.0))
