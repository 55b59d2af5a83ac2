"""A scheduler that takes runs of uneventful steps at once."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from typing import Any, cast

import numpy as np

from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.core.requests import Request
from tokenpod.scheduler.drafts.drafting import Landed
from tokenpod.scheduler.scheduler import Scheduler, Settled, Step
from tokenpod.scheduler.sequences.beam_search import Top
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.sequences.table import Ints
from tokenpod.simulator.plain import PLAIN, OutputCounts


class SkippingScheduler(Scheduler):
    """The scheduler, for simulations: what it holds after a skip is what steps would have left.

    Callers see to it that `PLAIN` ends nothing: it is no end of text, nor the last token that a
    request asks for, and requests have no time limits. Of a step's outcome it tells the
    first tokens of requests and the last ones; in between it is silent.
    """

    def __init__(self, *limits: Any, **policies: Any) -> None:
        super().__init__(*limits, **policies)
        self._counts = OutputCounts(self.kv.table)

    def submit(self, request: Request) -> None:
        """Queue a request, whose outputs are counted, not kept."""
        super().submit(request)
        for sequence_id in request.sequence_ids:
            if sequence := self._sequences.get(sequence_id):
                counted = self._counts.begin(sequence.place)
                # Only drafts and beams do more with a list, and there are none.
                sequence.outputs = cast("list[int]", counted)

    def settle_plain(
        self, step: Step, tokens: Ints, now: int, *, arrived: int | None = None
    ) -> Settled:
        """Take a step's outcome; tokens are [samples] int64."""
        # `_take_each` takes them as they are, and nobody else looks at them.
        return self.settle(step, cast("list[int]", tokens), now, arrived=arrived)

    def quiet_steps(self, step: Step, most: int) -> int:
        """How many steps like `step`, the last one planned, surely follow if no token ends one.

        Such steps hold a token of the same rows, nobody joins, and each row has room for its slots.
        At most `most`; 0 if that can't be said.
        """
        if most < 1 or self._queue.may_admit or self._routed.ops:
            return 0
        if self._probes.waiting or self._probes.running:
            return 0
        if self._deadlines.watched or not self._batcher.holds_only(step.places):
            return 0
        table = self.kv.table
        left = (table.bound[step.places] - table.computed[step.places]).min()
        available = self._slots_for_batcher
        return min(most, int(left), self.kv.room_of(step.places), available // len(step.places))

    def skip(self, step: Step, steps: int) -> None:
        """Plan and settle so many steps after `step`, which `quiet_steps` has allowed, at once.

        Each row samples `PLAIN` in each of them. A step in flight stays in flight.
        """
        self.kv.extend_all(step.places, steps)
        table = self.kv.table
        table.computed[step.places] += steps
        table.launched[step.places] += steps
        self._counts.add(step.places, steps)
        for _ in range(steps):
            self._batching.decoded()
        self._steps += steps

    @property
    def slots_in_use(self) -> int:
        """Slots that sequences use; what is only cached does not count."""
        return max(self.limits.slots + PROBE_TOKENS - self.kv.available, 0)

    def place_of(self, sequence_id: int) -> int | None:
        """Where a sequence is in the table, until it has ended; None: it was refused."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else sequence.place

    def _take_each(
        self,
        step: Step,
        tokens: Listing[int],
        tops: Mapping[int, Top],
        drafted: Mapping[int, Landed],
        now: int,
    ) -> None:
        """Count the plain tokens of running streams; take the others one by one."""
        del tops, drafted
        plan, table = step.plan, self.kv.table
        # The first one after what a sequence needs is another matter.
        special = plan.r_start + plan.r_tokens == table.needed[step.places]
        places = step.places
        if plan.sampling < plan.rows:
            sampled = plan.r_samples > 0
            special, places = special[sampled], places[sampled]
        special |= np.asarray(tokens) != PLAIN
        plain = ~special & (table.ended[places] == 0)
        which = special.nonzero()[0].tolist()
        for at, sequence in zip(which, self._sampled(step, which), strict=True):
            self._take(sequence, int(tokens[at]), at, now)
        self._counts.add(places[plain])

    @staticmethod
    def _sampled(step: Step, which: list[int]) -> list[Sequence]:
        """The sequences of some of a step's samples; no row has several of these."""
        rows = which
        if step.plan.sampling < step.plan.rows:
            rows = step.plan.r_samples.nonzero()[0][which].tolist()
        return [step.sequences[row] for row in rows]
