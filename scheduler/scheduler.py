"""Two planners, one step: the in-pod batcher's sequences and a router's run side by side.

The scheduler decides what the next step holds and what its outcome means; it knows lengths, slots
and limits, and nothing of tensors or protocols. A caller may plan step n + 1 before it settles step
n: a plan needs the lengths of sequences, not their tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from types import MappingProxyType

import msgspec

from tokenpod.core.messages import PROBE_TOKENS, Advance, CacheEvents
from tokenpod.core.outputs import Drafted, Ended, Failure, FailureCode, FinishCode, Load, Started
from tokenpod.core.plan import UNSAMPLED
from tokenpod.core.requests import Request
from tokenpod.scheduler.adapter_slots import AdapterSlots
from tokenpod.scheduler.admission import Admission, Ledger
from tokenpod.scheduler.batcher import Batcher
from tokenpod.scheduler.batching import Batching, Mixed
from tokenpod.scheduler.beam_search import Top
from tokenpod.scheduler.beams import Group
from tokenpod.scheduler.blocks import BlockLog
from tokenpod.scheduler.constrained import Constrained
from tokenpod.scheduler.deadlines import Deadlines
from tokenpod.scheduler.drafting import Drafting, Landed
from tokenpod.scheduler.exact import Exact
from tokenpod.scheduler.given import VectorIds
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.pace import Pace
from tokenpod.scheduler.probe import Probes
from tokenpod.scheduler.queue import Planner, Queue
from tokenpod.scheduler.refusals import malformed, never_fits, too_much
from tokenpod.scheduler.routed import Routed
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import END_STATES, EndState, Owner, Sequence
from tokenpod.scheduler.step import Step, StepBuilder
from tokenpod.scheduler.table import Table
from tokenpod.scheduler.work import Limits, Settled

__all__ = ["Limits", "Scheduler", "Settled", "Step"]


class Scheduler:
    """Decides which sequences run next, and where their keys and values are.

    Args:
        limits: the engine's resources.
        admission: makes the admission policy from the table of sequences, the limits, and the
            prompt tokens that every step with prompts is sure to compute.
        batching: makes the batching policy from the limits.
        drafting: makes what decides who has drafts; None: nobody has.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        admission: Callable[[Table, Limits, int], Admission] = Exact,
        batching: Callable[[Limits], Batching] = Mixed,
        drafting: Callable[[KV], Drafting] | None = None,
    ) -> None:
        self.limits = limits
        caching = limits.prefix_caching and limits.sharing
        by_uses = limits.prefix_eviction == "lfu"
        self.kv = KV(limits.slots + PROBE_TOKENS, caching=caching, by_uses=by_uses)
        self._batching = batching(limits)
        self._admission = admission(self.kv.table, limits, self._batching.quantum)
        self._rows = Rows(limits.max_rows)
        self.adapters = AdapterSlots(limits.adapter_slots, limits.adapters)
        self._drafting = drafting(self.kv) if drafting else None
        self._batcher = Batcher(
            self.kv,
            self._rows,
            self._admission,
            self._batching,
            self._requeue,
            self._drafting,
        )
        self._routed = Routed(self._drafting)
        self._probes = Probes(self.kv, self._rows)
        planners: dict[Owner, Planner] = {
            Owner.BATCHER: self._batcher,
            Owner.ROUTER: self._routed,
        }
        self._queue = Queue(
            self.kv,
            self._rows,
            planners,
            ledger=self._ledger,
            joining=lambda waiting: self._batching.joining(self._batcher.running, waiting),
            adapters=self.adapters,
        )
        #: Every sequence that exists, by id.
        self._sequences: dict[int, Sequence] = {}
        self._constrained = Constrained(self._queue.add_again)
        #: Requests that came since `_drop_hopeless` last looked.
        self._new: list[Sequence] = []
        self._vectors = VectorIds()
        self._deadlines = Deadlines()
        self._pace = Pace(limits.prefill_tokens)
        self._settled_at = 0
        self._steps = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._ended: Counter[EndState] = Counter()
        #: Drafted and accepted tokens, by how far behind the last known one they stood.
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        #: Steps that have not settled; and nothing could run since the last one.
        self._under_way, self._rested = 0, True
        self._events = Settled()

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never fit fails at once (see `drain_events`)."""
        problem, code = never_fits(request, self.limits), FailureCode.INVALID_ARGUMENT
        if not problem and not self.adapters.knows(request.adapter):
            problem, code = "its adapter has been unloaded", FailureCode.NOT_FOUND
        if problem:
            for sequence_id in request.sequence_ids:
                self._events.failures.append(Failure(sequence_id, code, problem))
            self._ended[EndState.IGNORED] += 1
            return
        if request.probe:
            self._probes.add(*self._make(request, Owner.PROBE))
            return
        samples = self._make(request, Owner.BATCHER)
        for together in [samples] if self.limits.sharing else [[sample] for sample in samples]:
            self._enqueue(together)
        self._new.append(samples[0])
        self._deadlines.add(request)

    def advance(self, op: Advance) -> Failure | None:
        """Queue a router's step. A failure means that nothing of it exists."""
        failure = malformed(op, self._sequences, self.limits)
        failure = failure or too_much(op, self._routed.waiting_tokens, self.limits)
        if failure is not None:
            return failure
        # A router's request of an adapter that has gone is the base model's, as of any other name.
        known = [
            r if self.adapters.knows(r.adapter) else msgspec.structs.replace(r, adapter=0)
            for r in op.start
        ]
        fresh = [sequence for r in known for sequence in self._make(r, Owner.ROUTER)]
        for sequence in fresh:
            self._enqueue([sequence])
        resumed = [self._sequences[sequence_id] for sequence_id in op.resume]
        self._routed.begin(op, fresh, resumed)
        return None

    def preempt(self, sequence_id: int) -> bool:
        """Take row and slots from a running sequence of the batcher; it is computed again later.

        Tests preempt whomever they like; the admission policy names its victims to the batcher.
        Returns False for every other sequence: waiting, ended, a router's, a probe.
        """
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and not sequence.dead and self._batcher.preempt(sequence)

    def abort(self, sequence_ids: Iterable[int], *, stopped: bool = False) -> None:
        """End sequences: their slots are free at once, or when the step in flight settles.

        `stopped`: their output is complete.
        """
        for sequence_id in sequence_ids:
            if sequence := self._sequences.get(sequence_id):
                self._end(sequence, EndState.STOPPED if stopped else EndState.ABORTED)

    # -- constraints ---------------------------------------------------------------------------

    @property
    def waiting_for_masks(self) -> list[Sequence]:
        """Sequences that can't go on before their next mask is there: see `masked`."""
        return self._constrained.waiting

    def masked(self, sequence_id: int) -> None:
        """The next mask of a sequence is there."""
        self._constrained.masked(sequence_id)

    def end_constrained(self, sequence_id: int, problem: str = "") -> None:
        """End a sequence: its constraint allows nothing more; or with a problem, refuse it.

        A router's ends once the router asks for it, so that it hears of it.
        """
        if sequence := self._sequences.get(sequence_id):
            self._constrained.over[sequence_id] = sequence, problem

    # -- steps ---------------------------------------------------------------------------------

    def plan(self, now: int) -> Step | None:
        """The next step, or None if nothing can run."""
        self._drop_late(now)
        self._drop_hopeless(now)
        self._end_constrained()
        self._queue.admit()
        builder = StepBuilder(self.kv, now)
        self._plan(builder)
        if builder.empty:
            self._rested = self._rested or not self._under_way
            return None
        self._steps += 1
        busy = not (self._rested or self._under_way)
        builder.gap = now - self._settled_at if busy else None
        self._under_way += 1
        self._rested = False
        rows = self._rows
        return builder.finish(
            self._steps, rows.take_fresh(), rows.take_freed(), self.adapters.take_puts()
        )

    def settle(
        self,
        step: Step,
        tokens: Listing[int],
        now: int,
        tops: Mapping[int, Top] = MappingProxyType({}),
    ) -> Settled:
        """Take a step's outcome.

        Args:
            step: as planned; steps settle in the order in which they were planned.
            tokens: one for each sample, row after row; -1: its logits had NaN or Inf;
                `plan.UNSAMPLED`: none was drawn, after a wrong draft or for want of a mask.
            now: in nanoseconds.
            tops: by index into `tokens`: the most likely ones, of rows that are beams.
        """
        settled = Settled()
        if self.kv.table.constrained:
            # What has become of constraints is told no later than the answer to a router's step.
            settled, self._events = self._events, settled
        # A step that was planned during another began no sooner than that one ended.
        took = now - max(step.planned_at, self._settled_at)
        self._pace.note(step.prompt_tokens, took)
        self._settled_at = now
        self._under_way -= 1
        self.kv.table.in_flight[step.places] -= 1
        left = [sequence for sequence in step.sequences if sequence.ended_as is not None]
        drafted = self._drafting.land(step, tokens, took) if self._drafting else {}
        for draft in drafted.values():
            self._routed.taken_back(draft.sequence, draft.wrong)
        self._take_each(step, tokens, tops, drafted, now, settled)
        settled.drafted = [self._counted(draft) for draft in drafted.values()]
        for sequence in left:
            if not sequence.in_flight:
                self._free(sequence)
        self._batcher.settled()
        settled.advanced += self._routed.settle(step)
        return settled

    def drain_events(self) -> Settled:
        """Events without a step since the last call."""
        events, self._events = self._events, Settled()
        events.advanced += self._routed.settle(None)
        return events

    # -- state ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any sequence could be advanced."""
        return bool(
            self._batcher.running
            or len(self._queue)
            or self._routed.ops
            or len(self._probes)
            or self._constrained.held
        )

    @property
    def stalls(self) -> int:
        """Times that a decoding sequence paused for want of a slot: 0 if admission is exact."""
        return self._batcher.stalls

    def load(self) -> Load:
        """The counts that go to the service with every step."""
        return Load(
            running=self._batcher.running + len(self._routed.sequences),
            waiting=len(self._queue) + len(self._constrained.held),
            waiting_tokens=self._queue.tokens + self._constrained.held_tokens,
            slots=self.limits.slots,
            free_slots=max(self.kv.free - PROBE_TOKENS, 0),
            evictable_slots=self.kv.tree.evictable,
            preemptions=self._batcher.preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            evicted_tokens=self.kv.tree.evicted,
            adapters=len(self.adapters.in_use),
            ended=Ended(
                stopped=self._ended[EndState.STOPPED],
                length=self._ended[EndState.LENGTH],
                aborted=self._ended[EndState.ABORTED],
                ignored=self._ended[EndState.IGNORED],
            ),
            drafted_at=[*self._drafted],
            accepted_at=[*self._accepted],
        )

    def watch_cache(self, *, wanted: bool) -> None:
        """Note what changes in the prefix cache from now on, and all that it holds; or stop."""
        tree = self.kv.tree
        tree.log = BlockLog(tree.root()) if wanted else None

    def cache_events(self) -> CacheEvents | None:
        """What has changed in the prefix cache since the last call; None: nothing, or unwatched."""
        log = self.kv.tree.log
        return None if log is None else log.take()

    def flush_cache(self) -> None:
        """Forget every cached prefix that no sequence uses."""
        self.kv.evict(self.kv.tree.tokens)

    def check(self) -> None:
        """Raise AssertionError unless every slot and row is in exactly one place."""
        self.kv.check(self._sequences.values())
        self._rows.check(self._sequences.values())
        self.adapters.check(self._sequences.values())
        promised = sum(s.bound - s.computed for s in self._routed.sequences)
        assert promised == self._routed.reserved, (promised, self._routed.reserved)

    # -- parts ---------------------------------------------------------------------------------

    def _plan(self, builder: StepBuilder) -> None:
        """Add routers' rows, then the batcher's; if both have prompts each gets half the budget.

        Probes have a budget of their own: PROBE_TOKENS.
        """
        batcher, budget = self._batcher, self.limits.prefill_tokens
        self._routed.plan(builder, budget - budget // 2 if batcher.has_prompts else budget)
        slots = self.kv.available - self._routed.reserved - self._probes.reserved
        batcher.plan(builder, budget - builder.prompt_tokens, slots)
        self._probes.plan(builder)

    def _ledger(self) -> Ledger:
        """A ledger with everything that has been admitted."""
        ledger = self._admission.ledger()
        self._batcher.add_to(ledger)
        self._routed.add_to(ledger)
        return ledger

    def _requeue(self, samples: list[Sequence]) -> None:
        for sequence in samples:
            self.adapters.give_back(sequence)
        if samples[0].constrained:
            self._constrained.hold(samples)
        else:
            self._queue.add_again(samples)
        self._queue.freed()

    def _enqueue(self, samples: list[Sequence]) -> None:
        """Queue new samples; under a constraint once it is compiled and has its first mask."""
        self._queue.number(samples)
        if samples[0].constrained:
            self._constrained.hold(samples)
        else:
            self._queue.add_again(samples)

    def _make(self, request: Request, owner: Owner) -> list[Sequence]:
        prompt = self._vectors.prompt_of(request)
        table, samples = self.kv.table, len(request.sequence_ids)
        sequences = [Sequence(request, i, prompt, table, owner) for i in range(samples)]
        self._sequences |= {sequence.id: sequence for sequence in sequences}
        for sequence in sequences:
            self.adapters.enter(sequence)
        if request.beam is not None:
            group = Group(request, request.beam, sequences)
            for sequence in sequences:
                sequence.group = group
        if self._drafting:
            self._drafting.began(sequences)
        return sequences

    def _take_each(
        self,
        step: Step,
        tokens: Listing[int],
        tops: Mapping[int, Top],
        drafted: Mapping[int, Landed],
        now: int,
        settled: Settled,
    ) -> None:
        """Append a step's tokens, and note in `settled` what they mean."""
        for at, (sequence, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if sequence.group is not None:
                self._take_tops(sequence.group, sequence, tops.get(at), now, settled)
            elif token != UNSAMPLED:
                if self._drafting and sequence.id not in drafted:
                    self._drafting.watch(sequence, token)
                self._take(sequence, token, at, now, settled)
            elif sequence.constrained and not sequence.dead:
                self._postpone(sequence)

    def _counted(self, draft: Landed) -> Drafted:
        for counts, n in ((self._drafted, draft.drafted), (self._accepted, draft.accepted)):
            counts += [0] * (draft.drafted - len(counts))
            for at in range(n):
                counts[at] += 1
        return Drafted(draft.sequence.id, draft.drafted, draft.accepted)

    def _take(self, sequence: Sequence, token: int, at: int, now: int, settled: Settled) -> None:
        sequence.keep = sequence.keep and token >= 0
        if sequence.ended_as is not None:
            # Sampled after its end, before that was seen.
            return
        if token < 0 and sequence.constrained and sequence.request.sampling.bad_words:
            # What the mask allows, its bad words forbid; which these are now, the sampler knows.
            self.end_constrained(sequence.id)
            return
        if token < 0:
            self._spoil(sequence, settled)
            return
        finish = sequence.append(token, now)
        if not sequence.proven:
            if len(sequence.outputs) == 1:
                self._start(sequence, settled)
            self._batcher.inputs_proven(sequence)
        settled.sequence_ids.append(sequence.id)
        settled.token_ids.append(token)
        settled.finishes.append(finish)
        settled.samples.append(at)
        if finish:
            self._end(sequence, END_STATES[finish])

    def _postpone(self, sequence: Sequence) -> None:
        """The mask of a row was late: its last position is computed again once it is there."""
        self.kv.take_back(sequence, 1)
        sequence.launched -= 1
        if sequence.owner is Owner.ROUTER:
            self._routed.unsampled(sequence)
        self._constrained.pause(sequence)

    def _take_tops(
        self, group: Group, sequence: Sequence, top: Top | None, now: int, settled: Settled
    ) -> None:
        """Take what the search of a beam needs; once it has that of all beams, they go on."""
        sequence.keep = sequence.keep and top is not None
        if sequence.dead:
            return
        if top is None:
            self._spoil(sequence, settled)
            return
        if not group.take(sequence, top):
            return
        if not group.begun:
            self._start(group.first, settled)
        if parents := group.advance(now):
            self._batcher.branched(group, parents)
            return
        finish = group.report(settled)
        self._end(group.first, END_STATES[finish])

    def _start(self, sequence: Sequence, settled: Settled) -> None:
        """The first token of a sequence has come."""
        settled.started.append(Started(sequence.id, sequence.cached, sequence.began_at))
        if not sequence.stream:
            # Samples share their prompt: it counts once.
            self._prompt_tokens += len(sequence.request.prompt)
            self._cached_tokens += sequence.cached
            if sequence.node is not None:
                self.kv.tree.use(sequence.node)

    def _spoil(self, sequence: Sequence, settled: Settled) -> None:
        problem = "the model computed NaN or Inf for this sequence"
        settled.failures += _failures(sequence, FailureCode.DATA_LOSS, problem)
        self._end(sequence)

    def _drop_late(self, now: int) -> None:
        """End sequences whose deadline or time limit has passed."""
        for sequence_id in self._deadlines.passed(now):
            sequence = self._sequences.get(sequence_id)
            if sequence is None or sequence.dead:
                continue
            if sequence.group is not None:
                sequence = sequence.group.first
            request = sequence.request
            if _passed(request.deadline_at, now):
                problem = "the deadline passed"
                code = FailureCode.DEADLINE_EXCEEDED
                self._events.failures += _failures(sequence, code, problem)
                self._end(sequence)
            elif _passed(request.stopping.time_limit_at, now):
                if sequence.launched:
                    # The next token ends it.
                    continue
                for told in _reported(sequence):
                    self._events.sequence_ids.append(told)
                    self._events.token_ids.append(-1)
                    self._events.finishes.append(FinishCode.TIME_LIMIT)
                self._end(sequence, EndState.LENGTH)
            elif not sequence.began_at:
                self._give_up(request, now, "calls take longer than that now")

    def _drop_hopeless(self, now: int) -> None:
        """End sequences that can't have their first token in time, before it costs anything."""
        new, self._new = self._new, []
        # Others in the queue were checked when they came, and will be again at its head.
        for sequence in (*new, *self._queue.head[:1], *self._batcher.prefilling):
            deadline = sequence.request.deadline_at
            if sequence.dead or sequence.outputs or deadline is None:
                continue
            if now + self._pace.least(sequence.needed) <= deadline:
                continue
            least = self._pace.least(sequence.needed - self.kv.known(sequence))
            if now + least > deadline:
                why = f"the prompt takes {least / 1e9:.3f} s at the least"
                self._give_up(sequence.request, now, why)

    def _end_constrained(self) -> None:
        """End sequences whose constraints allow nothing more, or were refused."""
        for sequence_id, (sequence, problem) in [*self._constrained.over.items()]:
            if sequence.owner is Owner.ROUTER and not self._routed.names(sequence):
                continue
            if problem:
                failure = Failure(sequence_id, FailureCode.INVALID_ARGUMENT, problem)
                self._events.failures.append(failure)
            else:
                self._events.sequence_ids.append(sequence_id)
                self._events.token_ids.append(-1)
                self._events.finishes.append(FinishCode.CONSTRAINT)
            finish = END_STATES[FinishCode.CONSTRAINT]
            self._end(sequence, EndState.IGNORED if problem else finish)

    def _give_up(self, request: Request, now: int, why: str) -> None:
        """End all samples of a request that would be late."""
        left = max((request.deadline_at or now) - now, 0) / 1e9
        problem = f"the deadline can't be met any more: it is {left:.3f} s away, and {why}"
        for sequence_id in request.sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and not sequence.dead:
                code = FailureCode.DEADLINE_EXCEEDED
                self._events.failures += _failures(sequence, code, problem)
                self._end(sequence)

    def _end(self, sequence: Sequence, state: EndState = EndState.ABORTED) -> None:
        if sequence.dead:
            return
        # Of a search the first one last: those that wait for its prompt would be queued again.
        beams = [sequence] if sequence.group is None else reversed(sequence.group.sequences)
        for each in beams:
            self._end_one(each, state)

    def _end_one(self, sequence: Sequence, state: EndState) -> None:
        sequence.ended_as = state
        if sequence.owner is not Owner.PROBE and not self._runs_on(sequence.request):
            self._ended[state] += 1
        if not (self._constrained.forget(sequence) or self._queue.remove(sequence)):
            self._batcher.remove(sequence)
        if not sequence.in_flight:
            self._free(sequence)

    def _runs_on(self, request: Request) -> bool:
        """Whether a sample of a request has not ended."""
        samples = map(self._sequences.get, request.sequence_ids)
        return any(sample is not None and not sample.dead for sample in samples)

    def _free(self, sequence: Sequence) -> None:
        self._admission.ended(sequence)
        if self._drafting:
            self._drafting.forget(sequence)
        self.kv.release(sequence)
        self._rows.give_back(sequence)
        for planner in (self._batcher, self._routed, self._probes):
            planner.released(sequence)
        self._queue.freed()
        self._deadlines.forget(sequence.id)
        del self._sequences[sequence.id]
        self.adapters.leave(sequence)
        sequence.leave()


def _reported(sequence: Sequence) -> list[int]:
    """The ids by which clients hear of a sequence."""
    return [sequence.id] if sequence.group is None else sequence.request.reported


def _failures(sequence: Sequence, code: FailureCode, problem: str) -> list[Failure]:
    return [Failure(told, code, problem) for told in _reported(sequence)]


def _passed(moment: int | None, now: int) -> bool:
    return moment is not None and now >= moment
