"""`optimistic` admission: a request joins if its prompt fits now; who came last gives way later.

The rules of vLLM 0.5: outputs are promised nothing, and when slots run out the running request
that arrived last is preempted, in the end the one that asks. A hundredth of the pool, the
watermark, stays free when a request joins; running ones may take it.
"""

from __future__ import annotations

from tokenpod.scheduler.policies.admission_policy import Admission, Needs
from tokenpod.scheduler.sequences.table import Ints, Table
from tokenpod.scheduler.sequences.work import Limits

#: The part of the pool that stays free when a request joins others.
WATERMARK = 0.01


class Optimistic(Admission):
    """Admits a request if what all sequences hold, and its prompt, fit below the watermark."""

    preempts = True

    def __init__(self, table: Table, limits: Limits, quantum: int) -> None:
        super().__init__(table, limits, quantum)
        self.margin = int(WATERMARK * limits.slots)

    def held(self, needs: Needs) -> Ints:
        """What it has, and must compute before its next output."""
        return needs.computed - needs.shared
