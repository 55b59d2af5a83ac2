"""Two planners, one step: the in-pod batcher's sequences and a router's run side by side.

The scheduler decides what the next step holds and what its outcome means; it knows lengths, slots
and limits, and nothing of tensors or wires. A caller may plan step n + 1 before it settles step n:
a plan needs to know how long sequences are, not which tokens they hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listing

from tokenpod.core.messages import (
    PROBE_TOKENS,
    Advance,
    Failure,
    FailureCode,
    FinishCode,
    Load,
    Request,
    Started,
)
from tokenpod.scheduler.batcher import Batcher
from tokenpod.scheduler.deadlines import Deadlines
from tokenpod.scheduler.forecast import Forecast
from tokenpod.scheduler.given import VectorIds
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.pace import Pace
from tokenpod.scheduler.probe import Probes
from tokenpod.scheduler.queue import Planner, Queue
from tokenpod.scheduler.routed import Routed
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Owner, Sequence
from tokenpod.scheduler.step import Step, StepBuilder
from tokenpod.scheduler.work import Limits, Settled

__all__ = ["Limits", "Scheduler", "Settled", "Step"]


#: A router's waiting requests may need so many times the slots in all: it keeps books of its own,
#: and what it has given up for lost may still be here.
_MOST_WAITING = 2


class Scheduler:
    """Who runs next, and where its keys and values live."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.kv = KV(limits.slots + PROBE_TOKENS, caching=limits.prefix_caching)
        self._rows = Rows(limits.max_rows)
        self._batcher = Batcher(limits, self.kv, self._rows, self._requeue)
        self._routed = Routed(limits, self.kv)
        self._probes = Probes(self.kv, self._rows)
        planners: dict[Owner, Planner] = {
            Owner.BATCHER: self._batcher,
            Owner.ROUTER: self._routed,
        }
        self._queue = Queue(limits, self.kv, self._rows, planners, self._forecast)
        #: Every sequence that exists, by id.
        self._sequences: dict[int, Sequence] = {}
        #: Requests that came since `_drop_hopeless` last looked.
        self._new: list[Sequence] = []
        self._vectors = VectorIds()
        self._deadlines = Deadlines()
        self._pace = Pace(limits.prefill_tokens)
        self._settled_at = 0
        self._steps = 0
        self._events = Settled()

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never fit fails at once (see `drain_events`)."""
        problem = self._never_fits(request)
        if problem:
            for sequence_id in request.sequence_ids:
                failure = Failure(sequence_id, FailureCode.INVALID_ARGUMENT, problem)
                self._events.failures.append(failure)
            return
        if request.probe:
            self._probes.add(*self._make(request, Owner.PROBE))
            return
        samples = self._make(request, Owner.BATCHER)
        self._queue.add(samples)
        self._new.append(samples[0])
        self._deadlines.add(request)

    def advance(self, op: Advance) -> Failure | None:
        """Queue a router's step. A failure means that nothing of it exists."""
        if failure := self._malformed(op) or self._too_much(op):
            return failure
        fresh = [sequence for r in op.start for sequence in self._make(r, Owner.ROUTER)]
        for sequence in fresh:
            self._queue.add([sequence])
        resumed = [self._sequences[sequence_id] for sequence_id in op.resume]
        self._routed.begin(op, fresh, resumed)
        return None

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences: their slots are free at once, or when the step in flight settles."""
        for sequence_id in sequence_ids:
            if sequence := self._sequences.get(sequence_id):
                self._end(sequence)

    # -- steps ---------------------------------------------------------------------------------

    def plan(self, now: int) -> Step | None:
        """The next step, or None if nothing can run."""
        self._drop_late(now)
        self._drop_hopeless(now)
        self._queue.admit()
        builder = StepBuilder(self.kv, now)
        self._plan(builder)
        if builder.empty:
            return None
        self._steps += 1
        return builder.finish(self._steps, self._rows.take_fresh(), self._rows.take_freed())

    def settle(self, step: Step, tokens: Listing[int], now: int) -> Settled:
        """Take a step's outcome.

        Args:
            step: as planned; steps settle in the order in which they were planned.
            tokens: one for each row that samples, in order; -1: its logits held NaN or Inf.
        """
        settled = Settled()
        # A step that was planned during another began no sooner than that one ended.
        self._pace.note(step.prompt_tokens, now - max(step.planned_at, self._settled_at))
        self._settled_at = now
        self.kv.table.in_flight[step.places] -= 1
        left = [sequence for sequence in step.sequences if sequence.dead]
        for sequence, token in zip(step.sampled, tokens, strict=True):
            self._take(sequence, token, now, settled)
        for sequence in left:
            if not sequence.in_flight:
                self._free(sequence)
        settled.advanced += self._routed.settle(step)
        return settled

    def drain_events(self) -> Settled:
        """What has happened without a step since the last call."""
        events, self._events = self._events, Settled()
        events.advanced += self._routed.settle(None)
        return events

    # -- state ---------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether requests are queued."""
        return len(self._queue) > 0

    @property
    def busy(self) -> bool:
        """Whether any sequence could be advanced."""
        return bool(
            self._batcher.running or len(self._queue) or self._routed.ops or len(self._probes)
        )

    @property
    def stalls(self) -> int:
        """Times that a decoding sequence had to pause for want of a slot: 0, by admission."""
        return self._batcher.stalls

    def load(self) -> Load:
        """What the engine holds."""
        return Load(
            running=self._batcher.running + len(self._routed.sequences),
            waiting=len(self._queue),
            waiting_tokens=self._queue.tokens,
            slots=self.limits.slots,
            free_slots=max(self.kv.free - PROBE_TOKENS, 0),
            evictable_slots=self.kv.tree.evictable,
        )

    def check(self) -> None:
        """Raise AssertionError unless the books balance."""
        self.kv.check(self._sequences.values())
        assert self._rows.in_use == sum(s.row >= 0 for s in self._sequences.values())
        rows = self._rows.in_use + self._rows.promised + self._rows.free
        assert rows - self._rows.probing == self.limits.max_rows, (rows, self.limits.max_rows)

    # -- parts ---------------------------------------------------------------------------------

    def _plan(self, builder: StepBuilder) -> None:
        """Routers' rows, then the batcher's; while both have prompts each has half the budget.

        Probes have a budget of their own: PROBE_TOKENS.
        """
        batcher, budget = self._batcher, self.limits.prefill_tokens
        self._routed.plan(builder, budget - budget // 2 if batcher.has_prompts else budget)
        batcher.plan(builder, budget - builder.prompt_tokens)
        self._probes.plan(builder)

    def _forecast(self) -> Forecast:
        """The need of everything that has been admitted."""
        forecast = Forecast(self.kv.table, self._batcher.quantum)
        self._batcher.add_to(forecast)
        self._routed.add_to(forecast)
        return forecast

    def _requeue(self, samples: list[Sequence]) -> None:
        self._queue.add_again(samples)

    def _make(self, request: Request, owner: Owner) -> list[Sequence]:
        prompt = self._vectors.prompt_of(request)
        table, samples = self.kv.table, len(request.sequence_ids)
        sequences = [Sequence(request, i, prompt, table, owner) for i in range(samples)]
        self._sequences |= {sequence.id: sequence for sequence in sequences}
        return sequences

    def _malformed(self, op: Advance) -> Failure | None:
        """What is wrong with a router's step, whatever the load."""
        invalid = FailureCode.INVALID_ARGUMENT
        if len(op.start_chunks) != len(op.start):
            problem = f"{len(op.start)} sequences with {len(op.start_chunks)} pieces of prompts"
            return Failure(-1, invalid, problem)
        new: set[int] = set()
        for request in op.start:
            first, *others = request.sequence_ids
            if others:
                problem = f"a router's request is one sequence, not {len(others) + 1}"
                return Failure(first, invalid, problem)
            if first in new or first in self._sequences:
                return Failure(first, invalid, f"sequence {first} exists already")
            if problem := self._never_fits(request):
                return Failure(first, invalid, problem)
            new.add(first)
        for sequence_id in op.resume:
            sequence = self._sequences.get(sequence_id)
            if sequence is None or sequence.dead or sequence.owner is not Owner.ROUTER:
                problem = f"sequence {sequence_id} is not a router's"
                return Failure(sequence_id, invalid, problem)
        return None

    def _too_much(self, op: Advance) -> Failure | None:
        """Why a router can't have promised so much to its clients."""
        need, slots = sum(map(_bound, op.start)), self.limits.slots
        waiting = self._routed.waiting_tokens
        if need > slots or waiting + need > _MOST_WAITING * slots:
            problem = (
                f"the batch needs {need} tokens of KV cache, and requests that wait {waiting};"
                f" there are {slots} (--max-batch-total-tokens)"
            )
            return Failure(-1, FailureCode.RESOURCE_EXHAUSTED, problem)
        return None

    def _never_fits(self, request: Request) -> str:
        """Why a request is impossible even if nothing else runs, or nothing."""
        samples, limits = len(request.sequence_ids), self.limits
        new_tokens = request.stopping.max_new_tokens
        if not request.prompt or new_tokens < 1:
            return "a request needs at least one prompt token and one new token"
        length = len(request.prompt) + new_tokens
        if length > limits.max_positions:
            return (
                f"prompt and new tokens are {length}; at most {limits.max_positions} are possible"
            )
        # Each sample but the first computes the last prompt token again.
        need = _bound(request) + (samples - 1) * new_tokens
        if need > limits.slots:
            return f"the request needs {need} tokens of KV cache; there are {limits.slots}"
        if samples > limits.max_rows:
            return f"the request has {samples} samples; {limits.max_rows} sequences run at once"
        if request.probe and (samples > 1 or _bound(request) >= PROBE_TOKENS):
            return f"a probe is one sample of less than {PROBE_TOKENS} tokens, not {need}"
        return ""

    def _take(self, sequence: Sequence, token: int, now: int, settled: Settled) -> None:
        sequence.keep = sequence.keep and token >= 0
        if sequence.dead:
            # Sampled after its end, before that was seen.
            return
        if token < 0:
            problem = "the model computed NaN or Inf for this sequence"
            settled.failures.append(Failure(sequence.id, FailureCode.DATA_LOSS, problem))
            self._end(sequence)
            return
        finish = sequence.append(token, now)
        if len(sequence.outputs) == 1:
            settled.started.append(Started(sequence.id, sequence.cached, sequence.began_at))
            self._batcher.prompt_settled(sequence)
        settled.sequence_ids.append(sequence.id)
        settled.token_ids.append(token)
        settled.finishes.append(finish)
        if finish:
            self._end(sequence)

    def _drop_late(self, now: int) -> None:
        """End what has run out of time."""
        for sequence_id in self._deadlines.passed(now):
            sequence = self._sequences.get(sequence_id)
            if sequence is None or sequence.dead:
                continue
            deadline = sequence.request.deadline_at
            if deadline is not None and now >= deadline:
                problem = "the deadline passed"
                failure = Failure(sequence.id, FailureCode.DEADLINE_EXCEEDED, problem)
                self._events.failures.append(failure)
            elif sequence.launched:
                # The next token ends it.
                continue
            else:
                self._events.sequence_ids.append(sequence.id)
                self._events.token_ids.append(-1)
                self._events.finishes.append(FinishCode.TIME_LIMIT)
            self._end(sequence)

    def _drop_hopeless(self, now: int) -> None:
        """End what can't have its first token in time, before it costs one."""
        new, self._new = self._new, []
        # Those in the middle of the queue were looked at when they came, and will be at their turn.
        for sequence in (*new, *self._queue.head[:1], *self._batcher.prefilling):
            deadline = sequence.request.deadline_at
            if sequence.dead or deadline is None:
                continue
            if now + self._pace.least(sequence.prompt_length) <= deadline:
                continue
            least = self._pace.least(sequence.prompt_length - self.kv.known(sequence))
            if now + least <= deadline:
                continue
            problem = (
                f"the deadline can't be met any more: it is {max(deadline - now, 0) / 1e9:.3f} s"
                f" away, and the prompt takes {least / 1e9:.3f} s at the least"
            )
            for sequence_id in sequence.request.sequence_ids:
                other = self._sequences.get(sequence_id)
                if other is not None and not other.dead:
                    failure = Failure(other.id, FailureCode.DEADLINE_EXCEEDED, problem)
                    self._events.failures.append(failure)
                    self._end(other)

    def _end(self, sequence: Sequence) -> None:
        if sequence.dead:
            return
        sequence.dead = True
        if not self._queue.remove(sequence):
            self._batcher.remove(sequence)
        if not sequence.in_flight:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.kv.release(sequence)
        self._rows.give_back(sequence)
        for planner in (self._batcher, self._routed, self._probes):
            planner.released(sequence)
        self._queue.freed()
        self._deadlines.forget(sequence.id)
        del self._sequences[sequence.id]
        sequence.leave()


def _bound(request: Request) -> int:
    """Slots that a request's first sample may come to need."""
    return len(request.prompt) + request.stopping.max_new_tokens - 1
