"""What all admitted sequences will need at most: the input of `peak.peak_tokens`.

Each thing that is held is an entry (tokens, growth, end). Entries are only ever added, so the need
of the first k of some candidates is the peak of the entries up to the k-th one's last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Listing

import numpy as np

from tokenpod.scheduler.peak import FOREVER, peak_tokens
from tokenpod.scheduler.radix import Node
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.table import Ints, Table

#: Steps by which a sequence may outlast its count: the one in flight when its end is seen.
_SLACK = 1

_numbers = itertools.count(1)


class Forecast:
    """Gathers sequences, then tells their peak.

    Args:
        table: the sequences' columns.
        quantum: prompt tokens that every step surely processes.
    """

    def __init__(self, table: Table, quantum: int) -> None:
        self._table = table
        self._quantum = quantum
        #: [3, n] of those that were added many at a time, and the entries that came singly.
        self._columns: list[Ints] = []
        self._held: list[int] = []
        self._left: list[int] = []
        self._ends: list[int] = []
        self._number = next(_numbers)
        #: When each sequence whose samples may wait for it is gone.
        self._gone: dict[int, int] = {}
        self._prompt_tokens = 0

    def __len__(self) -> int:
        """Entries that came singly."""
        return len(self._held)

    def decoding(self, sequences: Listing[Sequence]) -> None:
        """Sequences that grow by one a step from now on."""
        table, at = self._table, _places(sequences)
        left = table.prompt[at] + table.most[at] - 1 - table.computed[at]
        self._many(sequences, table.computed[at] - table.shared[at], left, left + _SLACK)

    def leaving(self, sequences: Listing[Sequence]) -> None:
        """Sequences that have ended, but for a step in flight."""
        table, at = self._table, _places(sequences)
        zeros = np.zeros(len(at), np.int64)
        self._many(sequences, table.computed[at] - table.shared[at], zeros, zeros + 1 + _SLACK)

    def frozen(self, sequence: Sequence) -> None:
        """One that somebody else advances, if ever."""
        self._add(sequence.bound - sequence.shared, 0, FOREVER)
        if sequence.node is not None:
            self._lock(sequence.node, FOREVER)

    def prefilling(self, sequence: Sequence) -> None:
        """One whose prompt is computed after those that were added before."""
        self._in_line(sequence, sequence.prompt_length - sequence.computed)

    def siblings(self, first: Sequence, sequences: Iterable[Sequence]) -> None:
        """Samples that wait for the prompt of `first`, which was added before.

        Each computes its last token again, after those that were added before. The prompt is there
        once, and stays until the last of all samples is over.
        """
        last = 0
        for sequence in sequences:
            last = self._in_line(sequence, 1)
        prompt = first.prompt_length - first.shared
        self._add(-prompt, 0, self._gone[first.id])
        self._add(prompt, 0, last)
        if first.node is not None:
            self._lock(first.node, last)

    def peak(self, entries: int | None = None) -> int:
        """The most slots that these sequences will ever hold at once.

        Args:
            entries: count so many of those that came singly, and not all.
        """
        singly = np.array((self._held, self._left, self._ends), np.int64)[:, :entries]
        return peak_tokens(*np.concatenate((*self._columns, singly), axis=1))

    def _many(self, sequences: Listing[Sequence], held: Ints, left: Ints, ends: Ints) -> None:
        self._columns.append(np.stack((held, left, ends)))
        for sequence, end in zip(sequences, ends.tolist(), strict=True):
            self._gone[sequence.id] = end
            if sequence.node is not None:
                self._lock(sequence.node, end)

    def _in_line(self, sequence: Sequence, need: int) -> int:
        """Add one with `need` prompt tokens to compute; the step by which it is gone."""
        self._prompt_tokens += need
        # A sibling waits until the prompt is settled, and rounds up to whole steps once more.
        delay = -(-self._prompt_tokens // self._quantum) + 3
        # The prompt's last step brings the first new token; the last one is not written.
        left = sequence.bound - sequence.prompt_length
        end = delay + left + _SLACK
        self._add(sequence.held + need, left, end)
        self._gone[sequence.id] = end
        if sequence.node is not None:
            self._lock(sequence.node, end)
        return end

    def _add(self, held: int, left: int, end: int) -> None:
        self._held.append(held)
        self._left.append(left)
        self._ends.append(end)

    def _lock(self, node: Node, end: int) -> None:
        """Somebody keeps the path to `node` until `end`."""
        while node.parent is not None:
            tokens = len(node.tokens)
            if node.seen_by == self._number:
                if node.kept_until >= end:
                    # Then those above it are kept as long too.
                    return
                self._add(-tokens, 0, node.kept_until)
            self._add(tokens, 0, end)
            node.seen_by, node.kept_until = self._number, end
            node = node.parent


def _places(sequences: Listing[Sequence]) -> Ints:
    return np.array([sequence.place for sequence in sequences], np.int64)
