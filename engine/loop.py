"""The step loop.

    each turn:
      take messages          requests, aborts, router steps; wait only when there is nothing to do
      plan the next step     needs lengths, not the token values of the step in flight
      launch it
      settle the last one    append tokens, find what has ended, publish one message

With `overlap` the device computes step n + 1 while step n is settled here; a CPU has nobody to
overlap with, so the same turn settles at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tokenpod.core.images import DropImages, EncodeImages
from tokenpod.core.messages import (
    Abort,
    Advance,
    Ask,
    EngineOptions,
    FlushCache,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
    Vocabulary,
    WatchCache,
)
from tokenpod.core.outputs import Advanced, Load, Started, StepCounts, StepOutputs, Top, Vectors
from tokenpod.core.requests import Request
from tokenpod.engine.adapters.adapters import Adapters, no_adapters
from tokenpod.engine.constraints.masked_steps import MaskedSteps
from tokenpod.engine.exchange import Face
from tokenpod.engine.idle_check import IdleCheck
from tokenpod.engine.images.image_encoder import ImageEncoder, no_images
from tokenpod.engine.sampling.prompt_scores import PromptScores
from tokenpod.engine.steps.executor import CapturesLater, Launched, Launcher, StepResult
from tokenpod.scheduler.scheduler import Scheduler, Settled, Step

if TYPE_CHECKING:
    from tokenpod.engine.gpu.late_kernels import LateKernels

_NAP_SECONDS = 0.01
#: The same where all that is here waits for masks, to be compiled, or for images.
_MASK_SECONDS = 0.0005
#: Messages that a turn takes: the device must not wait until all of a burst have been.
_MOST_TAKEN = 128
_PULSE_NS = 1_000_000_000
#: No sequence has this id.
_NOBODY = -1


@dataclass(slots=True)
class _OpTimes:
    began: int
    forward_ns: int = 0
    sample_ns: int = 0


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: Step
    launched: Launched
    launched_at: int


@dataclass(slots=True)
class EngineLoop:
    """Turns messages into steps, and steps into messages, until the link closes.

    Args:
        clock: nanoseconds, of the clock that requests' deadlines are on.
    """

    link: Face
    scheduler: Scheduler
    executor: Launcher
    overlap: bool = False
    clock: Callable[[], int] = time.monotonic_ns
    #: None: there are none, and none can be loaded.
    adapters: Adapters | None = None
    #: Computes rows of images.
    images: ImageEncoder = field(default_factory=no_images)
    #: Brings masks; None: requests have no constraints.
    masked: MaskedSteps | None = None
    #: Of a GPU: kernels that are compiled while serving.
    late: LateKernels | None = None
    #: Captures steps while there is nothing else to do; None: there are none to be captured.
    captures: CapturesLater | None = None
    #: The same, once a request has had a constraint.
    _masking: MaskedSteps | None = None
    _settled: int = 0
    #: Messages that have come and wait for the next turn.
    _untaken: list[ToEngine] = field(default_factory=list)
    #: The tower of images computes before the next prompts do.
    _images_next: bool = False
    #: The last plan was empty: nothing that is here can run.
    _stuck: bool = False
    _sent_at: int = 0
    #: The load that was last sent, and whether it was in this turn.
    _sent_load: Load | None = None
    _load_sent: bool = False
    #: An `Ask` waits for its answer.
    _asked: bool = False
    _flying: _InFlight | None = None
    _counts: StepCounts = field(default_factory=StepCounts)
    #: When the last step settled: steps overlap, and their common time counts once.
    _settled_at: int = 0
    _ops: dict[int, _OpTimes] = field(default_factory=dict)
    #: Scores of prompts under way, by sequence id.
    _scored: dict[int, PromptScores] = field(default_factory=dict)
    _check: IdleCheck = field(init=False)

    def __post_init__(self) -> None:
        self._check = IdleCheck(self.scheduler, self.clock)

    def run(self) -> None:
        """Turn until the other side closes the link (raises LinkClosed).

        Raises EngineError if the scheduler's state is inconsistent.
        """
        while True:
            self.turn()

    @property
    def pace(self) -> AbstractContextManager[None]:
        """In which this thread waits: who reads adapters then works."""
        return nullcontext() if self.adapters is None else self.adapters.pace

    def turn(self) -> None:
        """One turn; waits for messages if there is nothing else to do."""
        patience = 0.0 if self._untaken else self._patience()
        with self.pace if patience != 0.0 else nullcontext():
            self._untaken += self.link.receive(patience)
        messages, self._untaken = self._untaken[:_MOST_TAKEN], self._untaken[_MOST_TAKEN:]
        if not messages and self._idle:
            if self.captures is None:
                self._check.run(self._settled)
            elif not self.captures.capture_next():
                self.captures = None
        for message in messages:
            self._take(message)
        if self.adapters is not None:
            self.adapters.settle()
        if self.images.busy:
            self.images.settle()
        if self._masking is not None:
            self._masking.look(self.scheduler)
        self._load_sent = False
        previous, self._flying = self._flying, None
        # What waits for the step in flight to settle (rows with drafts) can run after that.
        self._stuck = not self._launch() and previous is None
        if previous is not None:
            self._settle(previous)
        if self._flying is not None and self._masking is not None:
            self._masking.sample(self._flying.step, self._flying.launched)
        prompts = self._flying is not None and self._flying.step.prompt_tokens > 0
        if self._flying is not None and not self.overlap:
            flying, self._flying = self._flying, None
            self._settle(flying)
        if self.images.waiting:
            self._encode(beside_prompts=prompts)
        self._publish_events()

    def _encode(self, *, beside_prompts: bool) -> None:
        """Let the tower of images compute: while streams decode, by turns with prompts."""
        self._images_next = beside_prompts and self.scheduler.streams_wait
        if not self._images_next:
            self.images.compute(self.scheduler.beside_steps)

    def _patience(self) -> float | None:
        """Seconds to wait for messages; None: for ever."""
        if self._flying is not None or not (self._stuck or not self.scheduler.busy):
            return 0.0
        if self.images.waiting:
            return 0.0
        if self._idle and self.captures is not None:
            return 0.0
        masks = self._masking is not None and self.scheduler.waiting_for_masks
        if masks or self.images.busy:
            return _MASK_SECONDS
        # What is queued and cannot run waits for a router to let go, or for its own deadline.
        return self._check.patience(self._settled) if self._idle else _NAP_SECONDS

    @property
    def _idle(self) -> bool:
        """Whether there is nothing to do until a message comes."""
        reading = self.adapters is not None and self.adapters.busy
        reading = reading or self.images.busy
        return self._flying is None and not self.scheduler.busy and not reading

    # -- in ------------------------------------------------------------------------------------

    def _take(self, message: ToEngine) -> None:
        match message:
            case Request():
                request = message
                if request.images is not None:
                    request = self.images.given(request)
                self._begin([request])
                self.scheduler.submit(request)
            case Abort():
                self.scheduler.abort(message.sequence_ids, stopped=message.stopped)
                if self._masking is not None:
                    self._masking.forget(message.sequence_ids)
                for sequence_id in message.sequence_ids:
                    self._scored.pop(sequence_id, None)
            case Advance():
                self._advance(message)
            case Ask():
                self._asked = True
            case WatchCache():
                self.scheduler.watch_cache(wanted=message.wanted)
            case FlushCache():
                self.scheduler.flush_cache()
            case LoadAdapter() | UnloadAdapter():
                self._change_adapters(message)
            case EncodeImages():
                self.images.take(message)
            case DropImages():
                self.images.drop(message)
            case Vocabulary():
                if self.masked is not None:
                    self.masked.learn(message)
            case EngineOptions():
                raise ValueError("EngineOptions is the first message only")

    def _change_adapters(self, wanted: LoadAdapter | UnloadAdapter) -> None:
        if self.adapters is None:
            self.link.send(no_adapters(wanted))
        elif isinstance(wanted, LoadAdapter):
            self.adapters.load(wanted)
        else:
            self.adapters.unload(wanted)

    def _begin(self, requests: list[Request]) -> None:
        """Let constraints of new requests be compiled."""
        for request in requests:
            if request.constraint is not None:
                assert self.masked is not None, "this engine has no constraints"
                self._masking = self.masked
                self._masking.begin(request)

    def _advance(self, op: Advance) -> None:
        now = self.clock()
        if any(request.images is not None for request in op.start):
            op = msgspec.structs.replace(op, start=[*map(self.images.given, op.start)])
        failure = self.scheduler.advance(op)
        if failure is None:
            self._begin(op.start)
            self._ops[op.op] = _OpTimes(began=now)
        else:
            self._publish(Settled(), advanced=[Advanced(op.op, failure=failure)])

    # -- a step --------------------------------------------------------------------------------

    def _launch(self) -> bool:
        """Plan the next step and launch it, if there is one."""
        now = self.clock()
        step = self.scheduler.plan(now, prompts=not (self._images_next and self.images.waiting))
        if step is None:
            return False
        if self._masking is not None:
            self._masking.prepare(step)
        self._flying = _InFlight(step, self.executor.launch(step.plan), now)
        return True

    def _settle(self, flying: _InFlight) -> None:
        with self.pace:
            result = flying.launched.wait()
        if self._masking is not None:
            self._masking.forwarded(result.forward_ns)
        for times in self._ops.values():
            times.forward_ns += result.forward_ns
            times.sample_ns += result.sample_ns
        for at, scores in result.scored.items():
            sequence = flying.step.sequences[at]
            if not sequence.dead:
                # A prompt that was preempted half-way is scored again from its beginning.
                start, before = int(flying.step.plan.r_start[at]), self._scored.get(sequence.id)
                # Virtual tokens are not the client's: what follows them is published to nobody.
                start -= sequence.request.virtual_tokens
                scores, start = scores.behind(-start), max(start, 0)
                self._scored[sequence.id] = before.continued(start, scores) if before else scores
        tops = {index: (ids, values) for index, ids, values in result.tops}
        now = self.clock()
        vectors, spoiled = _vectors(flying.step, result)
        settled = self.scheduler.settle(
            flying.step,
            result.tokens,
            now,
            tops,
            drafting_ns=result.drafting_ns,
            arrived=result.arrived,
            spoiled=spoiled,
            computed_ns=result.forward_ns + result.sample_ns if self.overlap else None,
        )
        self._count(flying, now, len(settled.token_ids))
        self._settled = flying.step.plan.step
        satisfied = self._satisfied(settled)
        if self.overlap and self._flying is None:
            # All that runs has waited for these tokens: the device must not wait for messages, too.
            self._launch()
        self._publish(settled, flying.step, result, satisfied=satisfied, vectors=vectors)

    def _count(self, flying: _InFlight, now: int, generated: int) -> None:
        counts, plan = self._counts, flying.step.plan
        self._counts = StepCounts(
            steps=counts.steps + 1,
            busy_ns=counts.busy_ns + now - max(flying.launched_at, self._settled_at),
            rows=counts.rows + plan.rows,
            tokens=counts.tokens + plan.tokens,
            generated=counts.generated + generated,
            compiled=0 if self.late is None else self.late.count,
        )
        self._settled_at = now

    # -- out -----------------------------------------------------------------------------------

    def _publish_events(self) -> None:
        """Send what happened without a step: refusals, deadlines and time limits in the queue.

        A loop whose work waits for a router to let go of memory says now and then that it is there:
        a restart would not help, though the pod makes no progress. And where no step follows that
        would report the load, because what ran was aborted, it is reported here. So is that we
        are there, to who asked.
        """
        events = self.scheduler.drain_events()
        waits = self._stuck and self.scheduler.busy
        silent = waits and self.clock() - self._sent_at > _PULSE_NS
        stale = self._flying is None and not self._load_sent
        stale = self._asked or (stale and self.scheduler.load() != self._sent_load)
        if events.sequence_ids or events.failures or events.advanced or silent or stale:
            self._publish(events, satisfied=self._satisfied(events))
        if (changes := self.scheduler.cache_events()) is not None:
            self.link.send(changes)

    def _publish(
        self,
        settled: Settled,
        step: Step | None = None,
        result: StepResult | None = None,
        advanced: list[Advanced] | None = None,
        satisfied: dict[int, bool] | None = None,
        vectors: list[Vectors] | None = None,
    ) -> None:
        now = self._sent_at = self.clock()
        self._asked = False
        load = self._sent_load = self.scheduler.load()
        self._load_sent = True
        masks = load.masks if self._masking is None else self._masking.counts
        load = msgspec.structs.replace(load, masks=masks, steps=self._counts)
        logprobs = [0.0] * len(settled.sequence_ids)
        tops: list[Top] = []
        if step is not None and result is not None:
            # A surplus token, sampled after its sequence had ended, is in `result` only.
            logprobs = [
                result.logprobs[sample] if sample >= 0 else settled.logprobs[at]
                for at, sample in enumerate(settled.samples)
            ]
            if result.tops or result.ranks:
                tops = _tops(settled, result)
        finished = [self._with_times(op, now) for op in settled.advanced if op.op in self._ops]
        self.link.send(
            StepOutputs(
                step=self._settled,
                at=now,
                sequence_ids=settled.sequence_ids,
                token_ids=settled.token_ids,
                logprobs=logprobs,
                finishes=[int(finish) for finish in settled.finishes],
                load=load,
                started=[self._with_scores(started) for started in settled.started],
                tops=tops,
                failures=settled.failures,
                advanced=finished + (advanced or []),
                satisfied=satisfied or {},
                drafted=settled.drafted,
                vectors=vectors or [],
            )
        )
        if self._scored:
            self._forget_scores(settled)

    def _satisfied(self, settled: Settled) -> dict[int, bool]:
        """Of sequences that end: whether they conform to their constraints."""
        return self._masking.settled(settled) if self._masking is not None else {}

    def _forget_scores(self, settled: Settled) -> None:
        """A prompt that was being scored may have failed, or run out of time, half-way."""
        over = [i for i, f in zip(settled.sequence_ids, settled.finishes, strict=True) if f]
        for sequence_id in over + [failure.sequence_id for failure in settled.failures]:
            self._scored.pop(sequence_id, None)

    def _with_times(self, op: Advanced, now: int) -> Advanced:
        times = self._ops.pop(op.op)
        return msgspec.structs.replace(
            op,
            forward_ns=times.forward_ns,
            decode_ns=times.sample_ns,
            total_ns=now - times.began,
        )

    def _with_scores(self, started: Started) -> Started:
        scores = self._scored.pop(started.sequence_id, None)
        if scores is None:
            return started
        return msgspec.structs.replace(
            started, prompt_logprobs=scores.logprobs.tolist(), prompt_details=scores.details
        )


def _vectors(step: Step, result: StepResult) -> tuple[list[Vectors], set[int]]:
    """The vectors of a step for sequences that have not ended, and rows where some are no numbers.

    Vectors of those rows are left out.
    """
    found: list[Vectors] = []
    spoiled: set[int] = set()
    for part in result.pooled:
        width, first = part.numbers.shape[1], 0
        numbers = part.numbers.numpy().astype("<f4", copy=False)
        finite = np.isfinite(numbers).all(1).tolist()
        for row, count in zip(part.rows, part.counts, strict=True):
            own = slice(first, first + count)
            first += count
            if not all(finite[own]):
                spoiled.add(row)
            elif not (sequence := step.sequences[row]).dead:
                vectors = numbers[own].tobytes()
                found.append(Vectors(sequence.id, count, width, vectors, part.weights))
    return found, spoiled


def _tops(settled: Settled, result: StepResult) -> list[Top]:
    """Top tokens and ranks of a step, where they were asked for."""
    tops = []
    where = {sample: at for at, sample in enumerate(settled.samples)}
    found = {index: (ids, values) for index, ids, values in result.tops}
    for index in sorted({*found, *(at for at, rank in enumerate(result.ranks) if rank)}):
        # A surplus token, sampled after its sequence had ended, is in `result` only.
        if (at := where.get(index)) is not None:
            rank = result.ranks[index] if result.ranks else 0
            tops.append(Top(at, *found.get(index, ([], [])), rank))
    return tops
