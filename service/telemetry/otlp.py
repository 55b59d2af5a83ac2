"""Exporters over OTLP. Imported only if an endpoint is set."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_METRICS_EVERY_SECONDS = 15
_EXPORT_SECONDS = 4


def span_sender(endpoint: str) -> SpanProcessor:
    """Sends spans from a thread of its own."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS))


def metric_sender(endpoint: str) -> MetricReader:
    """Sends all metrics every 15 seconds, from a thread of its own."""
    return PeriodicExportingMetricReader(
        OTLPMetricExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS),
        export_interval_millis=_METRICS_EVERY_SECONDS * 1000,
        export_timeout_millis=_EXPORT_SECONDS * 1000,
    )
