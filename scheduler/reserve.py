"""`reserve` admission: every request gets the sum of its prompt and its most new tokens, as in TGI.

TGI's router books so many tokens (of version 3.3.7, and here: less the last one, which is never
written) and looks at no moment in the future: what one sequence frees when it ends counts when it
has ended. Prefixes in the tree count once.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing

from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.table import Ints, Table
from tokenpod.scheduler.tally import Tally
from tokenpod.scheduler.work import Limits


class Reserve:
    """Admits a request if the bounds of all sequences together fit.

    Args:
        table: the sequences' columns.
        limits: the engine's resources.
        quantum: prompt tokens that every step with prompts is sure to compute.
    """

    def __init__(self, table: Table, limits: Limits, quantum: int) -> None:
        del quantum
        self._table = table
        self._slots = limits.slots

    def ledger(self) -> Bounds:
        """See `Admission`."""
        return Bounds(self._table, self._slots)

    def victims(self, running: Listing[Sequence]) -> Listing[Sequence]:
        """See `Admission`: slots don't run out, so no sequence is preempted."""
        del running
        return ()

    def ended(self, sequence: Sequence) -> None:
        """See `Admission`: bounds are all that counts here."""


class Bounds(Tally):
    """The sum of all bounds."""

    def decoding_need(self, at: Ints) -> Ints:
        """See `Tally`."""
        return self.table.bound[at] - self.table.shared[at]

    def need(self, sequence: Sequence) -> int:
        """See `Tally`."""
        return sequence.bound - sequence.shared

    def sibling_need(self, sequence: Sequence) -> int:
        """See `Tally`."""
        return sequence.bound - (len(sequence.inputs) - 1)
