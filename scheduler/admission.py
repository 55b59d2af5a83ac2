"""How memory is promised to requests: what every admission policy says.

A policy is one module with one class (see reserve.py, the shortest). The queue asks its ledger
whether requests may join, and the batcher asks which sequences to preempt when slots run out; none
of them knows which policy it talks to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Listing

import numpy as np

from tokenpod.scheduler.ledger import Ledger, Needs
from tokenpod.scheduler.peak import FOREVER
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.table import Ints, Table
from tokenpod.scheduler.work import Limits


class Admission(ABC):
    """Says what each sequence will need; without a method of its own, the same for ever.

    Args:
        table: the sequences' columns.
        limits: the engine's resources.
        quantum: prompt tokens that every step with prompts is sure to compute.
    """

    #: Whether slots may run out, so that running sequences have to be preempted.
    preempts = False
    #: Slots that stay free when a request joins others.
    margin = 0

    def __init__(self, table: Table, limits: Limits, quantum: int) -> None:
        self._table = table
        self._slots = limits.slots
        self._quantum = quantum

    @abstractmethod
    def held(self, needs: Needs) -> Ints:
        """[n] slots to count for each sequence before it grows, without the shared ones."""

    def growth(self, needs: Needs) -> Ints:
        """[n] or [draws, n] by how many slots it grows from then on, one per step."""
        return np.zeros_like(needs.bound)

    def end(self, needs: Needs, growth: Ints) -> Ints:
        """[n] or [draws, n] the step by which its slots are free again, or FOREVER."""
        del growth
        return np.full_like(needs.bound, FOREVER)

    def draws(self, running: int) -> int:
        """How many futures a ledger looks at, while so many sequences decode: all must fit."""
        del running
        return 1

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended; `ended_as` says how, its outputs are complete."""
        del sequence

    def ledger(self) -> Ledger:
        """An empty ledger."""
        return Ledger(self, self._table, self._slots, self._quantum)

    def victims(self, running: Listing[Sequence]) -> Listing[Sequence]:
        """The sequences to preempt together when a step needs more slots than there are.

        Of the lowest priority, the request that arrived last, with all its samples; a request that
        runs alone gives way sample by sample, so that its first one gets on. These are vLLM 0.5's
        rules, where priorities are all alike. No request waits for a later one of its priority, so
        none starves.

        Args:
            running: the batcher's, at least one. A router's are never preempted.

        Returns some of these, or none: sequences without a slot then pause.
        """
        if not self.preempts:
            return ()
        last = max(running, key=lambda s: (-s.request.priority, s.arrival, s.stream))
        together = [sequence for sequence in running if sequence.request is last.request]
        return together if len(together) < len(running) else [last]
