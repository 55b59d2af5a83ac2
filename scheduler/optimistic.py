"""`optimistic` admission: a request joins if its prompt fits now; who came last gives way later.

The rules of vLLM 0.5: outputs are promised nothing, and when slots run out the running request
that arrived last is preempted, in the end the one that asks. A hundredth of the pool, the
watermark, stays free when a request joins; running ones may take it.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing

from tokenpod.scheduler.admission import last_to_arrive
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.table import Ints, Table
from tokenpod.scheduler.tally import Tally
from tokenpod.scheduler.work import Limits

#: The part of the pool that stays free when a request joins others.
WATERMARK = 0.01


class Optimistic:
    """Admits a request if what all sequences hold, and its prompt, fit below the watermark.

    Args:
        table: the sequences' columns.
        limits: the engine's resources.
        quantum: prompt tokens that every step with prompts is sure to compute.
    """

    def __init__(self, table: Table, limits: Limits, quantum: int) -> None:
        del quantum
        self._table = table
        self._slots = limits.slots

    def ledger(self) -> Present:
        """See `Admission`."""
        return Present(self._table, self._slots, margin=int(WATERMARK * self._slots))

    def victims(self, running: Listing[Sequence]) -> Listing[Sequence]:
        """See `Admission`."""
        return last_to_arrive(running)

    def ended(self, sequence: Sequence) -> None:
        """See `Admission`: nothing is foreseen here."""


class Present(Tally):
    """The sum of what is held and of what must be computed before the next output."""

    def decoding_need(self, at: Ints) -> Ints:
        """See `Tally`."""
        return self.table.computed[at] - self.table.shared[at]

    def need(self, sequence: Sequence) -> int:
        """See `Tally`."""
        return len(sequence.inputs) - sequence.shared

    def sibling_need(self, sequence: Sequence) -> int:
        """See `Tally`."""
        del sequence
        return 1
