"""What all admitted sequences will need at most: the input of `admission.peak_tokens`."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listing

from tokenpod.scheduler.admission import FOREVER, peak_tokens
from tokenpod.scheduler.radix import Node
from tokenpod.scheduler.sequence import Sequence

#: Steps by which a sequence may outlast its count: the one in flight when its end is seen.
_SLACK = 1


class Forecast:
    """Gathers sequences, then tells their peak.

    Args:
        quantum: prompt tokens that every step surely processes.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        #: Where each sequence stands in the three lists.
        self._index: dict[int, int] = {}
        self._held: list[int] = []
        self._left: list[int] = []
        self._delay: list[int] = []
        self._locks: list[tuple[int, Node]] = []
        self._prompt_tokens = 0

    def decoding(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that grow by one a step from now on."""
        for sequence in sequences:
            self._add(sequence, sequence.held, sequence.bound - sequence.computed, 0)

    def leaving(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that have ended, but for a step in flight."""
        for sequence in sequences:
            self._add(sequence, sequence.held, 0, 1)

    def prefilling(self, sequence: Sequence) -> None:
        """One whose prompt is computed after those that were added before."""
        self._in_line(sequence, sequence.prompt_length - sequence.computed)

    def siblings(self, first: Sequence, sequences: Listing[Sequence]) -> None:
        """Samples that wait for the prompt of `first`, which was added before.

        Each computes its last token again, after those that were added before. The prompt is there
        once, and stays until the last of all samples is over.
        """
        for sequence in sequences:
            last = self._in_line(sequence, 1)
        prompt = first.prompt_length - first.shared
        self._held[self._index[first.id]] -= prompt
        self._held.append(prompt)
        self._left.append(0)
        self._delay.append(last)
        if first.node is not None:
            self._locks.append((last, first.node))

    def frozen(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that somebody else advances, if ever."""
        for sequence in sequences:
            to_come = sequence.bound - sequence.computed
            self._add(sequence, sequence.held + to_come, 0, FOREVER)

    def peak(self) -> int:
        """The most slots that these sequences will ever hold at once."""
        held, left, delay = self._held[:], self._left[:], self._delay[:]
        seen: set[int] = set()
        # The longest lasting first: it is the one that keeps a shared node.
        for last, node in sorted(self._locks, key=lambda lock: -lock[0]):
            tokens = 0
            at: Node | None = node
            while at is not None and at.parent is not None and id(at) not in seen:
                seen.add(id(at))
                tokens += len(at.tokens)
                at = at.parent
            if tokens:
                held.append(tokens)
                left.append(0)
                delay.append(last)
        return peak_tokens(held, left, delay)

    def _in_line(self, sequence: Sequence, need: int) -> int:
        """Add one with `need` prompt tokens to compute; the step by which it is gone."""
        self._prompt_tokens += need
        # A sibling waits until the prompt is settled, and rounds up to whole steps once more.
        delay = -(-self._prompt_tokens // self._quantum) + 3
        # The prompt's last step brings the first new token; the last one is not written.
        left = sequence.bound - sequence.prompt_length
        self._add(sequence, sequence.held + need, left, delay)
        return delay + left + _SLACK

    def _add(self, sequence: Sequence, held: int, left: int, delay: int) -> None:
        self._index[sequence.id] = len(self._held)
        self._held.append(held)
        self._left.append(left)
        self._delay.append(delay + _SLACK if delay < FOREVER else FOREVER)
        if sequence.node is not None:
            last = FOREVER if delay >= FOREVER else delay + left + _SLACK
            self._locks.append((last, sequence.node))
