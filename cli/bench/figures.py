"""What a request's record tells: latencies, percentiles of them, and whether they were in bounds.

| name | meaning, in seconds |
|---|---|
| ttft | from when the request was due until its first message with tokens, any sample's |
| itl  | between two messages with tokens of one sample, one value a gap whatever they hold |
| tpot | of one sample: from its first message to its last, over the tokens after the first one |
| e2e  | from when the request was due until its status |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenpod.cli.bench.messages import Record

Floats = NDArray[np.float64]

#: The latencies of a request, by name.
LATENCIES = ("ttft", "itl", "tpot", "e2e")


class Spread(msgspec.Struct, frozen=True):
    """How values are spread. Every percentile is a value that was observed; None: there is none."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None


def percentile(ordered: Floats, share: float) -> float:
    """The least of `ordered` (ascending, not empty) that at least `share` of them don't exceed."""
    # The product of a share and a count can be a hair above the whole number that is meant.
    rank = math.ceil(share * len(ordered) - 1e-9)
    return float(ordered[max(rank, 1) - 1])


def spread(values: Floats | Sequence[float]) -> Spread:
    """The spread of values; NaN is left out."""
    ordered = np.sort(np.asarray(values, np.float64))
    ordered = ordered[~np.isnan(ordered)]
    if not len(ordered):
        return Spread(0, None, None, None, None, None, None)
    p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
    return Spread(len(ordered), float(ordered.mean()), p50, p90, p95, p99, float(ordered[-1]))


@dataclass(frozen=True, slots=True)
class Latency:
    """One request's latencies, in seconds.

    Args:
        ttft: None if no token came.
        itl: every gap, of all samples.
        tpot: one per sample that had more than one message.
        output_tokens: tokens that came.
    """

    ttft: float | None
    itl: Floats
    tpot: Floats
    e2e: float
    output_tokens: int

    def worst(self, name: str) -> float:
        """The latency that a bound is compared with: of several values the largest; 0 of none."""
        if name == "ttft":
            return math.inf if self.ttft is None else self.ttft
        if name == "e2e":
            return self.e2e
        values = self.itl if name == "itl" else self.tpot
        return float(values.max(initial=0.0))


def latency(record: Record) -> Latency:
    """The latencies of one request, failed or not."""
    times = np.frombuffer(record.times, np.float64)
    tokens = np.frombuffer(record.tokens, np.uint32)
    samples = np.frombuffer(record.samples, np.uint32)
    gaps, paces = [np.zeros(0)], []
    for sample in np.unique(samples):
        own = samples == sample
        came = times[own]
        gaps.append(np.diff(came))
        after_first = int(tokens[own][1:].sum())
        if after_first:
            paces.append((came[-1] - came[0]) / after_first)
    return Latency(
        ttft=float(times[0]) - record.due if len(times) else None,
        itl=np.concatenate(gaps),
        tpot=np.asarray(paces, np.float64),
        e2e=record.ended - record.due,
        output_tokens=int(tokens.sum()),
    )


def within(bounds: Mapping[str, float], found: Latency) -> bool:
    """Whether no latency of a request exceeds its bound (by name, in seconds)."""
    return all(found.worst(name) <= bound for name, bound in bounds.items())


def parse_bounds(text: str) -> dict[str, float]:
    """`ttft=200ms,itl=50ms` as seconds by name. Raises ValueError that quotes the wrong part."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, bound = part.strip().partition("=")
        if name not in LATENCIES:
            raise ValueError(f"has {part.strip()!r}: write NAME=TIME, of {', '.join(LATENCIES)}")
        bounds[name] = _seconds(part.strip(), bound)
    return bounds


def _seconds(part: str, text: str) -> float:
    for unit, seconds in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * seconds
            except ValueError:
                break
            if 0 < value < math.inf:
                return value
            break
    raise ValueError(f"has {part!r}: the time must be above 0, as 200ms or 1.5s")
