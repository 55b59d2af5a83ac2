"""What became of each request, the latencies that follow from it, and their percentiles."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: A message with tokens as `Record.stream` keeps it: when it came in seconds, how many tokens it
#: had, of which sample.
ARRIVAL = struct.Struct("=dII")
_ARRIVALS = np.dtype([("time", np.float64), ("tokens", np.uint32), ("sample", np.uint32)])

#: The latencies of a request by name, and how tables and pictures call them.
LATENCIES = {
    "ttft": "time to first token",
    "itl": "between messages",
    "tpot": "time per output token",
    "e2e": "end to end",
}


@dataclass
class Record:
    """One request. Times are seconds from the level's start, latencies seconds.

    Args:
        target: which server.
        due: when it was to be sent; earlier than `sent` where the client could not keep up.
        ended: when its status came.
        code, detail: the status; UNFINISHED where an OK stream lacked a `finished`.
        prompt_tokens, cached_tokens: as the server counted them; 0 before it did.
        queue_s, first_token_s: as the server measured them, of sample 0; NaN if it did not.
        stream: the messages with tokens, each as `ARRIVAL`.
    """

    index: int
    target: int
    due: float
    sent: float
    ended: float = math.nan
    code: str = "OK"
    detail: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = math.nan
    first_token_s: float = math.nan
    stream: bytearray = field(default_factory=bytearray)

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.code == "OK"

    @property
    def arrivals(self) -> np.ndarray:
        """The messages with tokens: columns `time`, `tokens` and `sample`."""
        return np.frombuffer(self.stream, _ARRIVALS)

    @property
    def messages(self) -> int:
        """Messages with tokens that came."""
        return len(self.arrivals)

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return int(self.arrivals["tokens"].sum())

    @property
    def ttft(self) -> float:
        """From when it was due until its first message with tokens, any sample's; NaN of none."""
        return float(self.arrivals["time"][0]) - self.due if self.stream else math.nan

    @property
    def itl(self) -> Floats:
        """Between two messages of one sample, one value per gap whatever they hold."""
        return np.concatenate([np.zeros(0), *(np.diff(own["time"]) for own in self._samples)])

    @property
    def tpot(self) -> Floats:
        """For each sample: time from first to last message, over the tokens after the first."""
        after_first = [(own, int(own["tokens"][1:].sum())) for own in self._samples]
        return np.array([np.ptp(own["time"]) / tokens for own, tokens in after_first if tokens])

    @property
    def e2e(self) -> float:
        """From when it was due until its status."""
        return self.ended - self.due

    @property
    def _samples(self) -> list[np.ndarray]:
        came = self.arrivals
        return [came[came["sample"] == sample] for sample in np.unique(came["sample"])]


def within(bounds: Mapping[str, float], record: Record) -> bool:
    """Whether no latency of a request exceeds its bound (by name, in seconds)."""
    # NaN, the ttft of a request without tokens, is within no bound.
    return all(np.all(getattr(record, name) <= bound) for name, bound in bounds.items())


def values(records: Iterable[Record], name: str) -> Floats:
    """Every value of a latency or another time of these requests, in seconds."""
    return np.hstack([np.zeros(0), *(getattr(record, name) for record in records)])


def total(records: Iterable[Record], name: str) -> int:
    """The sum of one of their counts."""
    return sum(getattr(record, name) for record in records)


class Spread(msgspec.Struct, frozen=True):
    """How values are spread. Every percentile is a value that was observed; None: there is none."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


def spread(observed: Floats | Sequence[float]) -> Spread:
    """The spread of values; NaN is left out."""
    found = np.asarray(observed, np.float64)
    found = found[~np.isnan(found)]
    if not len(found):
        return Spread(0)
    # Nearest rank: the least value that at least such a part of all values does not exceed.
    ranks = np.quantile(found, (0.5, 0.9, 0.95, 0.99, 1.0), method="inverted_cdf")
    return Spread(len(found), float(found.mean()), *ranks.tolist())
