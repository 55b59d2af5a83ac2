"""The bookkeeping where each text is read in one step, and nothing of it is kept: there is none."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.pool.radix import Slots
from tokenpod.scheduler.sequences.sequence import Sequence


class WholeTexts(KV):
    """A `KV` of as many slots as may be asked for, none of which is ever taken.

    Plans name slot 0 for every token; no executor that reads whole texts has a pool.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots, caching=False)
        self._root, _ = self.tree.match(np.empty(0, np.int32), "")
        self._nowhere = np.zeros(slots, np.int64)
        self._nowhere.setflags(write=False)

    def begin(self, sequence: Sequence) -> None:
        """Nothing is cached."""
        sequence.begin_after(self._root, 0)

    def withdraw(self, sequence: Sequence) -> None:
        """Undo `begin`."""
        self.release(sequence)

    def extend(self, sequence: Sequence, n: int) -> Slots:
        """[n] int64 zeros."""
        del sequence
        return self._nowhere[:n]

    def release(self, sequence: Sequence) -> None:
        """There is nothing to be freed."""
        sequence.node = None

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if a sequence, or the tree, has a slot."""
        assert not any(sequence.extents for sequence in sequences)
        assert (self.free, self.tree.tokens) == (self.total, 0)
