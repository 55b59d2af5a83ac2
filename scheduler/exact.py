"""`exact` admission: every request gets its bound, so none ever runs out of memory.

A ledger's entries are (tokens, growth, end): what is held, by how much it grows, until when. The
need of the first k of some candidates is the peak of the entries up to the k-th one's last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing

import numpy as np

from tokenpod.scheduler.peak import FOREVER, peak_tokens
from tokenpod.scheduler.radix import Node, new_ledger_number
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.table import Ints, Table, places_of
from tokenpod.scheduler.work import Limits

#: Steps by which a sequence may outlast its count: the one in flight when its end is seen.
_SLACK = 1

#: Steps that beams take for a token at most: overlapped, they are in every other one.
_STEPS_OF_BEAMS = 2


class Exact:
    """Admits a request if all sequences together can never need more slots than there are.

    Args:
        table: the sequences' columns.
        limits: the engine's resources.
        quantum: prompt tokens that every step with prompts is sure to compute.
    """

    def __init__(self, table: Table, limits: Limits, quantum: int) -> None:
        self._table = table
        self._slots = limits.slots
        self._quantum = quantum

    def ledger(self) -> LazyForecast:
        """See `Admission`."""
        return LazyForecast(self._table, self._slots, self._quantum)

    def victims(self, running: Listing[Sequence]) -> Listing[Sequence]:
        """See `Admission`: slots don't run out, so no sequence is preempted."""
        del running
        return ()

    def ended(self, sequence: Sequence) -> None:
        """See `Admission`: bounds are all that counts here."""


class LazyForecast:
    """The ledger of exact admission: a forecast where not even all bounds fit together.

    They often do, and are summed up sooner than the forecast is made. It never needs more.

    Args:
        table: the sequences' columns.
        slots: of the KV pool.
        quantum: prompt tokens that every step with prompts is sure to compute.
    """

    def __init__(self, table: Table, slots: int, quantum: int) -> None:
        self._table = table
        self._slots = slots
        self._forecast = Forecast(table, slots, quantum)
        #: What was added and the forecast does not know yet, and its mark after each that it does.
        self._added: deque[Callable[[Forecast], None]] = deque()
        self._marks = [0]
        #: After each: what all need together at their bounds.
        self._after = [0]

    def decoding(self, sequences: Listing[Sequence], at: Ints) -> None:
        """See `Ledger`."""
        bounds = int(self._table.bound[at].sum())
        self._note(bounds, lambda forecast: forecast.decoding(sequences, at))

    def searching(self, sequences: Listing[Sequence]) -> None:
        """See `Ledger`."""
        self._add(sequences, lambda forecast: forecast.searching(sequences))

    def leaving(self, sequences: Listing[Sequence]) -> None:
        """See `Ledger`."""
        self._add(sequences, lambda forecast: forecast.leaving(sequences))

    def reserved(self, sequence: Sequence) -> None:
        """See `Ledger`."""
        self._add((sequence,), lambda forecast: forecast.reserved(sequence))

    def prefilling(self, sequence: Sequence) -> None:
        """See `Ledger`."""
        self._add((sequence,), lambda forecast: forecast.prefilling(sequence))

    def siblings(self, first: Sequence, sequences: Iterable[Sequence]) -> None:
        """See `Ledger`."""
        several = [*sequences]
        self._add(several, lambda forecast: forecast.siblings(first, several))

    @property
    def mark(self) -> int:
        """See `Ledger`: how often something was added."""
        return len(self._after) - 1

    def fits(self, mark: int) -> bool:
        """See `Ledger`."""
        return self._after[mark] <= self._slots or self.peak(mark) <= self._slots

    def peak(self, mark: int = -1) -> int:
        """The most slots that will ever be taken at once by what was added until `mark`."""
        while self._added:
            self._added.popleft()(self._forecast)
            self._marks.append(self._forecast.mark)
        return self._forecast.peak(self._marks[mark])

    def _add(self, sequences: Listing[Sequence], add: Callable[[Forecast], None]) -> None:
        if len(sequences) == 1:
            bounds = sequences[0].bound
        else:
            bounds = int(self._table.bound[places_of(sequences)].sum())
        self._note(bounds, add)

    def _note(self, bounds: int, add: Callable[[Forecast], None]) -> None:
        self._after.append(self._after[-1] + bounds)
        self._added.append(add)


class Forecast:
    """Knows the most slots that will ever be taken.

    Args:
        table: the sequences' columns.
        slots: of the KV pool.
        quantum: prompt tokens that every step with prompts is sure to compute.
    """

    def __init__(self, table: Table, slots: int, quantum: int) -> None:
        self._table = table
        self._slots = slots
        self._quantum = quantum
        #: [3, n] of those that were added many at a time, and the entries that came singly.
        self._columns: list[Ints] = []
        self._tokens: list[int] = []
        self._growth: list[int] = []
        self._ends: list[int] = []
        self._number = new_ledger_number()
        #: The step by which each sequence has ended whose samples may wait for it.
        self._ends_at: dict[int, int] = {}
        self._prompt_tokens = 0

    def decoding(self, sequences: Listing[Sequence], at: Ints) -> None:
        """See `Ledger`."""
        table = self._table
        growth, drafted = table.bound[at] - table.computed[at], table.drafted[at]
        # Of drafts in flight all may be wrong; and meanwhile a step may go without their row.
        ends = growth + drafted + (drafted > 0) + _SLACK
        tokens = table.computed[at] - table.shared[at]
        if table.constrained:
            # Those that may miss steps do not run in lockstep: all of their bound counts, always.
            uneven = table.masked[at] > 0
            tokens += growth * uneven
            ends[uneven] = FOREVER
            growth = growth * ~uneven
        self._many(sequences, tokens, growth, ends)

    def searching(self, sequences: Listing[Sequence]) -> None:
        """See `Ledger`."""
        table, at = self._table, places_of(sequences)
        growth = table.bound[at] - table.computed[at]
        ends = _STEPS_OF_BEAMS * growth + 1 + _SLACK
        self._many(sequences, table.computed[at] - table.shared[at], growth, ends)

    def leaving(self, sequences: Listing[Sequence]) -> None:
        """See `Ledger`."""
        table, at = self._table, places_of(sequences)
        zeros = np.zeros(len(at), np.int64)
        ends = zeros + 1 + _SLACK
        ends[[sequence.hosted.flying for sequence in sequences]] = FOREVER
        self._many(sequences, table.computed[at] - table.shared[at], zeros, ends)

    def reserved(self, sequence: Sequence) -> None:
        """See `Ledger`: it may stay for ever."""
        self._add(sequence.bound - sequence.shared, 0, FOREVER)
        if sequence.node is not None:
            self._lock(sequence.node, FOREVER)

    def prefilling(self, sequence: Sequence) -> None:
        """See `Ledger`."""
        self._behind_all(sequence, len(sequence.inputs) - sequence.computed)

    def siblings(self, first: Sequence, sequences: Iterable[Sequence]) -> None:
        """See `Ledger`.

        Each computes its last token again, after those that were added before. The prompt is there
        once, and stays until the last of all samples is over.
        """
        last = 0
        for sequence in sequences:
            last = self._behind_all(sequence, 1, late=first.hosted.late)
        prompt = first.needed - first.shared
        self._add(-prompt, 0, self._ends_at[first.id])
        self._add(prompt, 0, last)
        if first.node is not None:
            self._lock(first.node, last)

    @property
    def mark(self) -> int:
        """See `Ledger`: entries that came singly."""
        return len(self._tokens)

    def fits(self, mark: int) -> bool:
        """See `Ledger`."""
        return self.peak(mark) <= self._slots

    def peak(self, mark: int | None = None) -> int:
        """The most slots that will ever be taken at once by what was added until `mark`."""
        singly = np.array((self._tokens, self._growth, self._ends), np.int64)[:, :mark]
        return peak_tokens(*np.concatenate((*self._columns, singly), axis=1))

    # -- parts ---------------------------------------------------------------------------------

    def _many(self, sequences: Listing[Sequence], tokens: Ints, growth: Ints, ends: Ints) -> None:
        self._columns.append(np.stack((tokens, growth, ends)))
        #: Nodes that one of them has for itself, mostly: their tokens, and until when.
        alone: list[int] = []
        until: list[int] = []
        for sequence, end in zip(sequences, ends.tolist(), strict=True):
            self._ends_at[sequence.id] = end
            node = sequence.node
            while node is not None and node.parent is not None and node.seen_by != self._number:
                alone.append(len(node.tokens))
                until.append(end)
                node.seen_by, node.kept_until = self._number, end
                node = node.parent
            if node is not None:
                self._lock(node, end)
        self._columns.append(np.array((alone, [0] * len(alone), until), np.int64))

    def _behind_all(self, sequence: Sequence, need: int, *, late: bool = False) -> int:
        """Add one with `need` tokens to compute; the step by which it has ended.

        `late`: what it waits for may come at any time, as do copies from the host's memory.
        """
        self._prompt_tokens += need
        # A sibling waits until the prompt is settled, and rounds up to whole steps once more.
        delay = -(-self._prompt_tokens // self._quantum) + 3
        # The last of these steps brings the first new token; the last one is not written.
        growth = sequence.bound - len(sequence.inputs)
        steps = growth if sequence.group is None else _STEPS_OF_BEAMS * growth + 1
        end = delay + steps + _SLACK
        if sequence.constrained or late or sequence.hosted.late:
            need, growth, end = need + growth, 0, FOREVER
        self._add(sequence.private + need, growth, end)
        self._ends_at[sequence.id] = end
        if sequence.node is not None:
            self._lock(sequence.node, end)
        return end

    def _add(self, tokens: int, growth: int, end: int) -> None:
        self._tokens.append(tokens)
        self._growth.append(growth)
        self._ends.append(end)

    def _lock(self, node: Node, end: int) -> None:
        """Count the path to `node` until `end`."""
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
