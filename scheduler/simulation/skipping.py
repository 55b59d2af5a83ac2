"""A scheduler that takes runs of uneventful steps at once."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from itertools import compress

import numpy as np

from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.scheduler.beam_search import Top
from tokenpod.scheduler.drafting import Landed
from tokenpod.scheduler.outcomes import Outcomes
from tokenpod.scheduler.scheduler import Scheduler, Settled, Step

#: A token that never ends a sequence.
PLAIN = 0


class SkippingOutcomes(Outcomes):
    """Takes plain tokens of running streams at once."""

    def take_each(
        self,
        step: Step,
        tokens: Listing[int],
        tops: Mapping[int, Top],
        drafted: Mapping[int, Landed],
        now: int,
        settled: Settled,
    ) -> None:
        """See `Outcomes`: a plain token of a running stream takes no questions."""
        del tops, drafted
        plan = step.plan
        # The first one after what a sequence needs is another matter.
        special = plan.r_start + plan.r_tokens == self._kv.table.needed[step.places]
        special = special[plan.r_samples > 0]
        special |= np.array(tokens, np.int64) != PLAIN
        running = [*compress(step.sampled, (~special).tolist())]
        for at in special.nonzero()[0].tolist():
            self.take(step.sampled[at], tokens[at], at, now, settled)
        for sequence in running:
            if sequence.ended_as is None:
                sequence.outputs.append(PLAIN)


class SkippingScheduler(Scheduler):
    """The scheduler, for simulations: what it holds after a skip is what steps would have left.

    Callers see to it that `PLAIN` ends nothing: it is no end of text, nor the last token that a
    request asks for, and requests have no time limits. Of a step's outcome it tells the
    first tokens of requests and the last ones; in between it is silent.
    """

    _OUTCOMES = SkippingOutcomes

    def quiet_steps(self, step: Step, most: int) -> int:
        """How many steps like `step`, the last one planned, surely follow if no token ends one.

        Such steps hold a token of the same rows, nobody joins, and each row has room for its slots.
        At most `most`; 0 if that can't be said.
        """
        if most < 1 or self._queue.may_admit or self._routed.ops or len(self._planners.probes):
            return 0
        if self._late.watches or not self._batcher.holds_only(step.places):
            return 0
        table = self.kv.table
        left = (table.bound[step.places] - table.computed[step.places]).min()
        available = self._planners.slots_for_batcher
        return min(most, int(left), self.kv.room_of(step.places), available // len(step.places))

    def skip(self, step: Step, steps: int) -> None:
        """Plan and settle so many steps after `step`, which `quiet_steps` has allowed, at once.

        Each row samples `PLAIN` in each of them. A step in flight stays in flight.
        """
        self.kv.extend_all(step.places, steps)
        table = self.kv.table
        table.computed[step.places] += steps
        table.launched[step.places] += steps
        more = [PLAIN] * steps
        for sequence in step.sequences:
            sequence.outputs += more
        for _ in range(steps):
            self._batching.portion(
                decoding=True, prompts=False, prompt_tokens=self.limits.prefill_tokens
            )
        self._steps += steps

    @property
    def slots_in_use(self) -> int:
        """Slots that sequences use; what is only cached does not count."""
        return max(self.limits.slots + PROBE_TOKENS - self.kv.available, 0)

    def place_of(self, sequence_id: int) -> int:
        """Where a sequence is in the table, until it has ended. Raises KeyError."""
        return self._sequences[sequence_id].place
