"""Two planners, one step: the in-pod batcher's sequences and a router's run side by side.

The scheduler decides what the next step holds and what its outcome means; it knows lengths, slots
and limits, and nothing of tensors or protocols. A caller may plan step n + 1 before it settles step
n: a plan needs the lengths of sequences, not their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from types import MappingProxyType

import msgspec

from tokenpod.core.messages import PROBE_TOKENS, Advance, CacheEvents
from tokenpod.core.outputs import Failure, FailureCode, FinishCode, Load
from tokenpod.core.requests import Request
from tokenpod.scheduler.adapter_slots import AdapterSlots
from tokenpod.scheduler.admission import Admission, Ledger
from tokenpod.scheduler.batcher import Batcher
from tokenpod.scheduler.batching import Batching, Mixed
from tokenpod.scheduler.beam_search import Top
from tokenpod.scheduler.beams import Group
from tokenpod.scheduler.blocks import BlockLog
from tokenpod.scheduler.constrained import Constrained
from tokenpod.scheduler.counts import Counts
from tokenpod.scheduler.drafting import Drafting, Landed
from tokenpod.scheduler.ends import finish
from tokenpod.scheduler.exact import Exact
from tokenpod.scheduler.forced import Forced
from tokenpod.scheduler.given import VectorIds
from tokenpod.scheduler.host_kv import HostKV
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.lateness import Lateness
from tokenpod.scheduler.outcomes import Outcomes
from tokenpod.scheduler.pace import Pace
from tokenpod.scheduler.preemption import Always, Preemption
from tokenpod.scheduler.probe import Probes
from tokenpod.scheduler.queue import Planner, Queue
from tokenpod.scheduler.refusals import malformed, never_fits, too_much
from tokenpod.scheduler.routed import Routed
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import END_STATES, EndState, Owner, Sequence
from tokenpod.scheduler.step import Step, StepBuilder
from tokenpod.scheduler.step_times import Costs
from tokenpod.scheduler.table import Table
from tokenpod.scheduler.work import Limits, Settled

_RECOMPUTE = Always(swap=False)

__all__ = ["Limits", "Scheduler", "Settled", "Step"]


class Scheduler:
    """Decides which sequences run next, and where their keys and values are.

    Args:
        limits: the engine's resources.
        admission: makes the admission policy from the table of sequences, the limits, and the
            prompt tokens that every step with prompts is sure to compute.
        batching: makes the batching policy from the limits.
        drafting: makes what decides who has drafts; None: nobody has.
        preemption: decides who is swapped to the host's memory.
        forced_costs: decides whether forced tokens are taken together; None: always.
    """

    #: What takes the tokens of steps.
    _OUTCOMES = Outcomes

    def __init__(
        self,
        limits: Limits,
        *,
        admission: Callable[[Table, Limits, int], Admission] = Exact,
        batching: Callable[[Limits], Batching] = Mixed,
        drafting: Callable[[KV], Drafting] | None = None,
        preemption: Preemption = _RECOMPUTE,
        forced_costs: Costs | None = None,
    ) -> None:
        self.limits = limits
        caching = limits.prefix_caching and limits.sharing
        by_uses = limits.prefix_eviction == "lfu"
        slots = limits.slots + PROBE_TOKENS
        host = None
        if limits.host_slots:
            # The slot behind the pool's last one takes padding.
            host = HostKV(
                limits.host_slots,
                first=slots + 1,
                caching=caching,
                least=limits.host_least,
                block=limits.host_block,
            )
        self.kv = KV(slots, caching=caching, by_uses=by_uses, host=host)
        self._batching = batching(limits)
        self._admission = admission(self.kv.table, limits, self._batching.quantum)
        self._rows = Rows(limits.max_rows)
        self.adapters = AdapterSlots(
            limits.adapter_slots, limits.adapters, limits.adapter_heads, limits.whole_adapters
        )
        #: Tokens that constraints force.
        self.forced = Forced(self._rows, limits.forced, forced_costs)
        self._drafting = drafting(self.kv) if drafting else None
        self._batcher = Batcher(
            self.kv,
            self._rows,
            self._admission,
            self._batching,
            self._requeue,
            self.forced,
            self._drafting,
            swaps=lambda sequence: preemption.swaps(sequence, self._alive(sequence.request)),
        )
        self._routed = Routed(self._rows, self.forced, self._drafting)
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
            swapped_first=preemption.swapped_first,
        )
        #: Every sequence that exists, by id.
        self._sequences: dict[int, Sequence] = {}
        self._constrained = Constrained(self._queue.add_again)
        self._vectors = VectorIds()
        self._pace = Pace(limits.prefill_tokens)
        self._counts = Counts()
        self._late = Lateness(
            self._sequences, self.kv, self._queue, self._batcher, pace=self._pace, end=self._end
        )
        self._outcomes = self._OUTCOMES(
            self.kv,
            self._batcher,
            self._routed,
            self._constrained,
            self._drafting,
            counts=self._counts,
            end=self._end,
            refuse=self.end_constrained,
        )
        self._settled_at = 0
        self._steps = 0
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
            self._counts.end(EndState.IGNORED)
            return
        if request.probe:
            self._probes.add(*self._make(request, Owner.PROBE))
            return
        samples = self._make(request, Owner.BATCHER)
        for together in [samples] if self.limits.sharing else [[sample] for sample in samples]:
            self._enqueue(together)
        self._late.add(samples[0])

    def advance(self, op: Advance) -> Failure | None:
        """Queue a router's step. A failure means that nothing of it exists."""
        failure = malformed(op, self._sequences, self.limits)
        failure = failure or too_much(op, self._routed.waiting_tokens, self.limits)
        if failure is not None:
            return failure
        # A router's request of an adapter that has gone is the base model's, as of any other name.
        known = [r if self.adapters.knows(r.adapter) else _of_base(r) for r in op.start]
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
        self._late.drop(now, self._events)
        self._end_constrained()
        # Nothing comes back in a step in which something has to go.
        if not self._queue.swapped or not self._batcher.lacks_room(self._slots_for_batcher):
            self._queue.admit()
        builder = StepBuilder(self.kv, now)
        host = self.kv.host
        if host is not None:
            host.step = self._steps + 1
        self._plan(builder)
        if builder.empty and host is not None and host.flying:
            # There is nothing else to compute: the step waits for the copies.
            self._land(host, self._steps + 1)
            self._plan(builder)
            assert host.issued or not builder.empty, "copies to slots that may have gone"
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
            self._steps,
            rows.take_fresh(),
            rows.take_freed(),
            self.adapters.take_puts(),
            self._ready(),
        )

    def settle(
        self,
        step: Step,
        tokens: Listing[int],
        now: int,
        tops: Mapping[int, Top] = MappingProxyType({}),
        drafting_ns: int = 0,
        arrived: int | None = None,
    ) -> Settled:
        """Take a step's outcome.

        Args:
            step: as planned; steps settle in the order in which they were planned.
            tokens: one for each sample, row after row; -1: its logits had NaN or Inf;
                `plan.UNSAMPLED`: none was drawn, after a wrong draft or for want of a mask.
            now: in nanoseconds.
            tops: by index into `tokens`: the most likely ones, of rows that are beams.
            drafting_ns: what the executor has taken to find drafts.
            arrived: the last step whose copies from the host's memory are there; None: all are.
        """
        settled = Settled()
        if self.kv.table.constrained:
            # What has become of constraints is told no later than the answer to a router's step.
            settled, self._events = self._events, settled
        # A step that was planned during another began no sooner than that one ended.
        took = now - max(step.planned_at, self._settled_at)
        self._pace.note(step.prompt_tokens, took)
        self.forced.settled(step, took)
        self._settled_at = now
        self._under_way -= 1
        self.kv.table.in_flight[step.places] -= 1
        left = [sequence for sequence in step.sequences if sequence.ended_as is not None]
        drafted: dict[int, Landed] = {}
        if self._drafting:
            drafted = self._drafting.land(step, tokens, took, drafting_ns)
        for draft in drafted.values():
            self._routed.taken_back(draft.sequence, draft.wrong)
        self._outcomes.take_each(step, tokens, tops, drafted, now, settled)
        settled.drafted = [self._outcomes.counted(draft) for draft in drafted.values()]
        for sequence in left:
            if not sequence.in_flight:
                self._free(sequence)
        self._batcher.settled()
        if self.kv.host is not None:
            self._land(self.kv.host, step.plan.step if arrived is None else arrived)
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
        load = Load(
            running=self._batcher.running + len(self._routed.sequences),
            waiting=len(self._queue) - self._queue.swapped + len(self._constrained.held),
            waiting_tokens=self._queue.tokens + self._constrained.held_tokens,
            slots=self.limits.slots,
            free_slots=max(self.kv.free - PROBE_TOKENS, 0),
            evictable_slots=self.kv.tree.evictable,
            preemptions=self._batcher.preemptions,
            prompt_tokens=self._counts.prompt_tokens,
            cached_tokens=self._counts.cached_tokens,
            evicted_tokens=self.kv.tree.evicted,
            adapters=len(self.adapters.in_use),
            swapped=self._queue.swapped,
            ended=self._counts.ended,
            drafted_at=[*self._counts.drafted],
            accepted_at=[*self._counts.accepted],
        )
        host = self.kv.host
        return load if host is None else msgspec.structs.replace(load, **host.counts)

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
        self.kv.flush()

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
        batcher.plan(builder, budget - builder.prompt_tokens, self._slots_for_batcher)
        self._probes.plan(builder)

    @property
    def _slots_for_batcher(self) -> int:
        return self.kv.available - self._routed.reserved - self._probes.reserved

    def _land(self, host: HostKV, step: int) -> None:
        """Copies of steps up to this one have arrived, or are waited for."""
        landed = host.land(step)
        for sequence in landed:
            if sequence.dead and not sequence.in_flight:
                self._free(sequence)
        if landed:
            self._batcher.settled()
            self._queue.freed()

    def _ledger(self) -> Ledger:
        """A ledger with everything that has been admitted."""
        ledger = self._admission.ledger()
        self._batcher.add_to(ledger)
        self._routed.add_to(ledger)
        return ledger

    def _ready(self) -> list[tuple[int, int, int]]:
        """What the next plan fills; what was evicted before it is somebody else's."""
        unfilled = self.kv.take_unfilled()
        return [token for token in self.adapters.take_ready() if token[0] in unfilled]

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

    def _end_constrained(self) -> None:
        """End sequences whose constraints allow nothing more, or were refused."""
        for sequence_id, (sequence, problem) in [*self._constrained.over.items()]:
            if sequence.owner is Owner.ROUTER and not self._routed.names(sequence):
                continue
            if problem:
                failure = Failure(sequence_id, FailureCode.INVALID_ARGUMENT, problem)
                self._events.failures.append(failure)
            else:
                finish(self._events, sequence_id, FinishCode.CONSTRAINT)
            state = END_STATES[FinishCode.CONSTRAINT]
            self._end(sequence, EndState.IGNORED if problem else state)

    def _end(self, sequence: Sequence, state: EndState = EndState.ABORTED) -> None:
        if sequence.dead:
            return
        # Of a search the first one last: those that wait for its prompt would be queued again.
        beams = [sequence] if sequence.group is None else reversed(sequence.group.sequences)
        for each in beams:
            self._end_one(each, state)

    def _end_one(self, sequence: Sequence, state: EndState) -> None:
        sequence.ended_as = state
        if sequence.owner is not Owner.PROBE and not self._alive(sequence.request):
            self._counts.end(state)
        if not (self._constrained.forget(sequence) or self._queue.remove(sequence)):
            self._batcher.remove(sequence)
        if not sequence.in_flight:
            self._free(sequence)

    def _alive(self, request: Request) -> int:
        """Samples of a request that have not ended."""
        samples = map(self._sequences.get, request.sequence_ids)
        return sum(sample is not None and not sample.dead for sample in samples)

    def _free(self, sequence: Sequence) -> None:
        self._admission.ended(sequence)
        if self._drafting:
            self._drafting.forget(sequence)
        self.kv.release(sequence)
        if self.kv.host is not None:
            self.kv.host.came_back(sequence)
        self._rows.give_back(sequence)
        for planner in (self._batcher, self._routed, self._probes):
            planner.released(sequence)
        self._queue.freed()
        self._late.forget(sequence.id)
        del self._sequences[sequence.id]
        self.adapters.leave(sequence)
        sequence.leave()


def _of_base(request: Request) -> Request:
    """The same of the base model."""
    return msgspec.structs.replace(request, adapter=0, virtual_tokens=0, virtual_kv=False)
