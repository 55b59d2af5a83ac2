"""Sequences under constraints, where they can't go on: masks come from elsewhere, and may be late.

    new, or preempted --held--> its masks are there --> queue
    decoding, a mask is late --paused--> it is there, no step in flight --> decoding again

A sequence is queued only once the mask of its next token is there. So the last piece of what it
needs computed is always sampled, and only rows that decode can miss a step.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenpod.core.outputs import Failure
from tokenpod.scheduler.sequences.sequence import Sequence


class Constrained:
    """Who waits for a mask."""

    def __init__(self) -> None:
        #: Samples that are queued together, by the first one's id.
        self.held: dict[int, list[Sequence]] = {}
        #: Which first one each of them is with.
        self._first: dict[int, int] = {}
        #: Those of them whose masks are there.
        self._masked: set[int] = set()
        self._paused: dict[int, Sequence] = {}
        #: Sequences that end, by id, and how they fail; None: nothing more is allowed.
        self.over: dict[int, tuple[Sequence, Failure | None]] = {}

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences whose next mask is asked for."""
        held = [s for samples in self.held.values() for s in samples if s.id not in self._masked]
        return [*held, *(s for s in self._paused.values() if not s.in_flight)]

    @property
    def held_tokens(self) -> int:
        """Tokens that requests which are held need computed."""
        return sum(samples[0].needed for samples in self.held.values())

    def hold(self, samples: list[Sequence]) -> None:
        """Queue these once the next mask of each is there."""
        for sequence in samples:
            if self._paused.pop(sequence.id, None):
                sequence.paused = 0
            self._first[sequence.id] = samples[0].id
        self.held[samples[0].id] = samples

    def pause(self, sequence: Sequence) -> None:
        """Its mask was late: nothing of it is planned until that is there."""
        sequence.paused = 1
        self._paused[sequence.id] = sequence

    def masked(self, sequence_ids: Iterable[int], most: int | None = None) -> list[list[Sequence]]:
        """The next masks of some of `waiting` are there; samples that can be queued with them.

        Args:
            sequence_ids: theirs.
            most: of those that are held so many can be queued, samples of one request counting
                once; the others stay among `waiting`. None: all.
        """
        free: list[list[Sequence]] = []
        for sequence_id in sequence_ids:
            if sequence := self._paused.pop(sequence_id, None):
                sequence.paused = 0
            elif (first := self._first.get(sequence_id)) is not None and len(free) != most:
                self._masked.add(sequence_id)
                free += self._let_go(first)
        return free

    def forget(self, sequence: Sequence) -> list[list[Sequence]]:
        """A sequence has ended; samples that can be queued without it."""
        self.over.pop(sequence.id, None)
        self._paused.pop(sequence.id, None)
        self._masked.discard(sequence.id)
        first = self._first.pop(sequence.id, None)
        if first is None:
            return []
        self.held[first].remove(sequence)
        return self._let_go(first)

    def _let_go(self, first: int) -> list[list[Sequence]]:
        """Samples that were held together, if all of their masks are there."""
        samples = self.held[first]
        if not all(s.id in self._masked for s in samples):
            return []
        del self.held[first]
        for sequence in samples:
            self._masked.discard(sequence.id)
            del self._first[sequence.id]
        return [samples]
