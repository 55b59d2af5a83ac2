"""What sequences will need of the KV pool: now, at the peak, and until when.

An entry is (held, growth, end): slots that a sequence holds, by how many it grows, one per step,
and the step by which they are free again. An admission policy says these of each sequence, in
columns; the ledger adds what no policy decides: prefixes in the tree count once, until the last
sequence ends that locks them, and the prompt of several samples until the last sample ends.

Entries are only added. Adding one never lets more fit, so the first request that does not fit can
be found by bisection. What is cheap comes first:

    the bounds of all sequences fit together     their sum is kept
    nothing that was added grows                 the peak is now: what is held, and what is locked
                                                 in the tree, of which the tree keeps the sum
    else                                         the entries, and the peak of `peak.peak_tokens`
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenpod.core.requests import Request
from tokenpod.scheduler.policies.admission_policy import SLACK, Admission, Needs
from tokenpod.scheduler.policies.peak import FOREVER, peak_tokens
from tokenpod.scheduler.pool.radix import Node, RadixTree, new_ledger_number, path
from tokenpod.scheduler.sequences.sequence import Owner, Sequence
from tokenpod.scheduler.sequences.table import Ints, places_of

#: Steps that beams take for a token at most: overlapped, they are in every other one.
_STEPS_OF_BEAMS = 2
#: Until a sample begins to grow behind the prompt of another: that prompt must have settled, and
#: each of the two rounds up to whole steps.
_ROUNDING = 3


class _Kind(IntEnum):
    """How a sequence goes on."""

    DECODING = 0
    #: It is a beam of a search whose prompt has been computed.
    SEARCHING = 1
    #: It has ended or was preempted: nothing comes but the end of the step in flight, or (STAYING)
    #: of copies, of which nobody knows when they arrive.
    LEAVING = 2
    STAYING = 3
    #: All of its bound is reserved, for ever.
    RESERVED = 4
    #: It computes its needed positions, or (SAMPLE) the last one behind another's prompt.
    PROMPT = 5
    SAMPLE = 6


class _Added(NamedTuple):
    """Sequences that were added together."""

    kind: _Kind
    sequences: Listing[Sequence]
    #: [n] where they are in the table, if that was given.
    places: Ints | None
    #: Of samples: the one whose prompt they wait for.
    first: Sequence | None = None


class _Shared:
    """Entries of what several sequences have in common."""

    __slots__ = ("_marks", "_tokens", "_until")

    def __init__(self) -> None:
        self._marks: list[int] = []
        self._tokens: list[int] = []
        self._until: list[list[int]] = []

    def add(self, mark: int, tokens: int, until: list[int]) -> None:
        """So many slots are held, and by each draw until then."""
        self._marks.append(mark)
        self._tokens.append(tokens)
        self._until.append(until)

    def entries(self, draws: int) -> Ints:
        """[2 + 2 * draws, n]: mark, held, and of each draw growth, then end."""
        n = len(self._marks)
        entries = np.zeros((2 + 2 * draws, n), np.int64)
        entries[0], entries[1] = self._marks, self._tokens
        until = np.fromiter(chain.from_iterable(self._until), np.int64, draws * n)
        entries[2 + draws :] = until.reshape(n, draws).T
        return entries


class Ledger:
    """What all admitted sequences need, and then, in the queue's order, some that wait.

    Args:
        policy: says what each sequence holds, by how much it grows, and until when.
        tree: of prefixes. Whoever locks nodes of it is added here, or `apart`.
    """

    def __init__(self, policy: Admission, tree: RadixTree) -> None:
        self._policy = policy
        self._tree = tree
        self._table = policy.table
        self._number = new_ledger_number()
        self._added: list[_Added] = []
        #: After each: what all need together at their bounds, what they hold without what is in the
        #: tree (of those that have been counted), and what is locked there.
        self._bounds, self._held, self._locked = [0], [0], [0]
        #: From which mark on sequences belong to several of the batcher's requests, and grow.
        self._several_from: int | None = None
        self._grows_from: int | None = None
        self._request: Request | None = None
        self._apart: Sequence | None = None
        self._draws = 0
        #: What was counted together: the first mark, what was added with it and the next ones, and
        #: of each sequence its mark [n], held [n], growth and end [draws, n].
        self._counted: list[tuple[int, list[_Added], tuple[Ints, Ints, Ints, Ints]]] = []
        #: The entries that have been made of it, [2 + 2 * draws, n] each: of the sequences, and of
        #: what they have in common, by turns.
        self._made: list[Ints] = []
        #: Of each draw: the step by which a sequence has ended, by its id.
        self._ends: dict[int, list[int]] = {}
        self._prompt_tokens = 0

    # -- adding --------------------------------------------------------------------------------

    def apart(self, probe: Sequence) -> None:
        """Leave out what only this one uses of the tree: it has slots of its own.

        Called before whatever `fits` is asked of.
        """
        self._apart = probe

    def decoding(self, sequences: Listing[Sequence], at: Ints) -> None:
        """Add sequences that take one slot per step from now on. Called once, before the others.

        `at`: [n] int64, their places in the table.
        """
        self._draws = self._policy.draws(len(sequences))
        self._add(_Kind.DECODING, sequences, at)

    def searching(self, sequences: Listing[Sequence]) -> None:
        """Add beams, which take one slot per step or less often and are never preempted."""
        self._add(_Kind.SEARCHING, sequences)

    def leaving(self, sequences: Listing[Sequence]) -> None:
        """Add sequences whose slots will be free once what is in flight has settled."""
        for sequence in sequences:
            self._add(_Kind.STAYING if sequence.fetching else _Kind.LEAVING, [sequence])

    def reserved(self, sequence: Sequence) -> None:
        """Add one whose whole bound must stay reserved: a router decides when it runs."""
        self._add(_Kind.RESERVED, [sequence])

    def prefilling(self, sequence: Sequence) -> None:
        """Add one that is computed after those that were added before."""
        self._add(_Kind.PROMPT, [sequence])

    def siblings(self, first: Sequence, sequences: Listing[Sequence]) -> None:
        """Add samples that wait for the prompt of `first`, which was added before."""
        if sequences:
            self._add(_Kind.SAMPLE, sequences, first=first)

    def joining(self, samples: Listing[Sequence]) -> None:
        """Add a request that has begun, or may: its cached prefix is locked."""
        first, *others = samples
        if first.owner is Owner.ROUTER:
            self.reserved(first)
        else:
            self.prefilling(first)
            self.siblings(first, others)

    def _add(
        self,
        kind: _Kind,
        sequences: Listing[Sequence],
        at: Ints | None = None,
        first: Sequence | None = None,
    ) -> None:
        self._added.append(_Added(kind, sequences, at, first))
        if at is None:
            bounds = sum([sequence.bound for sequence in sequences])
        else:
            bounds = int(self._table.bound[at].sum())
        self._bounds.append(self._bounds[-1] + bounds)
        locked = self._tree.locked_tokens
        if self._apart is not None and self._apart.node is not None:
            alone = (node for node in path(self._apart.node) if node.locks == 1)
            locked -= sum(len(node.tokens) for node in alone)
        self._locked.append(locked)
        if kind not in _OF_NO_COMPANY and self._several_from is None:
            self._note(sequences)

    def _note(self, sequences: Listing[Sequence]) -> None:
        for sequence in sequences:
            self._request = self._request or sequence.request
            if sequence.request is not self._request:
                self._several_from = self.mark
                return

    # -- asking --------------------------------------------------------------------------------

    @property
    def mark(self) -> int:
        """Names what has been added so far."""
        return len(self._added)

    def fits(self, mark: int) -> bool:
        """Whether the policy lets everything join that was added until `mark`.

        Its margin stays free where several requests run: whatever fits into the pool by itself is
        admitted by itself, or it would wait for ever.
        """
        most = self._policy.slots
        if self._several_from is not None and mark >= self._several_from:
            most -= self._policy.margin
        return self._bounds[mark] <= most or self.peak(mark) <= most

    def peak(self, mark: int | None = None) -> int:
        """The most slots that will ever be taken at once by what was added until `mark`."""
        mark = self.mark if mark is None else mark
        self._count()
        if self._grows_from is None or mark < self._grows_from:
            return self._held[mark] + self._locked[mark]
        entries = self._entries()
        entries = entries[:, entries[0] <= mark]
        _, held, *drawn = entries
        futures = zip(drawn[: self._draws], drawn[self._draws :], strict=True)
        return max(peak_tokens(held, growth, end) for growth, end in futures)

    # -- entries -------------------------------------------------------------------------------

    def _count(self) -> None:
        """Count what has been added since the last call."""
        first = 1 + sum(len(added) for _, added, _ in self._counted)
        added = self._added[first - 1 :]
        if not added:
            return
        self._draws = self._draws or self._policy.draws(0)
        counts = [len(each.sequences) for each in added]
        marks = np.arange(first, first + len(added)).repeat(counts)
        held, growth, ends = self._needs(added, counts)
        self._counted.append((first, added, (marks, held, growth, ends)))
        if self._grows_from is None:
            grows = np.flatnonzero(growth.any(axis=0))
            self._grows_from = int(marks[grows[0]]) if len(grows) else None
        if self._grows_from is None or self._grows_from > first:
            sums = np.concatenate((_ZERO, held.cumsum())) + self._held[-1]
            self._held += sums[np.cumsum(counts)].tolist()

    def _entries(self) -> Ints:
        """[2 + 2 * draws, n] of all that has been counted."""
        for first, added, own in self._counted[len(self._made) // 2 :]:
            shared = self._shared(first, added, own[-1])
            self._made += np.vstack(own), shared.entries(self._draws)
        return np.concatenate(self._made, axis=1)

    def _needs(self, added: list[_Added], counts: list[int]) -> tuple[Ints, Ints, Ints]:
        """[n] held, [draws, n] growth and [draws, n] end of all these sequences, in order."""
        table = self._table
        at = np.concatenate(
            [places_of(each.sequences) if each.places is None else each.places for each in added]
        )
        kinds = np.array([each.kind for each in added], np.int64).repeat(counts)
        prompt, sample = kinds >= _Kind.PROMPT, kinds == _Kind.SAMPLE
        shared, needed = table.shared[at], table.needed[at]
        shared[sample] = needed[sample] - 1
        computed = np.where(prompt, needed, table.computed[at])
        to_compute = np.where(sample, 1, needed - table.computed[at]) * prompt
        # A piece that ends early may leave a step with less than is counted on.
        cuts = (table.branch[at] > table.computed[at]) * prompt
        pieces = to_compute + cuts * self._policy.quantum
        so_far = self._prompt_tokens + pieces.cumsum()
        self._prompt_tokens += int(pieces.sum())
        beams, late = self._beams_and_late(added, kinds)
        needs = Needs(
            computed=computed,
            shared=shared,
            bound=table.bound[at],
            outputs=table.launched[at],
            prompt=prompt.astype(np.int64),
            delay=np.where(prompt, -(-so_far // self._policy.quantum) + _ROUNDING, 0),
            pace=np.where(beams, _STEPS_OF_BEAMS, 1),
            drafted=table.drafted[at],
            uneven=(table.masked[at] > 0) | late,
            draws=self._draws,
        )
        held, growth = self._policy.held(needs), self._policy.growth(needs)
        ends = self._policy.end(needs, growth)
        growth, ends = (np.broadcast_to(each, (self._draws, len(at))) for each in (growth, ends))
        going = kinds <= _Kind.RESERVED
        fixed = going & (kinds >= _Kind.LEAVING)
        if self._policy.preempts:
            # Beams are never preempted.
            fixed |= beams
        if fixed.any():
            whole = fixed & ((kinds == _Kind.RESERVED) | beams)
            held = np.where(whole, needs.bound - shared, np.where(fixed, computed - shared, held))
            growth = np.where(fixed, 0, growth)
            until = np.where(kinds == _Kind.LEAVING, 1 + SLACK, FOREVER)
            ends = np.where(fixed, until, ends)
        return held, growth, ends

    @staticmethod
    def _beams_and_late(
        added: list[_Added], kinds: Ints
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """[n] which are beams, and which wait for copies from the host's memory."""
        beams = kinds == _Kind.SEARCHING
        late = np.zeros(len(kinds), np.bool_)
        at = 0
        for kind, sequences, _, first in added:
            if kind >= _Kind.PROMPT:
                one = first or sequences[0]
                beams[at : at + len(sequences)] = one.group is not None
                late[at : at + len(sequences)] = one.late
            at += len(sequences)
        return beams, late

    def _shared(self, begin: int, added: list[_Added], ends: Ints) -> _Shared:
        """What sequences have in common: prefixes in the tree, and prompts of samples."""
        found, until, number = _Shared(), iter(ends.T.tolist()), self._number
        for mark, (_, sequences, _, first) in enumerate(added, begin):
            for sequence, end in zip(sequences, until):  # noqa: B905 - each takes its own
                self._ends[sequence.id] = end
                node = sequence.node
                # Mostly it has the last node for itself.
                while node is not None and node.parent is not None and node.seen_by != number:
                    found.add(mark, len(node.tokens), end)
                    node.seen_by, node.kept_until = number, end
                    node = node.parent
                if node is not None and node.parent is not None:
                    self._lock(node, end, mark, found)
            if first is not None:
                forever = [FOREVER] * self._draws
                before = self._ends.get(first.id, forever)
                prompt = first.needed - first.shared
                waiting = (self._ends[sequence.id] for sequence in sequences)
                last = [max(each) for each in zip(before, *waiting, strict=True)]
                found.add(mark, -prompt, before)
                found.add(mark, prompt, last)
                if first.node is not None:
                    self._lock(first.node, last, mark, found)
        return found

    def _lock(self, node: Node, end: list[int], mark: int, found: _Shared) -> None:
        """Count the path to `node` until `end`."""
        while node.parent is not None:
            if node.seen_by == self._number:
                before = node.kept_until
                end = [*map(max, before, end)]
                if end == before:
                    # Then those above it are kept as long too.
                    return
                found.add(mark, -len(node.tokens), before)
            found.add(mark, len(node.tokens), end)
            node.seen_by, node.kept_until = self._number, end
            node = node.parent


_ZERO: Ints = np.zeros(1, np.int64)
#: Those that have ended, and a router's, are nobody's company.
_OF_NO_COMPANY = (_Kind.LEAVING, _Kind.STAYING, _Kind.RESERVED)
