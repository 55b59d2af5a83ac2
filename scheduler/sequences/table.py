"""The state of all sequences, in columns: a step of hundreds of rows takes a few operations.

A sequence has a place in every column from its beginning to its end; `Sequence` reads and writes
its own by name. Place 0 belongs to no sequence, and is all zeros.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Placed(Protocol):
    """Whatever has a place in the columns: a `Sequence`."""

    @property
    def place(self) -> int:
        """Its index."""


_FIRST_PLACES = 64


class Table:
    """Columns of int64, by place."""

    #: Positions whose keys and values are written, or being written.
    computed: Ints
    #: Of these, the first ones that are in the tree.
    shared: Ints
    #: Positions that must be computed before a token can be sampled.
    needed: Ints
    #: Positions that will be computed at most.
    bound: Ints
    #: Output tokens that have been sampled, or are being sampled.
    launched: Ints
    #: Steps launched and not settled.
    in_flight: Ints
    #: 1: it has ended: nothing more is planned, and what comes back is dropped.
    ended: Ints
    #: Tokens that may be drafted for it in a step, at most.
    drafts: Ints
    #: Drafted tokens in the step in flight: some of these positions may be taken back.
    drafted: Ints
    #: The executor's row; -1: none.
    row: Ints
    #: The extent that grows, in the slot allocator's columns; 0: none.
    tail: Ints
    #: Its window slots, in the columns of `Windows`; 0: none.
    trail: Ints
    #: 1: its tokens wait for masks, so it may miss steps.
    masked: Ints
    #: 1: its next mask is late; it has no part in steps until that is there.
    paused: Ints
    #: 1: its prompt is read for its vectors, so nothing is sampled.
    pooled: Ints
    #: The sequence's id.
    id: Ints
    #: Outputs before this one only lengthen it, unless they are ends of text; 0: any may do more.
    plain: Ints
    #: The end of a piece of its prompt, behind which others may go on otherwise; 0: there is none.
    branch: Ints

    def __init__(self) -> None:
        self._columns = np.zeros((len(_NAMES), _FIRST_PLACES), np.int64)
        self._free = list(range(_FIRST_PLACES - 1, 0, -1))
        #: Sequences that have an adapter, those under a constraint, and those that are pooled.
        self.adapted = 0
        self.constrained = 0
        self.pooling = 0
        self._name_columns()

    def take(self) -> int:
        """A free place: zeros, and no row."""
        if not self._free:
            places = self._columns.shape[1]
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
            self._free = list(range(2 * places - 1, places - 1, -1))
            self._name_columns()
        place = self._free.pop()
        self._columns[:, place] = 0
        self.row[place] = -1
        return place

    def give_back(self, place: int) -> None:
        """Free the place of a sequence that has ended."""
        self._free.append(place)

    def _name_columns(self) -> None:
        for name, column in zip(_NAMES, self._columns, strict=True):
            setattr(self, name, column)


def places_of(sequences: Collection[Placed]) -> Ints:
    """[n] where these sequences are in the columns."""
    return np.fromiter((sequence.place for sequence in sequences), np.int64, len(sequences))


#: In the order of the columns.
_NAMES = tuple(Table.__annotations__)
