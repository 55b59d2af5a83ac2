"""Counters that the front-end processes of a pod share: a few numbers in shared memory.

Each process writes its own row and reads all, so nothing is ever locked. The memory has no name:
it is a file descriptor that children inherit, and is gone when the last process is.

    row k = [admitted requests, prompt tokens that wait, serving, the engine owes it a step,
             bytes that its calls hold, heartbeats, requests without a token yet,
             requests that it refused because they could never fit,
             bytes that it keeps for all calls, calls that have ended by the number of their status]
    two more numbers, written by the first process: whether the pod drains, and whether the engine
    makes no progress
    then each process's calls under way by name, and which are to end; see `CallNames`
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mmap
import os
from collections.abc import Callable

import numpy as np

_REQUESTS, _WAITING_TOKENS, _SERVING, _PENDING, _CALL_BYTES, _BEATS, _WAITING, _IGNORED = range(8)
_KEPT_BYTES = 8
#: Of gRPC's 17 statuses, from OK to UNAUTHENTICATED.
_CALLS, _STATUSES = 9, 17
_COLUMNS = _CALLS + _STATUSES
_CLOSED, _STALLED = range(2)
_HEAD = 2
#: What `PodCounters.add` changes.
_CHANGED = {
    "requests": _REQUESTS,
    "waiting": _WAITING,
    "waiting_tokens": _WAITING_TOKENS,
    "ignored": _IGNORED,
    "call_bytes": _CALL_BYTES,
    "kept_bytes": _KEPT_BYTES,
}
_NUMBER = 8  # bytes
#: Calls that one process may have under way, where nobody says.
_NAMES = 256


class Total:
    """A number of `PodCounters`: the sum of a column over all processes."""

    def __init__(self, column: int, meaning: str) -> None:
        self._column = column
        self.__doc__ = meaning

    def __get__(self, counters: PodCounters, owner: type) -> int:
        return counters.sum(self._column)


class PodCounters:
    """The numbers, seen by process `index` of `count`. Make it with `create` or `join`.

    `descriptor` is what the other processes inherit; None where there are none.
    """

    requests = Total(_REQUESTS, "Admitted requests (`Generate` and `Tokens` calls).")
    waiting = Total(_WAITING, "`Generate` calls that have no token yet.")
    waiting_tokens = Total(_WAITING_TOKENS, "Prompt tokens that wait for their computation.")
    ignored = Total(_IGNORED, "Requests refused since the start: they could never fit.")
    call_bytes = Total(_CALL_BYTES, "Bytes that calls hold; see memory_budget.py.")
    kept_bytes = Total(_KEPT_BYTES, "Bytes that are kept for all calls; see memory_budget.py.")

    def __init__(
        self, numbers: memoryview, index: int, count: int, descriptor: int | None = None
    ) -> None:
        self.index = index
        self.count = count
        self.descriptor = descriptor
        end = _HEAD + _COLUMNS * count
        self._numbers = numbers.cast("q")[:end]
        self.names = CallNames(numbers.cast("q")[end:], index, count)

    @classmethod
    def create(cls, count: int, names: int = _NAMES) -> PodCounters:
        """New numbers, all zero, for `count` processes; the caller is the first.

        `names`: how many calls may be under way.
        """
        size = _size(count, names)
        if count == 1:
            return cls(memoryview(bytearray(size)), 0, 1)
        descriptor = os.memfd_create("tokenpod-counters")
        os.ftruncate(descriptor, size)
        return cls(_mapped(descriptor), 0, count, descriptor)

    @classmethod
    def join(cls, descriptor: int, index: int, count: int) -> PodCounters:
        """The numbers that the first process made, seen by process `index`."""
        return cls(_mapped(descriptor), index, count, descriptor)

    @property
    def all_serving(self) -> bool:
        """Whether every process but the first, which needs no telling, serves."""
        return self.sum(_SERVING) == self.count - 1

    @property
    def pending(self) -> bool:
        """Whether the engine owes a step to any process that has said so."""
        return bool(self.sum(_PENDING))

    @property
    def closed(self) -> bool:
        """Whether the first process takes no new work any more, nor may the others."""
        return bool(self._numbers[_CLOSED])

    def close(self) -> None:
        """No process takes new work any more. For the first process."""
        self._numbers[_CLOSED] = 1

    @property
    def stalled(self) -> bool:
        """Whether the engine makes no progress, so that new calls would only wait."""
        return bool(self._numbers[_STALLED])

    def set_stalled(self, stalled: bool) -> None:
        """For the first process, which watches the engine."""
        self._numbers[_STALLED] = stalled

    def add(self, **changes: int) -> None:
        """Change counts of this process by these amounts: totals of this class, by their names."""
        row = self._row(self.index)
        for name, change in changes.items():
            self._numbers[row + _CHANGED[name]] += change

    def count_call(self, status: int) -> None:
        """A call of this process has ended with the gRPC status of this number."""
        self._numbers[self._row(self.index) + _CALLS + status] += 1

    @property
    def calls(self) -> list[int]:
        """Calls that have ended since the start, by the number of their status."""
        return [self.sum(_CALLS + status) for status in range(_STATUSES)]

    def set_serving(self) -> None:
        """This process listens, and its model is there."""
        self._numbers[self._row(self.index) + _SERVING] = 1

    def set_pending(self, pending: bool) -> None:
        """Whether the engine owes this process a step."""
        self._numbers[self._row(self.index) + _PENDING] = pending

    def beat(self) -> None:
        """This process is alive: its event loop turns."""
        self._numbers[self._row(self.index) + _BEATS] += 1

    def beats(self, index: int) -> int:
        """Heartbeats of process `index` so far."""
        return self._numbers[self._row(index) + _BEATS]

    def serves(self, index: int) -> bool:
        """Whether process `index` listens, and its model is there."""
        return bool(self._numbers[self._row(index) + _SERVING])

    def forget(self, index: int) -> None:
        """Process `index` is gone: its counts become zero, and ours what counts since the start."""
        row, own = self._row(index), self._row(self.index)
        for column in (_IGNORED, *range(_CALLS, _COLUMNS)):
            self._numbers[own + column] += self._numbers[row + column]
        for column in range(_COLUMNS):
            self._numbers[row + column] = 0
        self.names.forget(index)

    def _row(self, index: int) -> int:
        return _HEAD + _COLUMNS * index

    def sum(self, column: int) -> int:
        """The sum of a column over all processes."""
        return sum(self._numbers[_HEAD + column :: _COLUMNS])


def _size(count: int, names: int) -> int:
    return _NUMBER * (_HEAD + (_COLUMNS + 2 * names) * count)


def _mapped(descriptor: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))


# -- calls by their names ----------------------------------------------------------------------


class CallNames:
    """Names of the calls that are under way, as all front ends see them: 64-bit digests.

    Each front end has places of its own in shared memory, takes those alone and reads all, so
    nothing is locked. Two that take a name at the same instant may both have it. Any of them may
    ask for the end of a call by its name; its own front end finds that when it looks.

    0 is an empty place.

    Args:
        numbers: int64, as many places for each of `count` front ends, and a word for each place.
        index: which of them this one is.
    """

    def __init__(self, numbers: memoryview, index: int, count: int) -> None:
        both = np.frombuffer(numbers, np.int64).reshape(count, 2, -1)
        self._all = both[:, 0]
        #: Whether somebody wants the end of the call.
        self._unwanted = both[:, 1]
        self._index = index
        self._free = list(range(self._all.shape[1]))

    def take(self, name: str) -> int | None:
        """Hold a name; its place, or None if it is taken. Raises IndexError if there is no room."""
        number = _number(name)
        if (self._all == number).any():
            return None
        place = self._free.pop()
        self._unwanted[self._index, place] = 0
        self._all[self._index, place] = number
        return place

    def end(self, name: str) -> None:
        """Ask for the end of the call of this name, if there is one, in any front end."""
        self._unwanted[self._all == _number(name)] = 1

    def to_end(self) -> list[int]:
        """Places of this front end whose calls are to end; each is returned once."""
        mine = self._unwanted[self._index]
        if not mine.any():
            return []
        places = np.flatnonzero(mine)
        mine[places] = 0
        return [int(place) for place in places]

    def give_back(self, place: int) -> None:
        """The call of this place has ended."""
        self._all[self._index, place] = 0
        self._free.append(place)

    def forget(self, index: int) -> None:
        """Front end `index` is gone, and its calls with it."""
        self._all[index] = 0


def _number(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


log = logging.getLogger("tokenpod.generate")

#: How often a front end looks whether another one wants the end of one of its calls.
_LOOK_SECONDS = 0.05


class NamedCalls:
    """The calls of this front end that have a name.

    Args:
        names: those of all front ends.
    """

    def __init__(self, names: CallNames) -> None:
        self._names = names
        self._stops: dict[int, Callable[[], None]] = {}
        self._looking: asyncio.Task[None] | None = None

    def hold(self, name: str, stop: Callable[[], None]) -> int | None:
        """Hold a name, until `give_back`; its place, or None if it is taken.

        `stop` is called, at most once, if somebody wants the call's end.
        """
        place = self._names.take(name)
        if place is not None:
            self._stops[place] = stop
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
        return place

    def give_back(self, place: int) -> None:
        """The call of this place has ended."""
        del self._stops[place]
        self._names.give_back(place)

    def end(self, name: str) -> None:
        """End the call of this name, if there is one: here at once, elsewhere in a moment."""
        self._names.end(name)
        self._stop()

    async def _look(self) -> None:
        """Look for calls to end, for as long as there are any."""
        while self._stops:
            self._stop()
            await asyncio.sleep(_LOOK_SECONDS)
        self._looking = None

    def _stop(self) -> None:
        for place in self._names.to_end():
            if (stop := self._stops.get(place)) is not None:
                try:
                    stop()
                except Exception:
                    # Who ended this call, and the other calls, must not suffer for it.
                    log.exception("a call could not be ended by its name")
