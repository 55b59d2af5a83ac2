"""What lies in the host's memory: keys and values of blocks of tokens, found by what these are.

Blocks that somebody will come back for are pinned; the others are a cache, of
which what was used longest ago goes first.

    free --add--> unpinned (a cache) <--pin, unpin--> pinned
      ^               |
      +--room needed--+
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenpod.scheduler.pool.block_keys import Key


@dataclass(slots=True)
class Offloaded:
    """What a sequence has to do with the host's memory."""

    #: Tokens behind the computed ones that are to be copied from there.
    to_fetch: int = 0
    #: Copies to its slots are under way.
    flying: bool = False
    #: The blocks of these tokens, pinned; the first one has this number.
    blocks: list[Key] = field(default_factory=list)
    first: int = 0
    #: The position behind the last one whose slot is given, of cached and of copied ones.
    end: int = 0
    #: Tokens that went there when it was preempted; 0: it was not, or has come back.
    swapped: int = 0
    #: Their blocks, pinned; the last one may be shorter than others.
    kept: list[Key] = field(default_factory=list)
    #: Keys of the first blocks of its tokens, after that of its salt, as far as known.
    keys: list[Key] = field(default_factory=list)


class OffloadTier:
    """Which blocks are there.

    Args:
        slots: tokens that the host's memory holds; whole blocks of them are used.
        block: tokens of a block.
    """

    def __init__(self, slots: int, block: int) -> None:
        self._block = block
        self._blocks = slots // block
        self._free = list(range(self._blocks - 1, -1, -1))
        #: Where blocks lie, in blocks; those without pins, what was used longest ago first.
        self._at: dict[Key, int] = {}
        self._unpinned: OrderedDict[Key, None] = OrderedDict()
        self._pins: Counter[Key] = Counter()
        #: Pinned blocks that nobody can find once they are not pinned any more.
        self._private: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._at

    @property
    def total(self) -> int:
        """Tokens that there is room for."""
        return self._blocks * self._block

    @property
    def used(self) -> int:
        """Tokens' room that is taken."""
        return len(self._at) * self._block

    @property
    def room(self) -> int:
        """Blocks that can be added: free ones, and those that can be forgotten."""
        return len(self._free) + len(self._unpinned)

    def slot(self, key: Key) -> int:
        """The first slot in main memory of a block that is there."""
        return self._at[key] * self._block

    def use(self, key: Key) -> None:
        """A block is there, and was looked for."""
        if key in self._unpinned:
            self._unpinned.move_to_end(key)

    def add(self, key: Key) -> int | None:
        """The first slot in main memory for a block that is not there; None: there is no room."""
        assert key not in self._at, "a block is there already"
        if not self._free:
            if not self._unpinned:
                return None
            oldest, _ = self._unpinned.popitem(last=False)
            self._free.append(self._at.pop(oldest))
        self._at[key] = self._free.pop()
        self._unpinned[key] = None
        return self.slot(key)

    def pin(self, keys: Iterable[Key], *, private: bool = False) -> None:
        """Keep these blocks, which are there, until `unpin`.

        `private`: nobody else may find them later, so they go with their last pin.
        """
        for key in keys:
            self._unpinned.pop(key, None)
            self._pins[key] += 1
            if private:
                self._private.add(key)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo one `pin` of each. The last of them are forgotten before the first."""
        for key in [*keys][::-1]:
            self._pins[key] -= 1
            assert self._pins[key] >= 0, "unpinned more often than pinned"
            if self._pins[key]:
                continue
            del self._pins[key]
            if key in self._private:
                self._private.remove(key)
                self._free.append(self._at.pop(key))
            else:
                self._unpinned[key] = None

    def clear(self) -> None:
        """Forget every block; those that are pinned with their last pin."""
        self._private.update(self._pins)
        for key in self._unpinned:
            self._free.append(self._at.pop(key))
        self._unpinned.clear()

    def check(self, pins: Counter[Key]) -> None:
        """Raise AssertionError unless these are all pins, and each block is in one place."""
        assert pins == self._pins, (pins, self._pins)
        assert self._at.keys() == {*self._unpinned, *self._pins}
        assert not self._pins.keys() & self._unpinned.keys()
        places = sorted([*self._free, *self._at.values()])
        assert places == list(range(self._blocks)), "blocks in no or two places"
