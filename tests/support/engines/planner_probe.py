"""What tests do to the batcher, and see of it, that no client can."""

from __future__ import annotations

from tokenpod.scheduler.scheduler import Scheduler


def preempt_sequence(scheduler: Scheduler, sequence_id: int) -> bool:
    """Preempt a running sequence of the batcher, as if the admission policy had named it.

    Returns False for every other sequence: waiting, ended, a router's, a probe.
    """
    sequence = scheduler._sequences.get(sequence_id)
    return sequence is not None and not sequence.dead and scheduler._batcher.preempt(sequence)


class Stalls:
    """Counts how often a decoding sequence paused for want of a slot: never, if admission is exact.

    Args:
        scheduler: whose batcher is watched from now on.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.count = 0
        self._decodes = False
        batching, batcher = scheduler._batching, scheduler._batcher
        self._decoding = batcher._decoding
        self._portion, self._decode = batching.portion, batcher._decode
        batching.portion, batcher._decode = self._portion_of, self._added

    def _portion_of(self, **budget):
        portion = self._portion(**budget)
        self._decodes = portion.decode
        return portion

    def _added(self, step, sequences, places, slots):
        if self._decodes:
            self.count += len(self._decoding.next()[0]) - len(sequences)
        return self._decode(step, sequences, places, slots)
