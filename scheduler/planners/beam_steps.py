"""Beam searches: plans their steps, which depend on the tokens of the steps before.

    prefilling --prompt settled--> ready --planned--> in flight --settled--> ready ... --> over

A search is a request with one sequence for each beam. The batcher computes the prompt with the
first of them, as of any request; then all of them are in a step, or none is. Their next tokens and
slots depend on what is chosen among all of them, so a search is planned when its last step has
settled, and with overlapped steps it is in every other one. It is never preempted.
"""

from __future__ import annotations

from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.policies.ledger import Ledger
from tokenpod.scheduler.sequences.rows import Rows
from tokenpod.scheduler.sequences.sequence import Group, Sequence
from tokenpod.scheduler.steps.step import StepBuilder


class Beams:
    """Plans the steps of all searches.

    Args:
        kv: gives the slots.
        rows: of the executor.
    """

    def __init__(self, kv: KV, rows: Rows) -> None:
        self._kv = kv
        self._rows = rows
        #: By the id of the first sequence: searches whose prompt has been launched.
        self.groups: dict[int, Group] = {}
        #: Those whose last step has settled.
        self._ready: dict[int, Group] = {}

    @property
    def context(self) -> int:
        """The tokens that those read together which are ready."""
        return sum(s.computed for group in self._ready.values() for s in group.carriers)

    @property
    def running(self) -> int:
        """Sequences with a row."""
        return sum(len(g.sequences) if g.begun else 1 for g in self.groups.values())

    @property
    def wanted(self) -> int:
        """Slots for the next step of all that are ready."""
        return sum(len(group.carriers) for group in self._ready.values())

    @property
    def to_come(self) -> int:
        """Slots that these sequences may still take, up to their bounds."""
        groups = self.groups.values()
        running = (s for g in groups for s in (g.sequences if g.begun else [g.first]))
        return sum(sequence.bound - sequence.computed for sequence in running)

    def first(self, first_id: int) -> Sequence | None:
        """The first sequence of a search that is here, by its id."""
        group = self.groups.get(first_id)
        return None if group is None else group.first

    def add(self, group: Group) -> None:
        """The last of a prompt has been planned."""
        group.launched = True
        self.groups[group.first.id] = group

    def add_to(self, ledger: Ledger) -> None:
        """Add what these sequences need."""
        for group in self.groups.values():
            ledger.searching(group.sequences if group.begun else [group.first])

    def begin(self, group: Group, siblings: list[Sequence]) -> None:
        """The prompt has settled: all sequences go on from it, in rows that are free for them."""
        self._kv.branch(group.first, siblings)
        for sibling in siblings:
            sibling.began_at = group.first.began_at
            sibling.launched = group.first.launched
            self._rows.give(sibling)
        group.begun = True

    def continue_with(self, group: Group, parents: dict[Sequence, Sequence]) -> None:
        """A step has settled: the next one may be planned."""
        tails = group.first.tails
        assert tails is not None
        tails.settle({each.id: parent.id for each, parent in parents.items()})
        for sequence, parent in parents.items():
            if sequence is not parent:
                self._rows.renew(sequence)
        self._ready[group.first.id] = group

    def plan(self, step: StepBuilder, slots: int) -> int:
        """Add to a step all searches that are ready and have room; the slots that they take."""
        taken = 0
        for first_id, group in [*self._ready.items()]:
            if taken + len(group.carriers) <= slots:
                del self._ready[first_id]
                step.extend_beams(group.carriers)
                taken += len(group.carriers)
        return taken

    def remove(self, sequence: Sequence) -> bool:
        """The search of a sequence is over; False if it is none that is planned here."""
        group = sequence.group
        if group is None or not group.launched:
            return False
        self.groups.pop(group.first.id, None)
        self._ready.pop(group.first.id, None)
        return True
