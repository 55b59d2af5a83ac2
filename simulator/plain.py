"""Outputs that are only counted: all tokens are plain, but for those that a sequence is given.

A step brings a token to hundreds of sequences, so it is one operation on a column of counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokenpod.scheduler.sequences.table import Ints, Table

#: A token that never ends a sequence.
PLAIN = 0


class OutputCounts:
    """How many outputs sequences have, by their place in the table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.counts = np.zeros_like(table.computed)

    def begin(self, place: int) -> CountedOutputs:
        """The outputs of the sequence that has just got a place."""
        if place >= len(self.counts):
            grown = np.zeros_like(self._table.computed)
            grown[: len(self.counts)] = self.counts
            self.counts = grown
        self.counts[place] = 0
        return CountedOutputs(self, place)

    def add(self, places: Ints, n: int = 1) -> None:
        """`n` plain tokens more for each of these sequences, which are different ones."""
        self.counts[places] += n


class CountedOutputs:
    """What a sequence has in place of a list of its outputs."""

    __slots__ = ("_of", "_others", "_place")

    def __init__(self, of: OutputCounts, place: int) -> None:
        self._of = of
        self._place = place
        #: Tokens that are not plain, by number.
        self._others: dict[int, int] = {}

    def __len__(self) -> int:
        return int(self._of.counts[self._place])

    def __iter__(self) -> Iterator[int]:
        return iter(self[:].tolist())

    def __getitem__(self, some: slice, /) -> Ints:
        tokens = np.full(len(self), PLAIN, np.int64)
        for at, token in self._others.items():
            tokens[at] = token
        return tokens[some]

    def append(self, token: int, /) -> None:
        """Add one that may not be plain."""
        if token != PLAIN:
            self._others[len(self)] = token
        self._of.counts[self._place] += 1
