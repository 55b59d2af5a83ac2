"""Histograms of ours say what the SDK's would say of the same observations."""

from __future__ import annotations

import random
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData

from tokenpod.service.telemetry.histograms import Histograms, PageReader

BOUNDS = [0.1, 0.5, 1.0]


def points(data: MetricsData | None) -> list[Any]:
    assert data is not None
    ((metric,),) = [scope.metrics for one in data.resource_metrics for scope in one.scope_metrics]
    return sorted(metric.data.data_points, key=lambda point: sorted(point.attributes.items()))


def test_points_are_those_of_the_sdk() -> None:
    histograms, theirs = Histograms(), InMemoryMetricReader()
    ours = PageReader(histograms)
    meter = MeterProvider([ours], shutdown_on_exit=False).get_meter("test")
    other = MeterProvider([theirs], shutdown_on_exit=False).get_meter("test")
    mine = histograms.add(meter, "h", "s", "A meaning", BOUNDS)
    sdk = other.create_histogram("h", "s", "A meaning", explicit_bucket_boundaries_advisory=BOUNDS)
    mine.at({"never": "recorded"})
    draw = random.Random(1)
    for _ in range(500):
        value = draw.choice([0.0, 0.1, 0.5, 1.0, 2 * draw.random()])
        said = [("a", draw.choice("xy")), ("b", "z")]
        mine.record(value, dict(draw.sample(said, 2)))
        sdk.record(value, dict(said))
    found, wanted = points(ours.get_metrics_data()), points(theirs.get_metrics_data())
    assert len(found) == 2
    for one, other_one in zip(found, wanted, strict=True):
        for name in ("attributes", "count", "sum", "bucket_counts", "explicit_bounds"):
            assert getattr(one, name) == getattr(other_one, name), name
        assert (one.min, one.max) == (other_one.min, other_one.max)


def test_attributes_without_end_are_counted_together_from_some_number_on() -> None:
    histograms = Histograms()
    reader = PageReader(histograms)
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")
    histogram = histograms.add(meter, "h", "s", "A meaning", BOUNDS)
    assert reader.get_metrics_data() is None
    for at in range(2100):
        histogram.record(0.3, {"a": str(at)})
    found = points(reader.get_metrics_data())
    assert len(found) == 2001
    (rest,) = [each for each in found if "otel.metric.overflow" in each.attributes]
    assert rest.count == 100
