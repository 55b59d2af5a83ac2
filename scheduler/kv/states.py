"""Where prompts can begin in models whose rows keep states: behind snapshots of them.

Keys and values alone are no beginning there: a sequence goes on behind the longest cached prefix
that has a snapshot, too. Snapshots are made

    at the end of a prompt                       for who asks it again, or goes on from its answer
    at the end of what was generated             the same
    where a prompt leaves what others have had   for whoever leaves it there next: a piece of the
                                                 prompt is cut there
    along a prompt, at the end of a step's piece, every `stride` tokens

if they are at least `least` tokens behind the one before. A row's states can be copied between two
steps, so a snapshot is made with the plan of the step after, before anything else; rows begin with
theirs behind that. A memory that has been through a prompt's last token finds what follows it again
(`GatedDelta`): one snapshot at the end serves both who asks the same and who goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenpod.scheduler.pool.radix import Node, RadixTree, path
from tokenpod.scheduler.pool.snapshots import Snapshot, SnapshotPool
from tokenpod.scheduler.sequences.sequence import Owner, Sequence
from tokenpod.scheduler.sequences.work import SnapshotLimits

#: Copies of states, from one to another.
Copies = list[tuple[int, int]]


class States:
    """The bookkeeping of snapshots.

    Args:
        tree: holds them. It drops those of what it evicts.
        limits: of snapshots.
    """

    def __init__(self, tree: RadixTree, limits: SnapshotLimits) -> None:
        self._tree, self._limits = tree, limits
        self._pool = tree.snapshots = SnapshotPool(limits.total, limits.first)
        #: By snapshot, the row whose states it gets: with the next plan, and with the one after.
        self._due: dict[int, int] = {}
        self._coming: dict[int, int] = {}

    def begin(self, sequence: Sequence, node: Node, length: int) -> tuple[Node, int]:
        """Where a sequence can begin, of whose inputs but the last the tree knows `length`.

        Returns a node on the path to `node`, and the length of the path to it. The snapshot behind
        it is pinned until `begun` or `forget`.
        """
        inputs, at = sequence.inputs, length
        last = node.children.get(int(inputs[-1])) if length == len(inputs) - 1 else None
        snapshot, found = None, node
        if last is not None and len(last.tokens) == 1 and last.state is not None:
            snapshot = last.state
        else:
            for found in path(node):
                if found.state is not None:
                    snapshot = found.state
                    break
                at -= len(found.tokens)
            else:
                found = self._tree.root(sequence.request.salt)
            branches = length < len(inputs) - 1 and length - at >= self._limits.least
            sequence.branch = length if branches else 0
        if snapshot is not None:
            self._pool.pin(snapshot)
        sequence.origin = snapshot
        return found, at

    def known(self, sequence: Sequence) -> int:
        """Behind how many inputs a sequence could begin."""
        known, most = 0, len(sequence.inputs) - 1
        for node, end in self._tree.ends(sequence.inputs, sequence.request.salt):
            if node.state is not None:
                known = min(end, most)
        return known

    def computed(self, sequence: Sequence) -> None:
        """A step computes a piece of a sequence's prompt: what it leaves is kept, if it is due."""
        position = sequence.computed
        stride = position - _last(sequence) >= self._limits.stride
        if stride or position == sequence.branch or not sequence.prefilling:
            self._save(sequence, self._coming)

    def ended(self, sequence: Sequence) -> None:
        """A sequence goes that has no step in flight: what it leaves is kept."""
        if sequence.row >= 0 and sequence.computed <= sequence.length and not sequence.behind:
            self._save(sequence, self._due)

    def publish(self, sequence: Sequence) -> None:
        """Let the tree hold the sequence's snapshots, as far as it has its tokens."""
        if not sequence.keep:
            return
        left = []
        for snapshot in sequence.snapshots:
            tokens = sequence.all_tokens(snapshot.position)
            node, known = self._tree.match(tokens, sequence.request.salt)
            if known < snapshot.position:
                left.append(snapshot)
            elif node.state is None:
                self._make_way(node)
                self._pool.hold(snapshot, node)
            else:
                self._drop(snapshot)
        sequence.snapshots = left

    def forget(self, sequence: Sequence) -> None:
        """Give back what a sequence has."""
        for snapshot in sequence.snapshots:
            self._drop(snapshot)
        sequence.snapshots = []
        self._unpin(sequence)
        sequence.branch = sequence.snapped = 0

    def take(self, fresh: Iterable[Sequence]) -> tuple[Copies, Copies]:
        """The copies of the next plan: from rows to snapshots, then from snapshots to new rows."""
        saves = [(row, slot) for slot, row in self._due.items()]
        self._due, self._coming = self._coming, {}
        loads = []
        for sequence in fresh:
            if sequence.origin is not None:
                loads.append((sequence.origin.slot, sequence.row))
                self._unpin(sequence)
        return saves, loads

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every snapshot is in one place."""
        private = sum(len(sequence.snapshots) for sequence in sequences)
        self._pool.check(private, self._tree.nodes())

    def _save(self, sequence: Sequence, when: dict[int, int]) -> None:
        position = sequence.computed
        wanted = sequence.keep and sequence.owner is not Owner.PROBE
        if not wanted or position - _last(sequence) < self._limits.least:
            return
        snapshot = self._pool.take(position)
        if snapshot is not None:
            # It may have been another's, which was to be made yet.
            self._due.pop(snapshot.slot, None)
            when[snapshot.slot] = sequence.row
            sequence.snapshots.append(snapshot)
            sequence.snapped = position

    def _make_way(self, node: Node) -> None:
        """Drop a snapshot of the path to `node` if there are too many."""
        held = [each.state for each in path(node) if each.state is not None]
        if len(held) >= self._limits.per_path:
            oldest = self._pool.least_used(held)
            if oldest is not None:
                self._pool.drop(oldest)

    def _drop(self, snapshot: Snapshot) -> None:
        self._due.pop(snapshot.slot, None)
        self._coming.pop(snapshot.slot, None)
        self._pool.drop(snapshot)

    def _unpin(self, sequence: Sequence) -> None:
        if sequence.origin is not None:
            self._pool.unpin(sequence.origin)
            sequence.origin = None


def _last(sequence: Sequence) -> int:
    """The position of the last snapshot before what a sequence has computed."""
    return max(sequence.snapped, sequence.shared)
