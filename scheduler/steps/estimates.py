"""How long steps take on this machine, as those that have been show: one place that measures.

    settled --> the time of the step --> prompts: the least that one takes      (deadlines)
                                         drafting: steps with and without drafts (drafts)
                                         forced: with and without forced tokens  (constraints)
                                         gaps: the model of what steps take      (streams' gaps)

All times are nanoseconds.
"""

from __future__ import annotations

from tokenpod.scheduler.steps.gaps import GapBound
from tokenpod.scheduler.steps.step import Step
from tokenpod.scheduler.steps.step_times import Costs

#: Steps of one size that are watched before they count, and after which the oldest are forgotten.
_ENOUGH = 16
_WINDOW = 64


class Estimates:
    """Times the steps of one scheduler, and says what others will take.

    Args:
        prefill_tokens: prompt tokens that one step takes.
        drafting: learns what steps cost with drafts and without; None: nobody asks.
        forced: learns the same of forced tokens, from steps under constraints.
        gaps: learns what steps take, to bound them; None: they have no bound.
    """

    def __init__(
        self,
        prefill_tokens: int,
        drafting: Costs | None = None,
        forced: Costs | None = None,
        gaps: GapBound | None = None,
    ) -> None:
        self.prompts = PromptTimes(prefill_tokens)
        self.gaps = gaps
        self._drafting, self._forced = drafting, forced
        self._settled_at = 0
        #: Steps that have not settled; and nothing could run since the last one.
        self._under_way, self._rested = 0, True

    def idle(self) -> None:
        """Nothing can run."""
        self._rested = self._rested or not self._under_way

    def planned(self, now: int) -> int | None:
        """A step is planned; its `Step.gap`."""
        busy = not (self._rested or self._under_way)
        self._under_way += 1
        self._rested = False
        return now - self._settled_at if busy else None

    def settled(
        self, step: Step, now: int, drafting_ns: int, computed_ns: int | None = None
    ) -> None:
        """A step has settled; `drafting_ns` of its time were taken to find drafts.

        `computed_ns`: how long a device computed it, where that is known. A step whose launch was
        held up settles late, and the one behind it soon: the time between the two says nothing.
        """
        # A step that was planned during another began no sooner than that one ended.
        took = now - max(step.planned_at, self._settled_at)
        self._settled_at = now
        self._under_way -= 1
        self.prompts.note(step.prompt_tokens, took)
        if step.prompt_tokens:
            if self.gaps is not None and took > 0:
                self.gaps.note(step.size, computed_ns or took)
            return
        plan = step.plan
        if self._drafting is not None:
            n = plan.drafts
            self._drafting.note(plan.tokens, took - drafting_ns, drafts=n > 0, gap=step.gap)
            if drafting_ns:
                most = max(step.drafts_of(row) for row, _ in step.drafting)
                self._drafting.note_finding(-(-n // most), most, drafting_ns)
        # Of others it is not known which part of them is forced tokens'.
        if self._forced is not None and plan.r_masked.any() and not step.drafting:
            self._forced.note(plan.tokens, took, drafts=len(step.forced) > 0, gap=None)


class PromptTimes:
    """A lower bound of the time that a prompt takes.

    Requests are dropped by it, so it must never be too high. It uses the fastest recent steps,
    takes a larger step to last at least as long as a smaller one did, counts the prompt's own steps
    alone (not the queue before it, whose sequences may end early), and halves the sum. Sizes of
    steps that have not been measured often enough count as 0.

    Args:
        prefill_tokens: prompt tokens that one step takes.
    """

    def __init__(self, prefill_tokens: int) -> None:
        self._prefill_tokens = prefill_tokens
        #: Steps of 2**k to 2**(k + 1) - 1 prompt tokens at k.
        self._sizes = [_Fastest() for _ in range(prefill_tokens.bit_length())]

    def note(self, prompt_tokens: int, took: int) -> None:
        """A step with so many prompt tokens (0: it does not count) took so long."""
        if prompt_tokens:
            size = min(prompt_tokens.bit_length(), len(self._sizes)) - 1
            self._sizes[size].add(took)

    def least(self, prompt_tokens: int) -> int:
        """What a prompt's computation surely takes; 0 if nothing is known."""
        steps, rest = divmod(prompt_tokens, self._prefill_tokens)
        return (steps * self._step(self._prefill_tokens) + self._step(rest)) // 2

    def _step(self, prompt_tokens: int) -> int:
        """A step of this size: no faster than the fastest of any smaller one."""
        count = len(self._sizes)
        if prompt_tokens < self._prefill_tokens:
            # Those whose largest step is not larger than this one.
            count = (prompt_tokens + 1).bit_length() - 1
        return max((fastest.value for fastest in self._sizes[:count]), default=0)


class _Fastest:
    """The least of the last 64 to 128 values."""

    __slots__ = ("_before", "_count", "_now")

    def __init__(self) -> None:
        self._before: int | None = None
        self._now = 0
        self._count = 0

    def add(self, value: int) -> None:
        self._now = min(self._now, value) if self._count else value
        self._count += 1
        if self._count == _WINDOW:
            self._before, self._count = self._now, 0

    @property
    def value(self) -> int:
        """0 while too few are known."""
        if self._before is None:
            return self._now if self._count >= _ENOUGH else 0
        return min(self._before, self._now) if self._count else self._before
