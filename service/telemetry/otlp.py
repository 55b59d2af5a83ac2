"""Exporters over OTLP. Imported only if an endpoint is set."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from tokenpod.service.telemetry.histograms import Histograms

log = logging.getLogger("tokenpod")

_METRICS_EVERY_SECONDS = 15
_EXPORT_SECONDS = 4


class _Complaints(logging.Filter):
    """Lets an exporter complain once, until it has sent something; never of a single try."""

    def __init__(self) -> None:
        super().__init__()
        #: `metrics` or `traces`.
        self.said = set[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is logged."""
        what = str(record.args[0]) if isinstance(record.args, tuple) and record.args else record.msg
        if record.levelno < logging.ERROR or what in self.said:
            return False
        self.said.add(what)
        return True

    def sent(self, what: str) -> None:
        """Some of these have arrived."""
        if what in self.said:
            self.said.remove(what)
            log.info("the collector takes %s again", what)


#: Loggers are the process's, and so is this.
_COMPLAINTS = _Complaints()
logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(_COMPLAINTS)


class _SpanExporter(OTLPSpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send these."""
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            _COMPLAINTS.sent("traces")
        return result


class _MetricExporter(OTLPMetricExporter):
    def __init__(self, histograms: Histograms, endpoint: str) -> None:
        super().__init__(endpoint=endpoint, timeout=_EXPORT_SECONDS)
        self._histograms = histograms

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **more: Any
    ) -> MetricExportResult:
        """Send these."""
        result = super().export(self._histograms.filled(metrics_data), timeout_millis, **more)
        if result is MetricExportResult.SUCCESS:
            _COMPLAINTS.sent("metrics")
        return result


def span_sender(endpoint: str) -> SpanProcessor:
    """Sends spans from a thread of its own."""
    return BatchSpanProcessor(_SpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS))


def metric_sender(endpoint: str, histograms: Histograms) -> MetricReader:
    """Sends all metrics every 15 seconds, from a thread of its own."""
    return PeriodicExportingMetricReader(
        _MetricExporter(histograms, endpoint),
        export_interval_millis=_METRICS_EVERY_SECONDS * 1000,
        export_timeout_millis=_EXPORT_SECONDS * 1000,
    )
