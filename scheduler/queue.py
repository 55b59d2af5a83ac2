"""Who waits for a row and memory: callers' requests and a router's in one line.

First come, first served within a priority. The head waits until it fits; nobody overtakes it within
its priority, so nobody starves, and neither callers nor a router can keep the other out.

    waiting --fits: a row, and the forecast with it stays within the slots--> its planner
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from typing import Protocol

from tokenpod.scheduler.forecast import Forecast
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Owner, Sequence
from tokenpod.scheduler.work import Limits

#: (-priority, arrival, samples): sorts in the order of service.
_Entry = tuple[int, int, list[Sequence]]


class Planner(Protocol):
    """Who plans the steps of admitted sequences."""

    def start(self, samples: list[Sequence]) -> None:
        """Take a request; its first sample's cached prefix is locked, and none has a row yet."""

    def withdraw(self, samples: list[Sequence]) -> None:
        """Undo the last `start`: the request does not fit yet."""


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
        """Hand over, in order, what fits."""
        while self._waiting and not self._full:
            samples = self._waiting[0][2]
            if self._fits(samples):
                del self._waiting[0]
                self.tokens -= samples[0].prompt_length
            else:
                self._full = True

    def _fits(self, samples: list[Sequence]) -> bool:
        first, *siblings = samples
        if len(samples) > self._rows.free:
            return False
        planner = self._planners[first.owner]
        self._kv.begin(first)
        planner.start(samples)
        if self._forecast().peak() > self._limits.slots:
            planner.withdraw(samples)
            self._kv.withdraw(first)
            return False
        self._rows.give(first)
        self._rows.promise(len(siblings))
        return True
