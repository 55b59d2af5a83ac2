"""How memory is promised to requests: the protocol that every admission policy implements.

A policy is one module with a class of its own and one for its ledgers (see exact.py). The queue
asks whether requests may join, the planners say what theirs need, and the batcher asks which
sequence to preempt when slots run out. None of them knows which policy it talks to.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from typing import Protocol

from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.table import Ints


class Ledger(Protocol):
    """What all admitted sequences need, and then, in the queue's order, some that wait.

    Entries are only added. Adding one never lets more fit, so the first request that does not fit
    can be found by bisection over marks.
    """

    def decoding(self, sequences: Listing[Sequence], at: Ints) -> None:
        """Add sequences that take one slot per step from now on. Called once, before the others.

        `at`: [n] int64, their places in the table.
        """

    def leaving(self, sequences: Listing[Sequence]) -> None:
        """Add sequences whose slots will be free once the step in flight has settled."""

    def reserved(self, sequence: Sequence) -> None:
        """Add one whose whole bound must stay reserved: a router decides when it runs."""

    def prefilling(self, sequence: Sequence) -> None:
        """Add one that is computed after those that were added before."""

    def searching(self, sequences: Listing[Sequence]) -> None:
        """Add beams, which take one slot per step or less often and are never preempted.

        Beams that wait or prefill are added as other sequences are. Their bound must stay reserved.
        """

    def siblings(self, first: Sequence, sequences: Iterable[Sequence]) -> None:
        """Add samples that wait for the prompt of `first`, which was added before."""

    @property
    def mark(self) -> int:
        """Names what has been added so far."""

    def fits(self, mark: int) -> bool:
        """Whether the policy lets everything join that was added until `mark`."""


class Admission(Protocol):
    """Decides which requests join, and which sequence is preempted when slots run out."""

    def ledger(self) -> Ledger:
        """An empty ledger."""

    def victims(self, running: Listing[Sequence]) -> Listing[Sequence]:
        """The sequences to preempt together when a step needs more slots than there are.

        Args:
            running: the batcher's, at least one. A router's are never preempted.

        Returns some of these, or none: sequences without a slot then pause.
        """

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended; `ended_as` says how, its outputs are complete."""


def last_to_arrive(running: Listing[Sequence]) -> Listing[Sequence]:
    """Who gives way: of the lowest priority, the request that arrived last, with all its samples.

    A request that runs alone gives way sample by sample, so that its first one gets on. These are
    vLLM 0.5's rules, where priorities are all alike. No request waits for a later one of its
    priority, so none starves.
    """
    last = max(running, key=lambda s: (-s.request.priority, s.arrival, s.stream))
    together = [sequence for sequence in running if sequence.request is last.request]
    return together if len(together) < len(running) else [last]
