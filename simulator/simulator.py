"""Serves a trace by the scheduler itself, under a virtual clock.

    arrivals --submit--> scheduler --plan--> MachineTimes --the clock moves--> settle

The turns are those of `engine.loop.EngineLoop`: with `overlap` a step is planned while the one
before runs. A request ends after as many tokens as its trace says, by an end of text that comes
then. Nothing is random but what the policies draw, with seeds of their own.

Runs of steps in which nobody arrives, joins, computes a prompt, ends or needs slots beyond its room
are taken in one jump (`SkippingScheduler.skip`); what comes out is the same as step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tokenpod.core.outputs import Load
from tokenpod.core.plan import StepPlan
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.scheduler import Step
from tokenpod.scheduler.steps.machine_times import Ints, MachineTimes, StepSize
from tokenpod.simulator.skipping import SkippingScheduler
from tokenpod.simulator.token_times import TokenTimes
from tokenpod.simulator.trace import Arrival

#: Tokens of outputs are `PLAIN`, 0, or the last one, 1; prompts have others.
_END, _FIRST_OWN = 1, 2
_END_OF_TEXT = frozenset({_END})
#: Prompts that begin alike have tokens from here on.
_PREFIXES = 1 << 30
_SECOND = 1_000_000_000


@dataclass(slots=True)
class Outcome:
    """What became of a trace. Times are nanoseconds from its beginning."""

    arrivals: list[Arrival]
    #: By request: when its first step was planned; when each of its tokens came.
    began: Ints
    tokens: list[Ints]
    #: Requests that could never fit.
    refused: set[int]
    #: Prompt tokens that were found in the prefix cache.
    cached: Ints
    load: Load
    steps: int
    #: Of these, the ones that were taken in jumps.
    skipped: int
    #: Tokens that were computed again after a preemption.
    wasted_tokens: int
    #: Slots in use, as a part of all: the mean over time, and the most.
    mean_use: float
    most_use: float
    end: int


@dataclass(slots=True)
class _Flying:
    step: Step
    end: int
    size: StepSize
    #: Steps like this one that were skipped after it.
    later: int = 0


@dataclass(slots=True)
class Simulator:
    """One run.

    Args:
        scheduler: fresh, with the policies that are to be tried.
        step_times: of the machine.
        arrivals: by their time.
        max_new_tokens: of requests that don't say.
        max_input_tokens: a request with a longer prompt is refused; None: what fits is served.
        overlap: a step is planned while the one before runs.
        copy_seconds: of a token's keys and values, to the host's memory or from it.
        jumps: take uneventful runs of steps at once.
        on_step: called with each step that has settled, and when; with `jumps` not for skipped
            ones.
    """

    scheduler: SkippingScheduler
    step_times: MachineTimes
    arrivals: list[Arrival]
    max_new_tokens: int
    max_input_tokens: int | None = None
    overlap: bool = False
    copy_seconds: float = 0.0
    jumps: bool = True
    on_step: Callable[[Step, int], None] | None = None
    _now: int = 0
    _next: int = 0
    _flying: _Flying | None = None
    _came: TokenTimes = field(default_factory=TokenTimes)
    _began: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _refused: set[int] = field(default_factory=set)
    _prompt_tokens: int = 0
    #: When the queue of copies is empty, and when those of steps have come in.
    _copied: int = 0
    _coming: deque[tuple[int, int]] = field(default_factory=deque)
    _steps: int = 0
    _skipped: int = 0
    _use: float = 0.0
    _most_used: int = 0
    #: By place in the scheduler's table: the request's outputs, and its number.
    _due: Ints = field(default_factory=lambda: np.zeros(64, np.int64))
    _whose: Ints = field(default_factory=lambda: np.zeros(64, np.int64))

    def run(self) -> Outcome:
        """Serve all requests."""
        assert self._next == 0, "a simulator runs once"
        while self._turn():
            pass
        return self._outcome()

    # -- a turn --------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """One turn of the loop; False if all is over."""
        self._arrive()
        if self.jumps and self._flying is not None and self._jump(self._flying):
            self._arrive()
        step = self.scheduler.plan(self._now)
        previous, self._flying = self._flying, None
        if step is not None:
            self._launch(step, previous)
        if previous is not None:
            self._settle(previous)
        if not self.overlap and self._flying is not None:
            flying = self._flying
            self._settle(flying)
            # A step that may be followed by others like it is looked at in the next turn.
            self._flying = None
            if self.jumps:
                self._jump_behind(flying)
        if step is None and previous is None:
            if self._next == len(self.arrivals):
                assert not self.scheduler.busy, "requests that can never go on"
                return False
            self._now = max(self._now, self._due_at(self._next))
        return True

    def _arrive(self) -> None:
        while self._next < len(self.arrivals) and self._due_at(self._next) <= self._now:
            number = self._next
            self._next += 1
            arrival = self.arrivals[number]
            if arrival.prompt_tokens > (self.max_input_tokens or arrival.prompt_tokens):
                self._refused.add(number)
                continue
            most = max(arrival.max_new_tokens or self.max_new_tokens, 1)
            ends_itself = arrival.output_tokens < most
            stopping = StoppingParams(most, eos_token_ids=_END_OF_TEXT if ends_itself else _NONE)
            self.scheduler.submit(
                Request(
                    [number],
                    _prompt(number, arrival),
                    SamplingParams(),
                    stopping,
                    priority=arrival.priority,
                    arrived_at=self._now,
                )
            )
            if (place := self.scheduler.place_of(number)) is None:
                self._refused.add(number)
            else:
                while place >= len(self._due):
                    self._due = np.concatenate((self._due, np.zeros_like(self._due)))
                    self._whose = np.concatenate((self._whose, np.zeros_like(self._whose)))
                self._due[place], self._whose[place] = min(arrival.output_tokens, most), number

    def _due_at(self, number: int) -> int:
        return round(self.arrivals[number].at * _SECOND)

    def _launch(self, step: Step, previous: _Flying | None) -> None:
        size = step.size
        begin = self._copy(step.plan, max(self._now, previous.end if previous else 0))
        self._flying = _Flying(step, begin + self.step_times.nanoseconds(size), size)
        self._steps += 1
        self._prompt_tokens += step.prompt_tokens
        used = self.scheduler.slots_in_use
        self._use += float((self._flying.end - begin) * used)
        self._most_used = max(self._most_used, used)

    def _copy(self, plan: StepPlan, begin: int) -> int:
        """When a step begins whose copies are queued then: later, if it waits for some."""
        if len(plan.copy_from):
            each = round(_SECOND * self.copy_seconds)
            self._copied = max(self._copied, begin) + each * len(plan.copy_from)
            if plan.copy_from[-1] > self.scheduler.kv.total:
                self._coming.append((plan.step, self._copied))
        for behind in plan.awaited.tolist():
            while self._coming and self._coming[0][0] <= plan.step - behind:
                begin = max(begin, self._coming.popleft()[1])
        return begin

    @property
    def _arrived(self) -> int | None:
        """The last step whose copies are there; None: all are."""
        while self._coming and self._coming[0][1] <= self._now:
            self._coming.popleft()
        return self._coming[0][0] - 1 if self._coming else None

    def _settle(self, flying: _Flying) -> None:
        self._now = flying.end
        step, plan = flying.step, flying.step.plan
        outputs, due = plan.r_output + (flying.later + 1), self._due[step.places]
        places = step.places
        if plan.sampling < plan.rows:
            sampled = plan.r_samples > 0
            places, outputs, due = places[sampled], outputs[sampled], due[sampled]
        # What comes after the last token is surplus.
        whose = self._whose[places[outputs <= due]]
        if len(whose):
            self._came.step(self._now, whose)
        # `PLAIN`, or `_END`.
        tokens = (outputs == due).astype(np.int64)
        settled = self.scheduler.settle_plain(step, tokens, self._now, arrived=self._arrived)
        for started in settled.started:
            self._began[started.sequence_id] = started.began_at
            self._cached[started.sequence_id] = started.cached_tokens
        if self.on_step is not None:
            self.on_step(step, self._now)

    # -- jumps ---------------------------------------------------------------------------------

    def _jump(self, flying: _Flying) -> bool:
        """With overlap: settle the step in flight, and some like it, and let the last one fly."""
        steps = self._quiet(flying)
        if steps < 1:
            return False
        times = self.step_times.run(_grown(flying.size, 1), steps)
        # Turn j settles the step that ends at ends[j], and is planned when the one before ended.
        ends = flying.end + np.concatenate((_ZERO, times.cumsum()))
        steps = min(steps, self._before_arrival(ends[:-1]))
        self._skip(flying, ends[:steps], times[:steps])
        self._now = int(ends[steps - 1])
        flying.end = int(ends[steps])
        flying.later += steps
        flying.size = _grown(flying.size, steps)
        return True

    def _jump_behind(self, settled: _Flying) -> None:
        """Without overlap: take some more steps like the one that has settled."""
        steps = self._quiet(settled)
        if steps < 1:
            return
        times = self.step_times.run(_grown(settled.size, 1), steps)
        ends = self._now + times.cumsum()
        steps = min(steps, self._before_arrival(ends))
        if steps < 1:
            return
        self._skip(settled, ends[:steps], times[:steps])
        self._now = int(ends[steps - 1])

    def _before_arrival(self, ends: Ints) -> int:
        """Steps that are planned before somebody arrives: the first one is planned now."""
        if self._next == len(self.arrivals):
            return len(ends)
        due = self._due_at(self._next)
        return 0 if due <= self._now else 1 + int(ends.searchsorted(due))

    def _quiet(self, flying: _Flying) -> int:
        """How many more steps hold the rows of this one, each with a token that ends nothing."""
        step = flying.step
        if step.prompt_tokens:
            return 0
        left = self._due[step.places] - (step.plan.r_output + flying.later + 1)
        return self.scheduler.quiet_steps(step, int(left.min()) - 1)

    def _skip(self, flying: _Flying, ends: Ints, times: Ints) -> None:
        steps = len(ends)
        self.scheduler.skip(flying.step, steps)
        self._came.steps(ends, self._whose[flying.step.places])
        self._steps += steps
        self._skipped += steps
        # What is in use now is what the last of these steps has.
        used = self.scheduler.slots_in_use
        each = used - flying.size.rows * np.arange(steps)[::-1]
        self._use += float((times * each).sum())
        self._most_used = max(self._most_used, used)

    # -- the end -------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        count = len(self.arrivals)
        load = self.scheduler.load()
        first = load.prompt_tokens - load.cached_tokens
        began = np.full(count, -1, np.int64)
        cached = np.zeros(count, np.int64)
        began[list(self._began)] = list(self._began.values())
        cached[list(self._cached)] = list(self._cached.values())
        slots = self.scheduler.limits.slots
        return Outcome(
            arrivals=self.arrivals,
            began=began,
            tokens=self._came.by_request(count),
            refused=self._refused,
            cached=cached,
            load=load,
            steps=self._steps,
            skipped=self._skipped,
            wasted_tokens=self._prompt_tokens - first,
            mean_use=self._use / max(self._now, 1) / slots,
            most_use=self._most_used / slots,
            end=self._now,
        )


_NONE: frozenset[int] = frozenset()
_ZERO = np.zeros(1, np.int64)


def _prompt(number: int, arrival: Arrival) -> list[int]:
    """Tokens that begin as those of its prefix's other requests, and go on as no other's."""
    shared = min(arrival.prefix_tokens, arrival.prompt_tokens)
    own = arrival.prompt_tokens - shared
    return [_PREFIXES + arrival.prefix_id % _PREFIXES] * shared + [_FIRST_OWN + number] * own


def _grown(size: StepSize, steps: int) -> StepSize:
    """What the step holds that comes so many steps later."""
    return StepSize(size.rows, size.context + steps * size.rows)
