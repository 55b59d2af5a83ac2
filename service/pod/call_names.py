"""Names of the calls that are under way, as all front ends of a pod see them.

Each front end has places of its own in shared memory, writes there alone and reads all, so nothing
is locked. Two that take a name at the same instant may both have it.
"""

from __future__ import annotations

import hashlib

import numpy as np


class CallNames:
    """Names as 64-bit digests; 0 is an empty place.

    Args:
        numbers: int64, as many places for each of `count` front ends.
        index: which of them this one is.
    """

    def __init__(self, numbers: memoryview, index: int, count: int) -> None:
        self._all = np.frombuffer(numbers, np.int64).reshape(count, -1)
        self._index = index
        self._free = list(range(self._all.shape[1]))

    def take(self, name: str) -> int | None:
        """Hold a name; its place, or None if it is taken. Raises IndexError if there is no room."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little", signed=True) or 1
        if (self._all == number).any():
            return None
        place = self._free.pop()
        self._all[self._index, place] = number
        return place

    def give_back(self, place: int) -> None:
        """The call of this place has ended."""
        self._all[self._index, place] = 0
        self._free.append(place)

    def forget(self, index: int) -> None:
        """Front end `index` is gone, and its calls with it."""
        self._all[index] = 0
