"""What the instruments of one process say at one moment, and the sum over a pod's processes.

    front end 0    its own snapshot + those of the others, asked for at each scrape -> one page
    front end k    a thread that answers each byte on its socket with a snapshot

A front end that hangs is not waited for: what it said last counts again. What a front end has
counted stays in the sums after it has ended, as far as a scrape has seen it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping

import msgspec
from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    MetricsData,
    NumberDataPoint,
    Sum,
)

#: Seconds that all further front ends together get to answer a scrape.
_PATIENCE_SECONDS = 1.0
_HEAD = struct.Struct("<I")
_ASK = b"?"

#: Names and values, sorted by name.
Labels = tuple[tuple[str, str], ...]


class Counts(msgspec.Struct, array_like=True):
    """A histogram's point: observations in each bucket (the last has no bound) and their sum."""

    buckets: list[int]
    sum: float


class Family(msgspec.Struct, array_like=True):
    """One instrument and its points.

    `kind`: `counter`, `gauge` (of the first process alone, or summed) or `histogram`.
    """

    name: str
    unit: str
    meaning: str
    kind: str
    #: Upper bounds of a histogram's buckets; the last bucket has none.
    bounds: list[float]
    numbers: dict[Labels, float]
    counts: dict[Labels, Counts]


#: By the instrument's name.
Snapshot = dict[str, Family]


def snapshot_of(reader: InMemoryMetricReader) -> Snapshot:
    """All that this process has recorded so far."""
    data = reader.get_metrics_data()
    return {} if data is None else {family.name: family for family in _families(data)}


def summed(snapshots: Iterable[Snapshot]) -> Snapshot:
    """The sum of snapshots, point by point."""
    total: Snapshot = {}
    for snapshot in snapshots:
        for name, family in snapshot.items():
            known = total.get(name)
            if known is None:
                total[name] = msgspec.structs.replace(
                    family,
                    numbers=dict(family.numbers),
                    counts={at: Counts([*c.buckets], c.sum) for at, c in family.counts.items()},
                )
                continue
            for labels, number in family.numbers.items():
                known.numbers[labels] = known.numbers.get(labels, 0) + number
            for labels, counts in family.counts.items():
                so_far = known.counts.get(labels)
                if so_far is None:
                    known.counts[labels] = Counts([*counts.buckets], counts.sum)
                else:
                    both = zip(so_far.buckets, counts.buckets, strict=True)
                    so_far.buckets = [one + other for one, other in both]
                    so_far.sum += counts.sum
    return total


class FrontEndSnapshots:
    """The first front end's side: asks the further ones.

    Threads of scrapes call `read`, one at a time; the event loop calls `add`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._front_ends: list[_FrontEnd] = []
        #: Sums of processes that have ended.
        self._ended: Snapshot = {}

    def add(self) -> socket.socket:
        """A front end is about to start: its end of a new socket, to be inherited and closed."""
        ours, theirs = socket.socketpair()
        with self._lock:
            self._front_ends.append(_FrontEnd(ours))
        return theirs

    def read(self) -> list[Snapshot]:
        """What each front end has recorded; takes at most a second."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with self._lock:
            asked = list(self._front_ends)
        for each in asked:
            each.ask()
        gone = [each for each in asked if not each.hear(deadline)]
        with self._lock:
            for each in gone:
                self._front_ends.remove(each)
                self._ended = summed([self._ended, _without_gauges(each.last)])
            return [self._ended, *(each.last for each in self._front_ends)]


class _FrontEnd:
    """A further front end, and what it said last."""

    def __init__(self, end: socket.socket) -> None:
        self.last: Snapshot = {}
        self._end = end
        self._buffer = bytearray()
        #: It owes an answer to an earlier question, or to this one.
        self._late = self._asked = False

    def ask(self) -> None:
        """Send a question, unless an earlier one is not answered yet."""
        self._late = self._asked
        if not self._asked:
            self._asked = True
            # An error is found when the answer is read.
            with contextlib.suppress(OSError):
                self._end.sendall(_ASK)

    def hear(self, deadline: float) -> bool:
        """Wait for the answer until `deadline`; whether the front end still lives."""
        try:
            self._receive(deadline)
            if self._late:
                # That was the answer of before.
                self.ask()
                self._receive(deadline)
        except TimeoutError:
            return True
        except OSError:
            self._end.close()
            return False
        return True

    def _receive(self, deadline: float) -> None:
        """Take one answer. Raises OSError, of which TimeoutError is one."""
        while True:
            if len(self._buffer) >= _HEAD.size:
                end = _HEAD.size + _HEAD.unpack_from(self._buffer)[0]
                if len(self._buffer) >= end:
                    break
            self._end.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (data := self._end.recv(1 << 20)):
                raise ConnectionResetError
            self._buffer += data
        self.last = msgspec.msgpack.decode(self._buffer[_HEAD.size : end], type=Snapshot)
        del self._buffer[:end]
        self._asked = False


def answer_scrapes(end: socket.socket, reader: InMemoryMetricReader) -> None:
    """A further front end's side: a thread that answers until the first front end is gone."""

    def answer() -> None:
        with contextlib.suppress(OSError), end:
            while end.recv(1):
                data = msgspec.msgpack.encode(snapshot_of(reader))
                end.sendall(_HEAD.pack(len(data)) + data)

    threading.Thread(target=answer, name="metrics-answers", daemon=True).start()


def _without_gauges(snapshot: Snapshot) -> Snapshot:
    return {name: family for name, family in snapshot.items() if family.kind != "gauge"}


def _families(data: MetricsData) -> Iterable[Family]:
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                found = metric.data
                kind, bounds = "gauge", list[float]()
                numbers, counts = dict[Labels, float](), dict[Labels, Counts]()
                if isinstance(found, Sum) and found.is_monotonic:
                    kind = "counter"
                elif isinstance(found, Histogram):
                    kind = "histogram"
                for point in found.data_points:
                    labels = _labels(point.attributes or {})
                    if isinstance(point, NumberDataPoint):
                        numbers[labels] = point.value
                    elif isinstance(point, HistogramDataPoint):
                        bounds = list(point.explicit_bounds)
                        counts[labels] = Counts(list(point.bucket_counts), point.sum)
                yield Family(
                    metric.name,
                    metric.unit or "",
                    metric.description or "",
                    kind,
                    bounds,
                    numbers,
                    counts,
                )


def _labels(attributes: Mapping[str, object]) -> Labels:
    return tuple(sorted((name, str(value)) for name, value in attributes.items()))
