"""What the step loop does for constrained sequences, in the order of a turn.

look      requests that are refused or compiled; masks that were late and are there now; tokens that
          are forced
prepare   masks along the drafts of a step that is about to be launched
sample    a step's masked rows, while its forward runs or once it has run
settled   tokens are read and the next masks made: quick ones here, the others by workers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from tokenpod.core.messages import Vocabulary
from tokenpod.core.outputs import MaskCounts
from tokenpod.core.plan import StepPlan
from tokenpod.core.requests import Request
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.steps.executor import Launched
from tokenpod.scheduler.scheduler import Scheduler, Settled, Step

#: Of the usual time of a forward: until then masks of its step may come, and where it is over when
#: `launch` returns, so much longer. The sampler and the next step must be launched in time.
_WITHIN, _BEYOND = 0.75, 0.1
#: Requests that begin in a turn, while others run: each makes a step longer. On an H200, beside 200
#: schemas, the 99th percentile of 32 streams' gaps was 5.54 ms with four in a turn, 5.56 with
#: eight, 5.82 with all; but with four, 64 rows that come at once are long in coming together.
_MOST_BEGINNING = 8
#: Weight of the newest forward in the usual time.
_SMOOTHING = 0.1
#: Before any is known.
_FIRST_NS = 1_000_000


class MaskedSteps:
    """Follows the scheduler's constrained sequences.

    Args:
        masks: of their texts.
        overlap: a step is launched before the one before it has settled.
        clock: nanoseconds.
    """

    def __init__(
        self, masks: Masks, *, overlap: bool, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._masks = masks
        self._overlap = overlap
        self._clock = clock
        self._usual_ns = float(_FIRST_NS)
        #: Whether there was a step in the last turn.
        self._running = False
        #: When the forward under way began at the latest: the one before it had ended.
        self._began_at = 0

    @property
    def counts(self) -> MaskCounts:
        """What constraints have cost so far."""
        return self._masks.counts

    def learn(self, vocabulary: Vocabulary) -> None:
        """The model's tokens."""
        self._masks.learn(vocabulary)

    def begin(self, request: Request) -> None:
        """A request with a constraint."""
        self._masks.begin(request)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """These sequences have been aborted."""
        self._masks.forget(sequence_ids)

    def look(self, scheduler: Scheduler) -> None:
        """Tell the scheduler what has become of constraints and late masks."""
        for failure in self._masks.failures():
            scheduler.end_constrained(failure.sequence_id, failure)
        waiting = [sequence.id for sequence in scheduler.waiting_for_masks]
        over = self._masks.over(waiting)
        for sequence_id, fault in over.items():
            scheduler.end_constrained(sequence_id, fault)
        ready = [of for of in waiting if of not in over and self._masks.is_ready(of)]
        scheduler.masked(ready, most=_MOST_BEGINNING if self._running else None)
        self._running = False
        scheduler.forced.known = self._masks.forced()

    def prepare(self, step: Step) -> None:
        """Let masks behind a step's drafts be made; those behind forced tokens are there."""
        plan = step.plan
        if not len(plan.r_masked):
            return
        for row in np.flatnonzero((plan.r_masked != 0) & (plan.r_samples > 1)).tolist():
            if row not in step.forced:
                output = int(plan.r_output[row])
                self._masks.look_along(step.sequences[row].id, output, _drafts_of(plan, row))

    def sample(self, step: Step, launched: Launched) -> None:
        """Sample a step's masked rows; those whose masks are late are planned again."""
        self._running = True
        plan, now = step.plan, self._clock()
        if not plan.r_masked.any():
            return
        rows = np.flatnonzero(plan.r_masked).tolist()
        wanted = {
            row: (step.sequences[row].id, int(plan.r_output[row]), _drafts_of(plan, row))
            for row in rows
        }
        until = now + int(_BEYOND * self._usual_ns)
        if self._overlap:
            until = max(self._began_at + int(_WITHIN * self._usual_ns), until)
        launched.sample(self._masks.masks(wanted, until))

    def forwarded(self, nanoseconds: int) -> None:
        """A step's results are there; its forward took so long."""
        self._began_at = self._clock()
        self._usual_ns += _SMOOTHING * (nanoseconds - self._usual_ns)

    def settled(self, settled: Settled) -> dict[int, bool]:
        """Take a step's tokens; whether the texts that end are whole, by sequence id."""
        taken: dict[int, list[int]] = {}
        satisfied = {}
        tokens = zip(settled.sequence_ids, settled.token_ids, settled.finishes, strict=True)
        for sequence_id, token, finish in tokens:
            if sequence_id not in self._masks:
                continue
            some = taken.setdefault(sequence_id, [])
            if token >= 0:
                some.append(token)
            if finish:
                satisfied[sequence_id] = self._masks.ended(sequence_id, some, finish)
                del taken[sequence_id]
        self._masks.took(taken)
        self._masks.forget(failure.sequence_id for failure in settled.failures)
        return satisfied


def _drafts_of(plan: StepPlan, row: int) -> list[int]:
    """What a row of a plan drafts."""
    drafts = int(plan.r_samples[row]) - 1
    if not drafts:
        return []
    end = int(plan.r_tokens[: row + 1].sum())
    found: list[int] = plan.t_token[end - drafts : end].tolist()
    return found
