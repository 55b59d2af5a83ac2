"""What the records of a level tell: percentiles of latencies, and whether they were in bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from tokenpod.cli.bench.messages import Level, Outcome, Plan
from tokenpod.cli.bench.record import LATENCIES, Floats, Record


class Spread(msgspec.Struct, frozen=True):
    """How values are spread. Every percentile is a value that was observed; None: there is none."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


def spread(values: Floats | Sequence[float]) -> Spread:
    """The spread of values; NaN is left out."""
    found = np.asarray(values, np.float64)
    found = found[~np.isnan(found)]
    if not len(found):
        return Spread(0)
    # Nearest rank: the least value that at least such a part of all values does not exceed.
    ranks = np.quantile(found, (0.5, 0.9, 0.95, 0.99, 1.0), method="inverted_cdf")
    return Spread(len(found), float(found.mean()), *ranks.tolist())


@dataclass(frozen=True)
class Measured:
    """One level that has ended, with the outcome of each client process that took part."""

    plan: Plan
    level: Level
    outcomes: list[Outcome]

    @cached_property
    def requests(self) -> list[Record]:
        """Every request, in the order of their numbers."""
        found = [record for outcome in self.outcomes for record in outcome.records]
        return sorted(found, key=lambda record: record.index)

    @cached_property
    def good(self) -> list[Record]:
        """The requests that succeeded."""
        return [record for record in self.requests if record.ok]

    @cached_property
    def failed(self) -> list[Record]:
        """The requests that did not."""
        return [record for record in self.requests if not record.ok]

    @property
    def duration(self) -> float:
        """Seconds from the start until the last request had ended."""
        return max((record.ended for record in self.requests), default=0.0)

    def values(self, name: str) -> Floats:
        """Every value of a latency of the requests that succeeded, in seconds."""
        return np.hstack([np.zeros(0), *(getattr(record, name) for record in self.good)])


def within(bounds: Mapping[str, float], record: Record) -> bool:
    """Whether no latency of a request exceeds its bound (by name, in seconds)."""
    # NaN, the ttft of a request without tokens, is within no bound.
    return all(np.all(getattr(record, name) <= bound) for name, bound in bounds.items())


def parse_bounds(text: str) -> dict[str, float]:
    """`ttft=200ms,itl=50ms` as seconds by name. Raises ValueError that quotes the wrong part."""
    bounds: dict[str, float] = {}
    for part in map(str.strip, text.split(",")):
        name, _, bound = part.partition("=")
        if name not in LATENCIES:
            raise ValueError(f"has {part!r}: write NAME=TIME, of {', '.join(LATENCIES)}")
        bounds[name] = _seconds(bound)
        if not 0 < bounds[name] < math.inf:
            raise ValueError(f"has {part!r}: the time must be above 0, as 200ms or 1.5s")
    return bounds


def _seconds(text: str) -> float:
    """The time; NaN if it is none."""
    number, scale = (text[:-2], 1e-3) if text.endswith("ms") else (text[:-1], 1.0)
    try:
        return float(number) * scale if text.endswith("s") else math.nan
    except ValueError:
        return math.nan
