"""Liveness probes of routers: one token each, at once, whatever else runs or waits.

A row and `PROBE_TOKENS` slots are reserved for them beside those that all others share, so a pod
whose rows and memory are all taken still shows that it can generate. Probes run one after another.
"""

from __future__ import annotations

from collections import deque

from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.step import StepBuilder


class Probes:
    """Plans liveness probes."""

    def __init__(self, kv: KV, rows: Rows) -> None:
        self._kv = kv
        self._rows = rows
        self._waiting: deque[Sequence] = deque()
        self._running: Sequence | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    @property
    def reserved(self) -> int:
        """Slots that the next probe may take."""
        return 0 if self._running is not None else PROBE_TOKENS

    def add(self, sequence: Sequence) -> None:
        """Queue a probe: a prompt of less than `PROBE_TOKENS` tokens, and one new token."""
        self._waiting.append(sequence)

    def plan(self, step: StepBuilder) -> None:
        """Add the whole prompt of the next probe to a step, if none is under way."""
        if self._running is not None or not self._waiting:
            return
        self._running = sequence = self._waiting.popleft()
        self._kv.begin(sequence)
        self._rows.give_probe(sequence)
        step.prompt(sequence, sequence.to_compute)

    def released(self, sequence: Sequence) -> None:
        """A probe has ended; its slots and row are free."""
        if sequence is self._running:
            self._running = None
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
