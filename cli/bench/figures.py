"""What the records of a level tell: latencies, their percentiles, and whether they were in bounds.

| name | meaning, in seconds |
|---|---|
| ttft | from when the request was due until its first message with tokens, any sample's |
| itl  | between two messages with tokens of one sample, one value per gap whatever they hold |
| tpot | of one sample: from its first message to its last, over the tokens after the first one |
| e2e  | from when the request was due until its status |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenpod.cli.bench.messages import Level, Outcome, Plan, Record

Floats = NDArray[np.float64]

#: The latencies of a request by name, and how tables and pictures call them.
LATENCIES = {
    "ttft": "time to first token",
    "itl": "between messages",
    "tpot": "time per output token",
    "e2e": "end to end",
}


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


@dataclass(frozen=True, slots=True)
class Latency:
    """One request's latencies, in seconds.

    Args:
        ttft: NaN if no token came.
        itl: every gap, of all samples.
        tpot: one per sample that had more than one message.
        output_tokens: tokens that came.
    """

    record: Record
    ttft: float
    itl: Floats
    tpot: Floats
    e2e: float
    output_tokens: int


def latency(record: Record) -> Latency:
    """The latencies of one request, failed or not."""
    came = record.arrivals
    gaps, paces = [np.zeros(0)], []
    for sample in np.unique(came["sample"]):
        own = came[came["sample"] == sample]
        gaps.append(np.diff(own["time"]))
        after_first = int(own["tokens"][1:].sum())
        if after_first:
            paces.append((own["time"][-1] - own["time"][0]) / after_first)
    return Latency(
        record,
        ttft=float(came["time"][0]) - record.due if len(came) else math.nan,
        itl=np.concatenate(gaps),
        tpot=np.asarray(paces, np.float64),
        e2e=record.ended - record.due,
        output_tokens=int(came["tokens"].sum()),
    )


@dataclass(frozen=True)
class Measured:
    """One level that has ended, with the outcome of each client process that took part."""

    plan: Plan
    level: Level
    outcomes: list[Outcome]

    @cached_property
    def requests(self) -> list[Latency]:
        """Every request, in the order of their numbers."""
        records = [record for outcome in self.outcomes for record in outcome.records]
        return [latency(record) for record in sorted(records, key=lambda record: record.index)]

    @cached_property
    def good(self) -> list[Latency]:
        """The requests that succeeded."""
        return [request for request in self.requests if request.record.ok]

    @cached_property
    def failed(self) -> list[Latency]:
        """The requests that did not."""
        return [request for request in self.requests if not request.record.ok]

    @property
    def duration(self) -> float:
        """Seconds from the start until the last request had ended."""
        return max((request.record.ended for request in self.requests), default=0.0)

    def values(self, name: str) -> Floats:
        """Every value of a latency of the requests that succeeded, in seconds."""
        return np.hstack([np.zeros(0), *(getattr(request, name) for request in self.good)])


def within(bounds: Mapping[str, float], found: Latency) -> bool:
    """Whether no latency of a request exceeds its bound (by name, in seconds)."""
    # NaN, the ttft of a request without tokens, is within no bound.
    return all(np.all(getattr(found, name) <= bound) for name, bound in bounds.items())


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
