"""Snapshots as the page that Prometheus reads.

Names follow OpenTelemetry's rules for Prometheus: `tokenpod.kv.utilization` of unit 1 is
`tokenpod_kv_utilization_ratio`, a histogram in seconds ends in `_seconds`, a counter in `_total`.

Lines are written here, because prometheus_client takes 10 µs for each: a page would hold up the
front end's event loop for as long as a step takes.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from tokenpod.service.telemetry.snapshots import Counts, Family, Labels, Snapshot

_UNITS = {"s": "_seconds", "By": "_bytes"}
#: Behind the name of a sample.
_SUFFIXES = {"counter": "_total"}
#: In labels; Python's repr has other escapes.
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Metric:
    """A metric and its samples, as lines of the page.

    Args:
        name: without `_total`, `_bucket` and the like.
        meaning: one line.
        kind: `counter`, `gauge`, `histogram` or `unknown`.
    """

    def __init__(self, name: str, meaning: str, kind: str) -> None:
        self._name, self._meaning, self._kind = name, meaning, kind
        self._lines: list[str] = []

    def add(self, labels: Mapping[str, str], value: float) -> None:
        """One sample."""
        inside = f"{{{text}}}" if (text := _label_text(labels)) else ""
        self._lines.append(
            f"{self._name}{_SUFFIXES.get(self._kind, '')}{inside} {float(value)!r}\n"
        )

    def add_histogram(
        self, labels: Mapping[str, str], bounds: Iterable[float], counts: Counts
    ) -> None:
        """One histogram; its buckets count what is at most as large as their bounds."""
        text, so_far = _label_text(labels), 0
        head = f'{self._name}_bucket{{{text}{"," if text else ""}le="'
        for bound, count in zip((*map(_bound, bounds), "+Inf"), counts.buckets, strict=True):
            so_far += count
            self._lines.append(f'{head}{bound}"}} {so_far}.0\n')
        inside = f"{{{text}}}" if text else ""
        self._lines.append(f"{self._name}_count{inside} {so_far}.0\n")
        self._lines.append(f"{self._name}_sum{inside} {float(counts.sum)!r}\n")

    def lines(self, *, openmetrics: bool) -> Iterator[str]:
        """What the page says of it."""
        name, kind = self._name, self._kind
        if not openmetrics:
            name += _SUFFIXES.get(kind, "")
            kind = "untyped" if kind == "unknown" else kind
        yield f"# HELP {name} {self._meaning}\n# TYPE {name} {kind}\n"
        yield from self._lines


#: Further metrics made of a snapshot, such as the names of another server.
MoreMetrics = Callable[[Snapshot], Iterable[Metric]]


def page_of(snapshot: Snapshot, accept: str, more: Iterable[MoreMetrics] = ()) -> tuple[bytes, str]:
    """The page in the format that `accept` asks for, and its `Content-Type`."""
    _, content_type = choose_encoder(accept)
    openmetrics = content_type.startswith("application/openmetrics-text")
    others = itertools.chain.from_iterable(each(snapshot) for each in more)
    metrics = itertools.chain(map(metric_of, snapshot.values()), others)
    lines = [line for metric in metrics for line in metric.lines(openmetrics=openmetrics)]
    return "".join([*lines, "# EOF\n" if openmetrics else ""]).encode(), content_type


def metric_of(family: Family) -> Metric:
    """An instrument under its Prometheus name."""
    metric = Metric(prometheus_name(family), family.meaning, family.kind)
    for labels, number in family.numbers.items():
        metric.add(label_names(labels), number)
    for labels, counts in family.counts.items():
        metric.add_histogram(label_names(labels), family.bounds, counts)
    return metric


def prometheus_name(family: Family) -> str:
    """The name without `_total`, `_bucket` and the like."""
    name = _plain(family.name)
    unit = "_ratio" if (family.unit, family.kind) == ("1", "gauge") else _UNITS.get(family.unit, "")
    return name if name.endswith(unit) else name + unit


def label_names(labels: Labels) -> dict[str, str]:
    """Attributes as labels."""
    return {_plain(name): value for name, value in labels}


def by_label(family: Family | None, label: str) -> Iterator[tuple[str, float]]:
    """The numbers of a family, by one of its attributes."""
    for labels, number in family.numbers.items() if family is not None else ():
        yield dict(labels).get(label, ""), number


def _label_text(labels: Mapping[str, str]) -> str:
    """What stands in braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())


@functools.cache
def _plain(name: str) -> str:
    """A name of ours, as Prometheus has names."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


@functools.cache
def _bound(value: float) -> str:
    """The upper bound of a bucket as Go formats it: this text is part of a series' identity."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]
