"""Slots of layers with a window, which a token leaves while its sequence goes on.

Every token has a slot (of the layers that see everything, and of the prefix tree). In layers with a
window it has a second one for as long as somebody may read it there: a *window slot*, which is
found by the first. Window slots are given in pages, and a sequence fills one after the other:

    page   [ 0 1 2 3 ]  [ 4 5 6 7 ]  [ 8 9 . . ]     . is still to be filled
    pins        -            1            1           window of 4: the first page has been left

A page without pins is free, or a cache: what it has can be read by whoever begins behind those
tokens, until the page is wanted for others; what was left first goes first. So a prefix may be
known whose last tokens have no window slots any more: sequences begin behind a shorter one then.

Pages are as many as all rows can pin at once (`core.windows`), so none is ever missing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tokenpod.core.windows import PARTS, WindowRoom
from tokenpod.scheduler.pool.radix import Slots

Ints = npt.NDArray[np.int64]

_FIRST_TRAILS = 64


class Trail:
    """The pages of one sequence, or of the beams of one search, in order of position.

    How far the current page is filled lies in the columns of `Windows`, at `at`.
    """

    __slots__ = ("at", "current", "lasts", "pages", "shared")

    def __init__(self, at: int) -> None:
        self.at = at
        #: Those that it fills; behind the current one: taken, and to be filled.
        self.pages: list[int] = []
        #: Of each, the position of its last token; of the current one perhaps an earlier one.
        self.lasts: list[int] = []
        self.current = -1
        #: (position of the last token, page) of its prefix, which others have filled.
        self.shared: list[tuple[int, int]] = []


class Windows:
    """Gives tokens their window slots.

    Args:
        slots: of the pool.
        room: how many window slots there are.
        caching: keep what was left for later requests.
    """

    def __init__(self, slots: int, room: WindowRoom, *, caching: bool) -> None:
        page = self._page = room.page
        self._caching = caching
        #: Tokens before the next one that are read with it.
        self._read = max(room.window - 1, 1)
        self._reach = room.window - 1 + room.taken_back
        self._most_pages = -(-self._read // page) + 1 + PARTS
        pages = room.slots // page
        #: [slots] each slot's window slot: that of its token, if `_slot` says so too; -1: none yet.
        self.of: Ints = np.full(slots, -1, np.int64)
        #: [window slots] whose they are; -1: nobody's.
        self._slot: Ints = np.full(pages * page, -1, np.int64)
        self._pins = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        #: Pages without pins, those that were left first before others.
        self._cached: OrderedDict[int, None] = OrderedDict()
        #: Of pages that nobody fills, but that have room: slots that are filled.
        self._open: dict[int, int] = {}
        #: Of trails, by `at`: the next window slot, and how many the current page has from there.
        self._columns: Ints = np.zeros((2, _FIRST_TRAILS), np.int64)
        self._unnamed = list(range(_FIRST_TRAILS - 1, 0, -1))
        #: Trails that have grown by whole prompts: what they leave is free after the step.
        self._grown: dict[Trail, int] = {}

    @property
    def used(self) -> int:
        """Window slots in pages that somebody may read, or that are kept for later requests."""
        return (len(self._pins) - len(self._free)) * self._page

    def reach(self, slots: Slots) -> int:
        """How many of a prefix's tokens a sequence can begin behind.

        Args:
            slots: [n] of the prefix.
        """
        there = self._valid(slots)
        if not there[-self._read :].all():
            index = np.arange(len(slots))
            run = index - np.maximum.accumulate(np.where(there, -1, index))
            enough = np.flatnonzero(run >= np.minimum(self._read, index + 1))
            slots = slots[: int(enough[-1]) + 1 if len(enough) else 0]
        pages = self.of[slots[-self._read :]] // self._page
        return len(slots) if len(np.unique(pages)) <= self._most_pages else 0

    def begin(self, slots: Slots) -> Trail:
        """Go on behind a prefix with these slots, [n]: what is read of it stays."""
        if not self._unnamed:
            self._add_names()
        trail = Trail(self._unnamed.pop())
        self._columns[:, trail.at] = 0
        if not len(slots):
            return trail
        read = self.of[slots[-self._read :]]
        pages = read // self._page
        ends = np.append(np.flatnonzero(pages[1:] != pages[:-1]), len(pages) - 1)
        first = len(slots) - len(read)
        for last, page in zip((first + ends).tolist(), pages[ends].tolist(), strict=True):
            self._pin(page)
            trail.shared.append((last, page))
        last, page = trail.shared[-1]
        filled = int(read[-1]) % self._page + 1
        if self._open.get(page) == filled:
            # Nobody else fills it: turn after turn of a chat stays close together.
            del self._open[page], trail.shared[-1]
            trail.pages, trail.lasts, trail.current = [page], [last], 0
            self._columns[:, trail.at] = page * self._page + filled, self._page - filled
        return trail

    def end(self, trail: Trail) -> None:
        """Nobody goes on from here: what it has is kept for later requests, or free."""
        left = int(self._columns[1, trail.at])
        if left and trail.current >= 0:
            self._open[trail.pages[trail.current]] = self._page - left
        for _, page in trail.shared:
            self._unpin(page)
        for at, page in enumerate(trail.pages):
            self._unpin(page, empty=at > trail.current)
        self._grown.pop(trail, None)
        self._unnamed.append(trail.at)

    def extend(self, trail: Trail, slots: Slots, position: int, *, beams: bool = False) -> None:
        """The next tokens of a trail have these slots, [n].

        Args:
            trail: of the sequence.
            slots: of positions from `position` on; or with `beams`, all of that position.
            position: of the first.
            beams: the tokens are those of several beams.
        """
        self.slide(trail, position)
        following, left = self._columns[:, trail.at].tolist()
        firsts, counts, done = [], [], 0
        if not left and trail.current >= 0:
            # Steps of many rows do not say how far a page has come.
            trail.lasts[trail.current] = position - 1
        while done < len(slots):
            if not left:
                following, left = self._next_page(trail), self._page
            taken = min(left, len(slots) - done)
            firsts.append(following - done)
            counts.append(taken)
            following, left, done = following + taken, left - taken, done + taken
            trail.lasts[trail.current] = position if beams else position + done - 1
        self._columns[:, trail.at] = following, left
        self._name(slots, np.repeat(firsts, counts) + np.arange(done))
        if done > 1 and not beams:
            self._grown[trail] = position + done

    def extend_each(self, trails: Ints, slots: Slots) -> Ints:
        """The next token of many trails have these slots, [n] each; those without room do not.

        Args:
            trails: `Trail.at` of each.
            slots: of their next tokens.

        Returns which of them have no room in their page: `extend` is to be called for these.
        """
        following, left = self._columns[:, trails]
        full = np.flatnonzero(left == 0)
        if len(full):
            roomy = left > 0
            trails, slots, following = trails[roomy], slots[roomy], following[roomy]
        self._name(slots, following)
        self._columns[0, trails] += 1
        self._columns[1, trails] -= 1
        return full

    def take_back(self, trail: Trail, n: int) -> None:
        """The last `n` tokens are not to be: the next ones get their window slots."""
        if not n:
            return
        left = int(self._columns[1, trail.at])
        used = (trail.current + 1) * self._page - left - n
        assert used >= 0, "more is taken back than a trail has"
        trail.current = max(-(-used // self._page) - 1, 0)
        filled = used - trail.current * self._page
        page = trail.pages[trail.current]
        self._columns[:, trail.at] = page * self._page + filled, self._page - filled
        if trail in self._grown:
            self._grown[trail] -= n

    def slide(self, trail: Trail, position: int) -> None:
        """Leave what nobody reads who goes on from a position, or from one a little before."""
        first, gone = position - self._reach, 0
        while trail.shared and trail.shared[0][0] < first:
            self._unpin(trail.shared.pop(0)[1])
        while gone < trail.current and trail.lasts[gone] < first:
            self._unpin(trail.pages[gone])
            gone += 1
        if gone:
            del trail.pages[:gone], trail.lasts[:gone]
            trail.current -= gone

    def settle(self) -> None:
        """The next step is planned: prompts of the last one have been read."""
        for trail, position in self._grown.items():
            self.slide(trail, position)
        self._grown.clear()

    def flush(self) -> None:
        """Forget what is kept for later requests."""
        for page in [*self._cached]:
            self._evict(page)
            self._free.append(page)
        self._cached.clear()

    def check(self, trails: Iterable[Trail]) -> None:
        """Raise AssertionError unless these trails have pinned what is pinned."""
        pins: Counter[int] = Counter()
        for trail in trails:
            pins.update(page for _, page in trail.shared)
            pins.update(trail.pages)
        assert pins == Counter({page: n for page, n in enumerate(self._pins) if n}), "pins"
        pages = sorted([*self._free, *self._cached, *pins])
        assert pages == list(range(len(self._pins))), "pages in no or two places"
        assert not self._open.keys() & {*self._free}

    # -- parts ---------------------------------------------------------------------------------

    def _valid(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """[n] whether the token of each slot has a window slot."""
        own = self.of[slots]
        there: npt.NDArray[np.bool_] = (own >= 0) & (self._slot[own] == slots)
        return there

    def _name(self, slots: Slots, own: Ints) -> None:
        self.of[slots] = own
        self._slot[own] = slots

    def _next_page(self, trail: Trail) -> int:
        """The first slot of the page behind the current one."""
        trail.current += 1
        if trail.current == len(trail.pages):
            if self._free:
                page = self._free.pop()
            else:
                assert self._cached, "more pages are read than rows can read"
                page, _ = self._cached.popitem(last=False)
                self._evict(page)
            self._pins[page] = 1
            trail.pages.append(page)
            trail.lasts.append(-1)
        return trail.pages[trail.current] * self._page

    def _pin(self, page: int) -> None:
        self._cached.pop(page, None)
        self._pins[page] += 1

    def _unpin(self, page: int, *, empty: bool = False) -> None:
        self._pins[page] -= 1
        if self._pins[page]:
            return
        if self._caching and not empty:
            self._cached[page] = None
            return
        self._evict(page)
        self._free.append(page)

    def _evict(self, page: int) -> None:
        """Forget whose a page's slots were."""
        self._open.pop(page, None)
        self._slot[page * self._page : (page + 1) * self._page] = -1

    def _add_names(self) -> None:
        names = self._columns.shape[1]
        self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        self._unnamed = list(range(2 * names - 1, names - 1, -1))
