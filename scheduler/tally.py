"""Ledgers that add up what sequences hold, without a forecast of when they end.

`reserve` counts every sequence at its bound, `optimistic` at what it has and must compute now.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Listing

from tokenpod.core.requests import Request
from tokenpod.scheduler.radix import Node, new_ledger_number
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.table import Ints, Table, places_of


class Company:
    """Whether sequences belong to several of the batcher's requests, or to one at most.

    Margins that a policy keeps free hold where several run: whatever fits into the pool by itself
    is admitted by itself, or it would wait for ever.
    """

    def __init__(self) -> None:
        self.several = False
        self._first: Request | None = None

    def note(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences of the batcher."""
        if self.several:
            return
        for sequence in sequences:
            if self._first is None:
                self._first = sequence.request
            elif sequence.request is not self._first:
                self.several = True
                return


class Tally(ABC):
    """The ledger of a policy whose need is a sum.

    Args:
        table: the sequences' columns.
        slots: of the KV pool.
        margin: of these, what stays free where several requests run.
    """

    def __init__(self, table: Table, slots: int, margin: int = 0) -> None:
        self.table = table
        self._slots = slots
        self._margin = margin
        self._number = new_ledger_number()
        self._company = Company()
        self._total = 0
        #: After each entry that came singly: what all need, and what they may need.
        self._after: list[tuple[int, int]] = []

    @abstractmethod
    def decoding_need(self, at: Ints) -> Ints:
        """[n] slots to count, without the shared ones, for decoding sequences at these places."""

    @abstractmethod
    def need(self, sequence: Sequence) -> int:
        """Slots to count, without the shared ones, for one whose tokens are computed next."""

    @abstractmethod
    def sibling_need(self, sequence: Sequence) -> int:
        """The same for a sample that computes the last token of a prompt that is there."""

    def decoding(self, sequences: Listing[Sequence], at: Ints) -> None:
        """See `Ledger`."""
        self._many(sequences, self.decoding_need(at))

    def leaving(self, sequences: Listing[Sequence]) -> None:
        """See `Ledger`."""
        at = places_of(sequences)
        self._many(sequences, self.table.computed[at] - self.table.shared[at])

    def reserved(self, sequence: Sequence) -> None:
        """See `Ledger`."""
        self._add(sequence, sequence.bound - sequence.shared)

    def searching(self, sequences: Listing[Sequence]) -> None:
        """See `Ledger`."""
        self._company.note(sequences)
        for sequence in sequences:
            self.reserved(sequence)

    def prefilling(self, sequence: Sequence) -> None:
        """See `Ledger`."""
        self._company.note((sequence,))
        if sequence.group is None:
            self._add(sequence, self.need(sequence))
        else:
            self.reserved(sequence)

    def siblings(self, first: Sequence, sequences: Iterable[Sequence]) -> None:
        """See `Ledger`. The prompt is there once, counted with the first."""
        del first
        for sequence in sequences:
            self._company.note((sequence,))
            need = self.sibling_need(sequence)
            if sequence.group is not None:
                need = sequence.bound - sequence.needed + 1
            self._add(sequence, need)

    @property
    def mark(self) -> int:
        """See `Ledger`: entries that came singly."""
        return len(self._after)

    def fits(self, mark: int) -> bool:
        """See `Ledger`."""
        need, most = self._after[mark - 1] if mark else (self._total, self._most)
        return need <= most

    @property
    def total(self) -> int:
        """Slots that all entries need together."""
        return self._total

    @property
    def _most(self) -> int:
        return self._slots - self._margin if self._company.several else self._slots

    def _many(self, sequences: Listing[Sequence], need: Ints) -> None:
        self._company.note(sequences)
        self._total += int(need.sum())
        for sequence in sequences:
            if sequence.node is not None:
                self._lock(sequence.node)

    def _add(self, sequence: Sequence, need: int) -> None:
        self._total += need
        if sequence.node is not None:
            self._lock(sequence.node)
        self._after.append((self._total, self._most))

    def _lock(self, node: Node) -> None:
        """Count the path to `node`, once."""
        while node.parent is not None and node.seen_by != self._number:
            self._total += len(node.tokens)
            node.seen_by = self._number
            node = node.parent
