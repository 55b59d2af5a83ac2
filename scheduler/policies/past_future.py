"""`past_future` admission: outputs are taken to be as long as those that ended lately.

After LightLLM's scheduler ("Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS
2025). Lengths are drawn from the last 200 that ended, a running sequence's from those above what it
has; a request joins if the most slots that will then be taken at once are at most 0.95 of the pool,
by each of some draws. Where the draws were too low, who came last gives way.

A draw says when each sequence ends, so the need is that of `peak.peak_tokens`: with sequences
sorted by what is left of them, falling, the highest left_i * i + sum of held_j over j <= i. Slots
in the tree are held once, until the last one ends that uses them.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tokenpod.scheduler.policies.admission_policy import Admission, Needs
from tokenpod.scheduler.sequences.sequence import EndState, Sequence
from tokenpod.scheduler.sequences.table import Ints, Table
from tokenpod.scheduler.sequences.work import Limits

#: Lengths that are remembered; how many of them the limit on new tokens stands for at first.
HISTORY = 200
_AT_FIRST = 100
#: The part of the pool that a request may fill together with others.
CAPACITY = 0.95
#: Draws that must all fit: the fewer run, the more one draw can mislead.
_MOST_DRAWS = 5
_DRAWS_FOR = 200


class PastFuture(Admission):
    """Admits a request if the drawn future fits.

    Args:
        table, limits, quantum: as of every policy.
        seed: of the draws, which are nobody else's.
    """

    preempts = True

    def __init__(self, table: Table, limits: Limits, quantum: int, seed: int = 0) -> None:
        super().__init__(table, limits, quantum)
        self.margin = limits.slots - int(CAPACITY * limits.slots)
        self._lengths = Lengths(limits.max_positions - 1, seed)

    def draws(self, running: int) -> int:
        """More where few run."""
        return min(_DRAWS_FOR // max(running, 1) + 1, _MOST_DRAWS)

    def held(self, needs: Needs) -> Ints:
        """What it has, and must compute before its next output."""
        return needs.computed - needs.shared

    def growth(self, needs: Needs) -> Ints:
        """By what is drawn for it."""
        outputs, new = needs.outputs, needs.outputs == 0
        most = outputs + needs.left + needs.prompt
        lengths = np.empty((needs.draws, len(outputs)), np.int64)
        lengths[:, ~new] = self._lengths.of_running(outputs[~new], most[~new], needs.draws)
        if new.any():
            lengths[:, new] = self._lengths.of_new(most[new], needs.draws)
        # The last token is never written, and the needed positions bring one.
        growth: Ints = np.maximum(lengths - outputs - needs.prompt, 0)
        return growth

    def end(self, needs: Needs, growth: Ints) -> Ints:
        """Once it has grown by that."""
        del needs
        return growth

    def ended(self, sequence: Sequence) -> None:
        """Remember its length; those that a client has given up say nothing about lengths."""
        if sequence.ended_as in (EndState.STOPPED, EndState.LENGTH) and sequence.outputs:
            self._lengths.add(len(sequence.outputs))


class Lengths:
    """Output lengths that ended lately, and draws from them.

    Args:
        longest: the most new tokens that a request can ask for; the first lengths.
        seed: of the draws.
    """

    def __init__(self, longest: int, seed: int) -> None:
        self._ended = deque([longest] * _AT_FIRST, HISTORY)
        self._chance = np.random.default_rng(seed)
        self._sorted: Ints | None = None

    def add(self, length: int) -> None:
        """A sequence has ended with so many outputs."""
        self._ended.append(length)
        self._sorted = None

    def of_new(self, most: int | Ints, draws: int) -> Ints:
        """[draws] or [draws, n] lengths of some that have no output yet, each at most `most`."""
        known = self._known()
        drawn = self._chance.integers(len(known), size=(draws, *np.shape(most)))
        lengths: Ints = np.minimum(known[drawn], most)
        return lengths

    def of_running(self, outputs: Ints, most: Ints, draws: int) -> Ints:
        """[draws, n] lengths of those that have some outputs.

        Each is uniform on the piecewise linear line through what there is, the known lengths above
        it, and the most that there can be.

        Args:
            outputs: [n] that each has.
            most: [n] that each can have.
            draws: how many of each.
        """
        known = self._known()
        first = known.searchsorted(outputs, side="right")
        above = len(known) - first
        # The line has above + 1 pieces; point 0 is what there is, point above + 1 the most.
        place = self._chance.random((draws, len(outputs))) * (above + 1)
        piece = place.astype(np.int64)
        low = np.where(piece == 0, outputs, known[np.maximum(first + piece - 1, 0)])
        last = len(known) - 1
        high = np.where(piece == above, most, known[np.minimum(first + piece, last)])
        low, high = np.minimum(low, most), np.minimum(high, most)
        drawn: Ints = low + ((place - piece) * (high - low)).astype(np.int64)
        return drawn

    def _known(self) -> Ints:
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._ended, np.int64))
        return self._sorted
