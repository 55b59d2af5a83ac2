"""The in-pod batcher: no stall for running streams.

A step holds a token of every decoding sequence, then pieces of prompts up to the step's budget, in
the order of admission (queue.py).

    admitted: prefilling --prompt launched--> decoding
              siblings --the first sample's prompt settled--> ready (their last token) --> decoding
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import compress

import numpy as np

from tokenpod.scheduler.exact import Forecast
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.step import StepBuilder
from tokenpod.scheduler.table import Ints
from tokenpod.scheduler.work import Limits


class Batcher:
    """Plans the sequences of `Generate`.

    Args:
        requeue: takes samples that were admitted with a sibling whose prompt they can't have.
    """

    def __init__(
        self, limits: Limits, kv: KV, rows: Rows, requeue: Callable[[list[Sequence]], None]
    ) -> None:
        self.stalls = 0
        self._limits = limits
        self._kv = kv
        self._rows = rows
        self._requeue = requeue
        self._prefilling: deque[Sequence] = deque()
        #: Samples whose prompt is in the tree but for its last token; before all of `_prefilling`.
        self._ready: deque[Sequence] = deque()
        #: Samples that wait for the prompt of the first, by the first's id.
        self._siblings: dict[int, list[Sequence]] = {}
        self._decoding: dict[int, Sequence] = {}
        #: The same as a list, and their places; None: somebody has come or gone since.
        self._lockstep: tuple[list[Sequence], Ints] | None = None
        #: Ended, but with a step in flight, so that their slots are not free yet.
        self._leaving: dict[int, Sequence] = {}

    @property
    def quantum(self) -> int:
        """Prompt tokens that a step surely processes, whatever a router wants."""
        return max(self._limits.prefill_tokens // 2, 1)

    @property
    def running(self) -> int:
        """Admitted sequences."""
        siblings = sum(map(len, self._siblings.values()))
        return len(self._ready) + len(self._prefilling) + len(self._decoding) + siblings

    @property
    def has_prompts(self) -> bool:
        """Whether prompt tokens are to be processed."""
        return bool(self._ready or self._prefilling)

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences whose prompt is being computed, or is next."""
        return list(self._prefilling)

    def start(self, samples: list[Sequence]) -> None:
        """See `queue.Planner`."""
        first, *siblings = samples
        self._prefilling.append(first)
        if siblings:
            self._siblings[first.id] = siblings

    def foresee(self, forecast: Forecast, samples: list[Sequence]) -> None:
        """See `queue.Planner`."""
        first, *siblings = samples
        forecast.prefilling(first)
        if siblings:
            forecast.siblings(first, siblings)

    def add_to(self, forecast: Forecast) -> None:
        """Add the need of these sequences."""
        forecast.leaving([*self._leaving.values()])
        forecast.decoding([*self._decoding.values()])
        for sequence in self._ready:
            forecast.prefilling(sequence)
        for first, siblings in self._siblings.items():
            if first in self._decoding:
                forecast.siblings(self._decoding[first], siblings)
        for sequence in self._prefilling:
            self.foresee(forecast, [sequence, *self._siblings.get(sequence.id, [])])

    def plan(self, step: StepBuilder, prefill_tokens: int) -> None:
        """Add to a step, with about so many prompt tokens: `quantum` at the least."""
        self._decode(step)
        budget = max(prefill_tokens, self.quantum)
        while budget > 0 and (line := self._ready or self._prefilling):
            sequence = line[0]
            n = min(sequence.prompt_length - sequence.computed, budget)
            step.prompt(sequence, n)
            budget -= n
            if not sequence.prefilling:
                line.popleft()
                self._decoding[sequence.id] = sequence
                self._lockstep = None

    def prompt_settled(self, sequence: Sequence) -> None:
        """A prompt has been computed: share it, and let its siblings start."""
        siblings = self._siblings.pop(sequence.id, [])
        self._kv.share_prompt(sequence, awaited=bool(siblings))
        self._rows.promise(-len(siblings))
        for sibling in siblings:
            self._kv.follow(sibling, sequence)
            self._rows.give(sibling)
            self._ready.append(sibling)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended; what it holds stays with it until `released`."""
        if sequence.row < 0:
            self._remove_sibling(sequence)
        elif self._remove_running(sequence):
            self._leaving[sequence.id] = sequence

    def released(self, sequence: Sequence) -> None:
        """A sequence's slots and row have come free."""
        self._leaving.pop(sequence.id, None)

    # -- parts ---------------------------------------------------------------------------------

    def _remove_sibling(self, sequence: Sequence) -> None:
        """Forget one that waits for its sibling's prompt."""
        for first, siblings in self._siblings.items():
            if sequence in siblings:
                siblings.remove(sequence)
                self._rows.promise(-1)
                if not siblings:
                    del self._siblings[first]
                return

    def _remove_running(self, sequence: Sequence) -> bool:
        """Forget one with a row; False if it is not ours."""
        self._lockstep = None
        if self._decoding.pop(sequence.id, None) is None:
            for line in (self._ready, self._prefilling):
                if sequence in line:
                    line.remove(sequence)
                    break
            else:
                return False
        if siblings := self._siblings.pop(sequence.id, None):
            # The prompt that they wait for may never come: they go back to the queue, where
            # admission counts anew what they need.
            self._rows.promise(-len(siblings))
            self._requeue(siblings)
        return True

    def _decode(self, step: StepBuilder) -> None:
        if self._lockstep is None:
            sequences = [*self._decoding.values()]
            self._lockstep = sequences, np.array([s.place for s in sequences], np.int64)
        sequences, places = self._lockstep
        table = self._kv.table
        # The last token of others has been launched, and may be under way.
        going_on = table.launched[places] < table.most[places]
        if not going_on.all():
            sequences = [*compress(sequences, going_on.tolist())]
            places = places[going_on]
        if sequences:
            self.stalls += step.decode(sequences, places)
