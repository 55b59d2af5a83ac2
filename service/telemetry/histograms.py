"""Histograms whose observations cost a microsecond or two, among the SDK's instruments.

The SDK's own take 12 µs for an observation with three attributes, which they copy, check, sort and
hash each time, and a call makes nine. To the SDK one of ours is an observable gauge, so that it has
its place, unit and meaning there; what a reader gets is filled with our points on its way out:

    record --> a series' buckets
                       |
    the SDK's MetricsData --filled--> the page of metrics, the exporter

Points are cumulative, and have the limit of series and the exemplars that the SDK's would have.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricsData,
)
from opentelemetry.sdk.metrics.export import Histogram as Points
from opentelemetry.trace import get_current_span

Attributes = Mapping[str, str]

#: Sets of attributes of one histogram; what comes behind them is counted together. (The SDK's.)
_MOST_SERIES = 2000
_REST = frozenset({("otel.metric.overflow", "")})


class Histogram:
    """One of them: its series, by their attributes.

    Args:
        bounds: upper bounds of the buckets but the last, ascending.
        traced: spans are recorded, and buckets name the last of them.
    """

    def __init__(self, bounds: Sequence[float], *, traced: bool) -> None:
        self._bounds = tuple(bounds)
        self._traced = traced
        self._began = time.time_ns()
        self._series: dict[frozenset[tuple[str, str]], Series] = {}

    def record(self, value: float, attributes: Attributes) -> None:
        """One observation, not negative."""
        self.at(attributes).record(value)

    def at(self, attributes: Attributes) -> Series:
        """The series with these attributes; readers see none without observations."""
        key = frozenset(attributes.items())
        if (found := self._series.get(key)) is not None:
            return found
        said: Mapping[str, str | bool] = attributes
        if len(self._series) >= _MOST_SERIES:
            key, said = _REST, {"otel.metric.overflow": True}
        return self._series.setdefault(key, Series(said, self._bounds, traced=self._traced))

    def seen(self, options: CallbackOptions) -> Iterator[Observation]:
        """What the SDK observes: that there is something."""
        if self.points().data_points:
            yield Observation(1)

    def points(self) -> Points:
        """All that has been recorded."""
        now, cumulative = time.time_ns(), AggregationTemporality.CUMULATIVE
        all_series = list(self._series.values())
        return Points([s.point(self._began, now) for s in all_series if any(s.buckets)], cumulative)


class Series:
    """Observations with the same attributes; one thread records, others read.

    So a reader may see one observation in the buckets and not yet in the sum.
    """

    __slots__ = (
        *("_attributes", "_bounds", "_traced", "buckets"),
        *("_exemplars", "_least", "_most", "_sum"),
    )

    def __init__(
        self, attributes: Mapping[str, str | bool], bounds: tuple[float, ...], *, traced: bool
    ) -> None:
        self._attributes, self._bounds, self._traced = attributes, bounds, traced
        self.buckets = [0] * (len(bounds) + 1)
        self._sum, self._least, self._most = 0.0, math.inf, -math.inf
        self._exemplars: list[Exemplar | None] = [None] * len(self.buckets)

    def record(self, value: float) -> None:
        """One observation, not negative."""
        bucket = bisect_left(self._bounds, value)
        self.buckets[bucket] += 1
        self._sum += value
        if value < self._least:
            self._least = value
        if value > self._most:
            self._most = value
        if self._traced and (span := get_current_span().get_span_context()).trace_flags.sampled:
            named = span.span_id, span.trace_id
            self._exemplars[bucket] = Exemplar({}, value, time.time_ns(), *named)

    def point(self, began: int, now: int) -> HistogramDataPoint:
        """All that has been recorded from `began` to `now`, in nanoseconds of Unix time."""
        counts = tuple(self.buckets)
        return HistogramDataPoint(
            *(self._attributes, began, now, sum(counts), self._sum, counts, self._bounds),
            *(self._least, self._most, [each for each in self._exemplars if each is not None]),
        )


class Histograms:
    """Those of a process, by their names; made before the readers that show them."""

    def __init__(self, *, traced: bool = False) -> None:
        self._traced = traced
        self._named: dict[str, Histogram] = {}

    def add(
        self, meter: Meter, name: str, unit: str, meaning: str, bounds: Sequence[float]
    ) -> Histogram:
        """A new histogram."""
        made = self._named[name] = Histogram(bounds, traced=self._traced)
        meter.create_observable_gauge(name, [made.seen], unit, meaning)
        return made

    def filled(self, data: MetricsData) -> MetricsData:
        """What the SDK has read, with the points of ours."""

        def fill(metric: Metric) -> Metric:
            histogram = self._named.get(metric.name)
            return metric if histogram is None else replace(metric, data=histogram.points())

        return MetricsData(
            [
                replace(
                    one,
                    scope_metrics=[
                        replace(scope, metrics=[*map(fill, scope.metrics)])
                        for scope in one.scope_metrics
                    ],
                )
                for one in data.resource_metrics
            ]
        )


class PageReader(InMemoryMetricReader):
    """Reads for the page of metrics."""

    def __init__(self, histograms: Histograms) -> None:
        super().__init__()
        self._histograms = histograms

    def get_metrics_data(self) -> MetricsData | None:
        """All that this process has recorded so far."""
        data = super().get_metrics_data()
        return None if data is None else self._histograms.filled(data)
