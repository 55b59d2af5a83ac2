"""Who waits for a row and memory: callers' requests and a router's in one line.

First come, first served within a priority. The head waits until it fits; nobody overtakes it within
its priority, so nobody starves, and neither callers nor a router can keep the other out.

    waiting --fits: a row, and the forecast with it stays within the slots--> its planner
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from typing import Protocol

from tokenpod.scheduler.exact import Forecast
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Owner, Sequence
from tokenpod.scheduler.work import Limits

#: (-priority, arrival, samples): sorts in the order of service.
_Entry = tuple[int, int, list[Sequence]]


class Planner(Protocol):
    """Who plans the steps of admitted sequences."""

    def foresee(self, forecast: Forecast, samples: list[Sequence]) -> None:
        """Add the need of a request to that of all others; its cached prefix is locked."""

    def start(self, samples: list[Sequence]) -> None:
        """Take a request; its first sample has got a row."""


class Queue:
    """Requests without a row.

    Args:
        planners: who takes the admitted requests of an owner.
        forecast: gathers the need of everything that has been admitted.
    """

    def __init__(
        self,
        limits: Limits,
        kv: KV,
        rows: Rows,
        planners: Mapping[Owner, Planner],
        forecast: Callable[[], Forecast],
    ) -> None:
        #: Waiting prompt tokens.
        self.tokens = 0
        self._limits = limits
        self._kv = kv
        self._rows = rows
        self._planners = planners
        self._forecast = forecast
        self._arrivals = 0
        self._waiting: list[_Entry] = []
        #: The head did not fit, and nothing has left since.
        self._full = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def head(self) -> list[Sequence]:
        """The samples of the request whose turn is next; none if nobody waits."""
        return self._waiting[0][2] if self._waiting else []

    def add(self, samples: list[Sequence]) -> None:
        """Add a request behind those of its priority."""
        self._arrivals += 1
        for sequence in samples:
            sequence.arrival = self._arrivals
        self.add_again(samples)

    def add_again(self, samples: list[Sequence]) -> None:
        """Add samples that were admitted and can't begin after all, in their old place."""
        entry = (-samples[0].request.priority, samples[0].arrival, samples)
        insort(self._waiting, entry)
        self.tokens += samples[0].prompt_length
        if self._waiting[0] is entry:
            self._full = False

    def remove(self, sequence: Sequence) -> bool:
        """Forget a sequence; False if it does not wait here."""
        for at, (_, _, samples) in enumerate(self._waiting):
            if sequence in samples:
                samples.remove(sequence)
                if not samples:
                    del self._waiting[at]
                    self.tokens -= sequence.prompt_length
                self._full = False
                return True
        return False

    def freed(self) -> None:
        """Slots or a row have come free: the head may fit now."""
        self._full = False

    def admit(self) -> None:
        """Hand over, in order, all that fit.

        Many are asked for at once, and twice as many after that. A request more never makes the
        peak lower, so the first one that does not fit is found by halving.
        """
        if self._full or not self._waiting:
            return
        self._full = True
        if len(self.head) > self._rows.free:
            return
        fitting = self._begin_fitting()
        for _, _, samples in self._waiting[:fitting]:
            first, *siblings = samples
            self.tokens -= first.prompt_length
            self._rows.give(first)
            self._rows.promise(len(siblings))
            self._planners[first.owner].start(samples)
        del self._waiting[:fitting]

    def _begin_fitting(self) -> int:
        """Begin the first requests of the line, as many as fit; how many."""
        forecast, rows = self._forecast(), self._rows.free
        #: Entries of the forecast with the first k + 1 requests.
        entries: list[int] = []

        def too_many(k: int) -> bool:
            return forecast.peak(entries[k]) > self._limits.slots

        fitting = 0
        while True:
            for _, _, samples in self._waiting[fitting : 2 * fitting or 1]:
                rows -= len(samples)
                if rows < 0:
                    break
                self._kv.begin(samples[0])
                self._planners[samples[0].owner].foresee(forecast, samples)
                entries.append(len(forecast))
            if len(entries) == fitting:
                return fitting
            if too_many(-1):
                asked = range(fitting, len(entries))
                fitting += bisect_left(asked, True, key=too_many)
                for _, _, samples in reversed(self._waiting[fitting : len(entries)]):
                    self._kv.withdraw(samples[0])
                return fitting
            fitting = len(entries)
            if rows < 0:
                return fitting
