"""The in-pod batcher: no stall for running streams.

A step holds a token of every decoding sequence, then pieces of prompts up to the step's budget, in
the order of admission (queue.py).

    admitted: prefilling --prompt launched--> decoding
              siblings --the first sample's prompt settled--> ready (their last token) --> decoding
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tokenpod.scheduler.forecast import Forecast
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.work import Limits, Work


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

    def plan(self, now: int, prefill_tokens: int) -> list[Work]:
        """This step's works, with about so many prompt tokens: `quantum` at the least."""
        works = self._decode()
        budget = max(prefill_tokens, self.quantum)
        while budget > 0 and (line := self._ready or self._prefilling):
            sequence = line[0]
            n = min(sequence.prompt_length - sequence.computed, budget)
            works.append(prompt_work(self._kv, sequence, n, now))
            budget -= n
            if not sequence.prefilling:
                line.popleft()
                self._decoding[sequence.id] = sequence
        return works

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

    def _decode(self) -> list[Work]:
        works = []
        for sequence in self._decoding.values():
            if sequence.exhausted:
                continue
            if not self._kv.available:
                # Admission makes this impossible; if it is not, pausing beats failing.
                self.stalls += 1
                continue
            works.append(decode_work(self._kv, sequence))
        return works


def decode_work(kv: KV, sequence: Sequence) -> Work:
    """The next token of a sequence whose prompt has been launched."""
    position = sequence.computed
    slots = kv.extend(sequence, 1)
    sequence.computed = position + 1
    sequence.launched += 1
    return Work(sequence, position, 1, slots, True)


def prompt_work(kv: KV, sequence: Sequence, n: int, now: int) -> Work:
    """The next `n` prompt tokens of a sequence."""
    sequence.began_at = sequence.began_at or now
    start = sequence.computed
    slots = kv.extend(sequence, n)
    sequence.computed += n
    done = not sequence.prefilling
    sequence.launched += done
    return Work(sequence, start, n, slots, needs_logits=done)
