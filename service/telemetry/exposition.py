"""Snapshots as the page that Prometheus reads.

Names follow OpenTelemetry's rules for Prometheus: `tokenpod.kv.utilization` of unit 1 is
`tokenpod_kv_utilization_ratio`, a histogram in seconds ends in `_seconds`, a counter in `_total`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tokenpod.service.telemetry.snapshots import Counts, Family, Labels, Snapshot

_UNITS = {"s": "_seconds", "By": "_bytes"}

#: Further metrics made of a snapshot, such as the names of another server.
MoreMetrics = Callable[[Snapshot], Iterable[Metric]]


def page_of(snapshot: Snapshot, accept: str, more: Iterable[MoreMetrics] = ()) -> tuple[bytes, str]:
    """The page in the format that `accept` asks for, and its `Content-Type`."""
    encode, content_type = choose_encoder(accept)
    others = itertools.chain.from_iterable(each(snapshot) for each in more)
    return encode(_Collected([*map(metric_of, snapshot.values()), *others])), content_type


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Called by prometheus_client."""
        return self._metrics


def metric_of(family: Family) -> Metric:
    """An instrument under its Prometheus name."""
    metric = Metric(prometheus_name(family), family.meaning, family.kind)
    for labels, number in family.numbers.items():
        suffix = "_total" if family.kind == "counter" else ""
        metric.add_sample(metric.name + suffix, label_names(labels), number)
    for labels, counts in family.counts.items():
        add_histogram(metric, label_names(labels), family.bounds, counts)
    return metric


def add_histogram(
    metric: Metric, labels: dict[str, str], bounds: list[float], counts: Counts
) -> None:
    """Add a histogram's samples; its buckets count what is at most as large as their bounds."""
    so_far = 0
    for bound, count in zip([*bounds, float("inf")], counts.buckets, strict=True):
        so_far += count
        upper = {"le": floatToGoString(bound)}  # type: ignore[no-untyped-call]
        metric.add_sample(f"{metric.name}_bucket", labels | upper, so_far)
    metric.add_sample(f"{metric.name}_count", labels, so_far)
    metric.add_sample(f"{metric.name}_sum", labels, counts.sum)


def prometheus_name(family: Family) -> str:
    """The name without `_total`, `_bucket` and the like."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", family.name)
    unit = "_ratio" if (family.unit, family.kind) == ("1", "gauge") else _UNITS.get(family.unit, "")
    return name if name.endswith(unit) else name + unit


def label_names(labels: Labels) -> dict[str, str]:
    """Attributes as labels."""
    return {re.sub(r"[^a-zA-Z0-9_]", "_", name): value for name, value in labels}


def by_label(family: Family | None, label: str) -> Iterator[tuple[str, float]]:
    """The numbers of a family, by one of its attributes."""
    for labels, number in family.numbers.items() if family is not None else ():
        yield dict(labels).get(label, ""), number
