"""Names of the calls that are under way, as all front ends of a pod see them.

Each front end has places of its own in shared memory, takes those alone and reads all, so nothing
is locked. Two that take a name at the same instant may both have it. Any of them may ask for the
end of a call by its name; its own front end finds that when it looks.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable

import numpy as np


class CallNames:
    """Names as 64-bit digests; 0 is an empty place.

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
