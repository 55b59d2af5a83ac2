"""The sequences that get a token in every step: which of them the next one holds, and with what.

They go in lockstep, so most steps hold all of them, one position each: a few operations on columns.
Left out are those whose last token has been launched, whose mask is late, or whose drafts are being
checked. Some may have several positions: forced tokens, and drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

import numpy as np

from tokenpod.scheduler.drafting import Drafting
from tokenpod.scheduler.forced import Forced
from tokenpod.scheduler.ledger import Ledger
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.step import StepBuilder
from tokenpod.scheduler.table import Ints, Table

_NONE: Ints = np.empty(0, np.int64)
#: After more changes than this all places are gathered anew.
_MANY = 16


class Decoding:
    """The batcher's sequences whose needed positions have all been launched, but for beams.

    Args:
        table: their columns.
        forced: which tokens are forced.
        drafting: decides who has drafts; None: nobody.
    """

    def __init__(self, table: Table, forced: Forced, drafting: Drafting | None) -> None:
        self._table = table
        self._forced = forced
        self._drafting = drafting
        self._sequences: dict[int, Sequence] = {}
        #: The same in the order in which they came, and [n] their places; never changed in place.
        self._order: list[Sequence] = []
        self._places = _NONE
        #: Who came and who went since these were made.
        self._came: list[Sequence] = []
        self._gone: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def get(self, sequence_id: int) -> Sequence | None:
        """One of them by its id."""
        return self._sequences.get(sequence_id)

    def add(self, sequence: Sequence) -> None:
        """The last of what a sequence needs has been planned."""
        self._sequences[sequence.id] = sequence
        self._came.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Plan nothing more of a sequence; False if it is not here."""
        if self._sequences.pop(sequence.id, None) is None:
            return False
        if sequence in self._came:
            self._came.remove(sequence)
        else:
            self._gone.append(sequence)
        return True

    def enter(self, ledger: Ledger) -> None:
        """Add what they need."""
        ledger.decoding(*self._all())

    @property
    def to_come(self) -> int:
        """Slots that they may still take, up to their bounds."""
        _, places = self._all()
        return int((self._table.bound[places] - self._table.computed[places]).sum())

    def next(self) -> tuple[list[Sequence], Ints]:
        """Those that can have a token in the next step; [n] their places."""
        sequences, places = self._all()
        table = self._table
        going_on = table.computed[places] < table.bound[places]
        if table.constrained:
            going_on &= table.paused[places] == 0
        if self._drafting is not None:  # which of the drafts are right must be known first
            going_on &= table.drafted[places] == 0
        if np.count_nonzero(going_on) == len(going_on):
            return sequences, places
        return [*compress(sequences, going_on.tolist())], places[going_on]

    def _all(self) -> tuple[list[Sequence], Ints]:
        """All of them; [n] their places."""
        came, gone = self._came, self._gone
        if not (came or gone):
            return self._order, self._places
        if len(came) + len(gone) > _MANY:
            self._order = [*self._sequences.values()]
            self._places = _places(self._order)
        else:
            which = [self._order.index(sequence) for sequence in gone]
            stay = np.ones(len(self._order), np.bool_)
            stay[which] = False
            self._order = [*compress(self._order, stay.tolist()), *came]
            self._places = np.concatenate((self._places[stay], _places(came)))
        came.clear()
        gone.clear()
        return self._order, self._places

    def holds_only(self, places: Ints) -> bool:
        """Whether the sequences at these places are all that there are, and can have a token."""
        sequences, decoding = self.next()
        return len(sequences) == len(self._sequences) == len(places) and set(
            decoding.tolist()
        ) == set(places.tolist())

    @property
    def may_run_ahead(self) -> bool:
        """Whether some may have several positions in a step."""
        return bool(self._drafting or self._forced.known)

    def add_to(
        self, step: StepBuilder, sequences: list[Sequence], places: Ints, *, ahead: bool
    ) -> int:
        """Add to a step; the slots that are taken.

        Args:
            step: is added to.
            sequences: of `next`, as many as there are slots.
            places: [n] int64, theirs.
            ahead: whether they may have several positions each, and the slots for these.
        """
        if ahead:
            return add_ahead(step, sequences, places, self._forced, self._drafting)
        if sequences:
            step.decode(sequences, places)
        return len(sequences)


def add_ahead(
    step: StepBuilder,
    sequences: list[Sequence],
    places: Ints,
    forced: Forced,
    drafting: Drafting | None,
) -> int:
    """Add the next tokens of one planner's sequences, and what may follow; the slots taken.

    Args:
        step: is added to.
        sequences: could decode.
        places: [n] int64, theirs.
        forced: which tokens are forced.
        drafting: decides who has drafts; None: nobody.
    """
    sequences, places, taken = forced.add_to(step, sequences, places)
    if drafting is not None:
        sequences, places, drafted = drafting.add_to(step, sequences, places)
        taken += drafted
    if sequences:
        step.decode(sequences, places)
    return taken + len(sequences)


def _places(sequences: list[Sequence]) -> Ints:
    return np.array([sequence.place for sequence in sequences], np.int64)
