"""Counters that the front-end processes of a pod share: a few numbers in shared memory.

Each process writes its own row and reads all, so nothing is ever locked. The memory has no name:
it is a file descriptor that children inherit, and is gone when the last process is.

    row k = [admitted requests, prompt tokens that wait, serving, the engine owes it a step,
             bytes that its calls hold, heartbeats, requests without a token yet,
             requests that it refused because they could never fit,
             bytes that it keeps for all calls, calls that have ended by the number of their status]
    two more numbers, written by the first process: whether the pod drains, and whether the engine
    makes no progress
    then each process's calls under way by name, and which are to end; see call_names.py
"""

from __future__ import annotations

import mmap
import os

from tokenpod.service.admission.call_names import CallNames

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
