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
from collections.abc import Iterable
from collections.abc import Sequence as Listing

import numpy as np

from tokenpod.scheduler.admission import last_to_arrive
from tokenpod.scheduler.peak import FOREVER, peak_tokens
from tokenpod.scheduler.radix import Node, new_ledger_number
from tokenpod.scheduler.sequence import EndState, Sequence
from tokenpod.scheduler.table import Ints, Table
from tokenpod.scheduler.tally import Company
from tokenpod.scheduler.work import Limits

#: Lengths that are remembered; how many of them the limit on new tokens stands for at first.
HISTORY = 200
_AT_FIRST = 100
#: The part of the pool that a request may fill together with others.
CAPACITY = 0.95
#: Draws that must all fit: the fewer run, the more one draw can mislead.
_MOST_DRAWS = 5
_DRAWS_FOR = 200


class PastFuture:
    """Admits a request if the drawn future fits.

    Args:
        table: the sequences' columns.
        limits: the engine's resources.
        quantum: prompt tokens that every step with prompts is sure to compute.
        seed: of the draws, which are nobody else's.
    """

    def __init__(self, table: Table, limits: Limits, quantum: int, seed: int = 0) -> None:
        del quantum
        self._table = table
        self._slots = limits.slots
        self._lengths = Lengths(limits.max_positions - 1, seed)

    def ledger(self) -> Drawn:
        """See `Admission`."""
        return Drawn(self._table, self._slots, self._lengths)

    def victims(self, running: Listing[Sequence]) -> Listing[Sequence]:
        """See `Admission`."""
        return last_to_arrive(running)

    def ended(self, sequence: Sequence) -> None:
        """See `Admission`: those that a client has given up say nothing about lengths."""
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

    def of_new(self, most: int, draws: int) -> Ints:
        """[draws] lengths of one that has no output yet, each at most `most`."""
        known = self._known()
        lengths: Ints = np.minimum(known[self._chance.integers(len(known), size=draws)], most)
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


class Drawn:
    """The ledger: entries of (tokens, growth, end), growth and end by each of some draws.

    Args:
        table: the sequences' columns.
        slots: of the KV pool.
        lengths: that are drawn from.
    """

    def __init__(self, table: Table, slots: int, lengths: Lengths) -> None:
        self._table = table
        self._slots = slots
        self._lengths = lengths
        self._number = new_ledger_number()
        self._company = Company()
        self._draws = _MOST_DRAWS
        #: [n], [draws, n] and [draws, n] of those that were added many at a time.
        self._columns: list[tuple[Ints, Ints, Ints]] = []
        #: The entries that came singly; of each draw its growth and its end.
        self._tokens: list[int] = []
        self._growth: list[list[int]] = []
        self._ends: list[list[int]] = []
        #: Slots that may be taken, after each of these entries.
        self._most: list[int] = []
        #: Until when nodes were counted, by the index that is their `kept_until`.
        self._kept: list[list[int]] = []
        #: By the id of a sequence whose samples may wait for it.
        self._ends_at: dict[int, list[int]] = {}

    def decoding(self, sequences: Listing[Sequence], at: Ints) -> None:
        """See `Ledger`; to be called first, since the number of draws follows from it."""
        table = self._table
        self._draws = min(_DRAWS_FOR // max(len(at), 1) + 1, _MOST_DRAWS)
        outputs, left = table.launched[at], table.bound[at] - table.computed[at]
        growth = self._lengths.of_running(outputs, outputs + left, self._draws) - outputs
        self._columns.append((table.computed[at] - table.shared[at], growth, growth))
        self._company.note(sequences)
        #: Nodes that one of them has for itself, mostly: their tokens, and whose end is theirs.
        tokens: list[int] = []
        whose: list[int] = []
        for place, (sequence, ends) in enumerate(zip(sequences, growth.T.tolist(), strict=True)):
            self._ends_at[sequence.id] = ends
            node = sequence.node
            while node is not None and node.parent is not None and node.seen_by != self._number:
                tokens.append(len(node.tokens))
                whose.append(place)
                node.seen_by, node.kept_until = self._number, len(self._kept)
                self._kept.append(ends)
                node = node.parent
            self._lock(node, ends)
        still = np.zeros((self._draws, len(whose)), np.int64)
        self._columns.append((np.array(tokens, np.int64), still, growth[:, whose]))

    def leaving(self, sequences: Listing[Sequence]) -> None:
        """See `Ledger`."""
        for sequence in sequences:
            self._until(sequence, sequence.computed - sequence.shared, 1)

    def reserved(self, sequence: Sequence) -> None:
        """See `Ledger`: it may stay for ever."""
        self._until(sequence, sequence.bound - sequence.shared, FOREVER)

    def searching(self, sequences: Listing[Sequence]) -> None:
        """See `Ledger`: its bound is all that is sure."""
        self._company.note(sequences)
        for sequence in sequences:
            self.reserved(sequence)

    def prefilling(self, sequence: Sequence) -> None:
        """See `Ledger`."""
        if sequence.group is not None:
            self.searching([sequence])
            return
        self._grow(sequence, len(sequence.inputs) - sequence.shared)

    def siblings(self, first: Sequence, sequences: Iterable[Sequence]) -> None:
        """See `Ledger`. The prompt is there once, until the last sample is over."""
        last = before = self._ends_at[first.id]
        for sequence in sequences:
            if sequence.group is None:
                ends = self._grow(sequence, 1)
            else:
                ends = self._until(sequence, sequence.bound - sequence.needed + 1, FOREVER)
            last = [*map(max, last, ends)]
        prompt = first.needed - first.shared
        self._add(-prompt, self._zeros, before)
        self._add(prompt, self._zeros, last)
        self._lock(first.node, last)

    @property
    def mark(self) -> int:
        """See `Ledger`: entries that came singly."""
        return len(self._tokens)

    def fits(self, mark: int) -> bool:
        """See `Ledger`."""
        return self.peak(mark) <= (self._most[mark - 1] if mark else self._capacity)

    def peak(self, mark: int | None = None) -> int:
        """The highest need of all draws, of what was added until `mark`."""
        columns = [*self._columns]
        if self._tokens[:mark]:
            growth, ends = (
                np.array(each[:mark], np.int64).T for each in (self._growth, self._ends)
            )
            columns.append((np.array(self._tokens[:mark], np.int64), growth, ends))
        if not columns:
            return 0
        tokens = np.concatenate([each[0] for each in columns])
        growth = np.concatenate([each[1] for each in columns], axis=1)
        ends = np.concatenate([each[2] for each in columns], axis=1)
        return max(peak_tokens(tokens, *drawn) for drawn in zip(growth, ends, strict=True))

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _zeros(self) -> list[int]:
        return [0] * self._draws

    @property
    def _capacity(self) -> int:
        return int(CAPACITY * self._slots) if self._company.several else self._slots

    def _grow(self, sequence: Sequence, held: int) -> list[int]:
        """Add one that grows by what is drawn for it; when it has ended."""
        outputs = len(sequence.outputs)
        most = sequence.request.stopping.max_new_tokens
        if outputs:
            so_far, at_most = np.array([outputs]), np.array([most])
            lengths = self._lengths.of_running(so_far, at_most, self._draws)[:, 0]
        else:
            lengths = self._lengths.of_new(most, self._draws)
        # The last token is never written, and the needed positions bring one.
        ends: list[int] = np.maximum(lengths - outputs - 1, 0).tolist()
        self._company.note((sequence,))
        self._add(held, ends, ends)
        self._ends_at[sequence.id] = ends
        self._lock(sequence.node, ends)
        return ends

    def _until(self, sequence: Sequence, held: int, end: int) -> list[int]:
        """Add one that holds so much to the end; when it has ended."""
        ends = [end] * self._draws
        self._add(held, self._zeros, ends)
        self._ends_at[sequence.id] = ends
        self._lock(sequence.node, ends)
        return ends

    def _add(self, tokens: int, growth: list[int], ends: list[int]) -> None:
        self._tokens.append(tokens)
        self._growth.append(growth)
        self._ends.append(ends)
        self._most.append(self._capacity)

    def _lock(self, node: Node | None, ends: list[int]) -> None:
        """Count the path to a node until these ends."""
        while node is not None and node.parent is not None:
            if node.seen_by == self._number:
                before = self._kept[node.kept_until]
                ends = [*map(max, before, ends)]
                if ends == before:
                    # Then those above it are kept as long too.
                    return
                self._add(-len(node.tokens), self._zeros, before)
            self._add(len(node.tokens), self._zeros, ends)
            node.seen_by, node.kept_until = self._number, len(self._kept)
            self._kept.append(ends)
            node = node.parent
