"""How memory is promised to requests: what every admission policy says.

A policy is one module with one class (see reserve.py, the shortest). It is asked about sequences by
the ledger (ledger.py), which the queue asks whether requests may join, and by the batcher, which
sequences to preempt when slots run out. None of them knows which policy it talks to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenpod.scheduler.policies.peak import FOREVER
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.sequences.table import Ints, Table
from tokenpod.scheduler.sequences.work import Limits

#: Steps by which a sequence may outlast its count: the one in flight when its end is seen.
SLACK = 1


@dataclass(frozen=True, slots=True)
class Needs:
    """What policies are asked about: some sequences, in columns of [n]."""

    #: Positions that it has computed, or will have when it begins to grow.
    computed: Ints
    #: Of these, the ones that are counted elsewhere: in the tree, or with another sample.
    shared: Ints
    #: Positions that it will compute at most.
    bound: Ints
    #: Outputs that it has, or that are in flight.
    outputs: Ints
    #: 1: its next output comes of the prompt, before it grows.
    prompt: Ints
    #: Steps until it begins to grow, at most; and those that it takes to grow by one.
    delay: Ints
    pace: Ints
    #: Drafted tokens in flight, all of which may be wrong.
    drafted: Ints
    #: Whether it may miss steps, for want of a mask or a copy.
    uneven: npt.NDArray[np.bool_]
    #: How many futures are looked at.
    draws: int

    @property
    def left(self) -> Ints:
        """[n] positions by which it can grow."""
        return self.bound - self.computed


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
        self.table = table
        #: Of the KV pool.
        self.slots = limits.slots
        self.quantum = quantum

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
