"""Two planners, one step: the in-pod batcher's sequences and a router's run side by side.

The scheduler decides what the next step holds and what its outcome means; it knows lengths, slots
and limits, and nothing of tensors or protocols. A caller may plan step n + 1 before it settles step
n: a plan needs the lengths of sequences, not their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from types import MappingProxyType

from tokenpod.core.messages import PROBE_TOKENS, Advance, CacheEvents
from tokenpod.core.outputs import Failure, Load
from tokenpod.core.requests import Request
from tokenpod.scheduler.adapter_slots import AdapterSlots
from tokenpod.scheduler.admission import Admission
from tokenpod.scheduler.arrivals import Arrivals
from tokenpod.scheduler.batching import Batching, Mixed
from tokenpod.scheduler.beam_search import Top
from tokenpod.scheduler.blocks import BlockLog
from tokenpod.scheduler.constrained import Constrained
from tokenpod.scheduler.counts import Counts
from tokenpod.scheduler.deadlines import Deadlines
from tokenpod.scheduler.drafting import Drafting
from tokenpod.scheduler.ends import Ends, alive
from tokenpod.scheduler.exact import Exact
from tokenpod.scheduler.forced import Forced
from tokenpod.scheduler.host_kv import HostKV, host_of
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.lateness import Lateness
from tokenpod.scheduler.load_counts import load_of
from tokenpod.scheduler.outcomes import Outcomes
from tokenpod.scheduler.pace import Pace
from tokenpod.scheduler.planners import Planners
from tokenpod.scheduler.preemption import Always, Preemption
from tokenpod.scheduler.refusals import malformed, too_much
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import EndState, Owner, Sequence
from tokenpod.scheduler.step import Step, StepBuilder
from tokenpod.scheduler.step_clock import StepClock
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
        self.kv = KV(
            limits.slots + PROBE_TOKENS,
            caching=limits.caching,
            by_uses=limits.prefix_eviction == "lfu",
            host=host_of(limits),
        )
        self._batching = batching(limits)
        self._admission = admission(self.kv.table, limits, self._batching.quantum)
        self._rows = Rows(limits.max_rows)
        self.adapters = AdapterSlots(
            limits.adapter_slots, limits.adapters, limits.adapter_heads, limits.whole_adapters
        )
        #: Tokens that constraints force.
        self.forced = Forced(limits.forced, forced_costs)
        self._drafting = drafting(self.kv) if drafting else None
        #: Every sequence that exists, by id.
        self._sequences: dict[int, Sequence] = {}
        self._planners = Planners(
            self.kv,
            self._rows,
            self.adapters,
            admission=self._admission,
            batching=self._batching,
            forced=self.forced,
            drafting=self._drafting,
            prefill_tokens=limits.prefill_tokens,
            swapped_first=preemption.swapped_first,
            requeue=lambda samples: self._arrivals.requeue(samples),
            swaps=lambda each: preemption.swaps(each, alive(self._sequences, each.request)),
        )
        self._batcher, self._routed = self._planners.batcher, self._planners.routed
        self._queue = self._planners.queue
        self._constrained = Constrained(self._queue.add_again)
        self._arrivals = Arrivals(
            limits,
            self._sequences,
            table=self.kv.table,
            adapters=self.adapters,
            drafting=self._drafting,
            queue=self._queue,
            constrained=self._constrained,
        )
        deadlines = Deadlines()
        self._counts = Counts()
        self._ends = Ends(
            self._sequences,
            self._planners,
            self._constrained,
            kv=self.kv,
            adapters=self.adapters,
            drafting=self._drafting,
            deadlines=deadlines,
            counts=self._counts,
        )
        self._pace = Pace(limits.prefill_tokens)
        self._late = Lateness(
            self._sequences,
            self.kv,
            self._planners,
            deadlines=deadlines,
            pace=self._pace,
            end=self._ends.end,
        )
        self._outcomes = self._OUTCOMES(
            self.kv,
            self._batcher,
            self._routed,
            self._constrained,
            self._drafting,
            counts=self._counts,
            end=self._ends.end,
            refuse=self.end_constrained,
        )
        self._cache_log: BlockLog | None = None
        self._steps = 0
        self._clock = StepClock()
        #: What has happened since the last message. Whoever ends a sequence notes it here, once,
        #: before anything of it is freed.
        self._events = Settled()

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never fit fails at once (see `drain_events`)."""
        if refusal := self._arrivals.refusal(request):
            problem, code = refusal
            for sequence_id in request.sequence_ids:
                self._events.failures.append(Failure(sequence_id, code, problem))
            self._counts.end(EndState.IGNORED)
            return
        if request.probe:
            self._planners.probes.add(*self._arrivals.make(request, Owner.PROBE))
            return
        samples = self._arrivals.make(request, Owner.BATCHER)
        for together in [samples] if self.limits.sharing else [[sample] for sample in samples]:
            self._arrivals.enqueue(together)
        self._late.add(samples[0])

    def advance(self, op: Advance) -> Failure | None:
        """Queue a router's step. A failure means that nothing of it exists."""
        failure = malformed(op, self._sequences, self.limits)
        failure = failure or too_much(op, self._routed.waiting_tokens, self.limits)
        if failure is not None:
            return failure
        fresh = [s for request in op.start for s in self._arrivals.make(request, Owner.ROUTER)]
        for sequence in fresh:
            self._arrivals.enqueue([sequence])
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
                self._ends.end(sequence, EndState.STOPPED if stopped else EndState.ABORTED)

    # -- constraints ---------------------------------------------------------------------------

    @property
    def waiting_for_masks(self) -> list[Sequence]:
        """Sequences that can't go on before their next mask is there: see `masked`."""
        return self._constrained.waiting

    def masked(self, sequence_ids: Iterable[int], most: int | None = None) -> None:
        """The next masks of these sequences are there; see `Constrained.masked`."""
        self._constrained.masked(sequence_ids, most)

    def end_constrained(self, sequence_id: int, failure: Failure | None = None) -> None:
        """End a sequence: its constraint allows nothing more, or has failed.

        A router's ends once the router asks for it, so that it hears of it.
        """
        if sequence := self._sequences.get(sequence_id):
            self._constrained.over[sequence_id] = sequence, failure

    # -- steps ---------------------------------------------------------------------------------

    def plan(self, now: int) -> Step | None:
        """The next step, or None if nothing can run."""
        self._late.drop(now, self._events)
        self._ends.end_constrained(self._events)
        self._planners.admit()
        builder = StepBuilder(self.kv, now, self.limits.step, self._rows.free)
        host = self.kv.host
        if host is not None:
            host.step = self._steps + 1
        self._planners.plan(builder)
        if builder.empty and host is not None and host.flying:
            # There is nothing else to compute: the step waits for the copies.
            self._land(host, self._steps + 1)
            self._planners.plan(builder)
            assert host.issued or not builder.empty, "copies to slots that may have gone"
        if builder.empty:
            self._clock.idle()
            return None
        self._steps += 1
        builder.gap = self._clock.planned(now)
        rows = self._rows
        return builder.finish(
            self._steps,
            rows.take_fresh(),
            rows.take_freed(),
            self.adapters.take_puts(),
            self.adapters.take_ready(self.kv.pool.take_unfilled()),
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
        took = self._clock.settled(step.planned_at, now)
        self._pace.note(step.prompt_tokens, took)
        self.forced.settled(step, took)
        self.kv.table.in_flight[step.places] -= 1
        left = step.ended(self.kv.table)
        drafted = self._outcomes.check_drafts(step, tokens, took, drafting_ns)
        self._outcomes.take_each(step, tokens, tops, drafted, now, self._events)
        self._events.drafted += [self._outcomes.counted(draft) for draft in drafted.values()]
        for sequence in left:
            if not sequence.in_flight:
                self._ends.free(sequence)
        self._batcher.settled()
        if self.kv.host is not None:
            self._land(self.kv.host, step.plan.step if arrived is None else arrived)
        return self._take_events(step)

    def drain_events(self) -> Settled:
        """Events without a step since the last call."""
        return self._take_events(None)

    def _take_events(self, step: Step | None) -> Settled:
        """All events since the last call, and the router steps that are complete with them.

        Events and answers leave here alone, together: a router's next step names every sequence
        whose end it has not been sent, so an answer that leaves before the end of one of its
        sequences makes that next step fail.
        """
        events, self._events = self._events, Settled()
        events.advanced += self._routed.settle(step)
        return events

    # -- state ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any sequence could be advanced."""
        return self._planners.busy or bool(self._constrained.held)

    @property
    def stalls(self) -> int:
        """Times that a decoding sequence paused for want of a slot: 0 if admission is exact."""
        return self._batcher.stalls

    def load(self) -> Load:
        """The counts that go to the service with every step."""
        return load_of(self.kv, self._planners, self._constrained, self.adapters, self._counts)

    def watch_cache(self, *, wanted: bool) -> None:
        """Note what changes in the prefix cache from now on, and all that it holds; or stop."""
        tree = self.kv.tree
        tree.log = self._cache_log = BlockLog(tree.root()) if wanted else None

    def cache_events(self) -> CacheEvents | None:
        """What has changed in the prefix cache since the last call; None: nothing, or unwatched."""
        return None if self._cache_log is None else self._cache_log.take()

    def flush_cache(self) -> None:
        """Forget every cached prefix that no sequence uses."""
        self.kv.flush()

    def check(self) -> None:
        """Raise AssertionError unless every slot and row is in exactly one place."""
        self.kv.check(self._sequences.values())
        self._rows.check(self._sequences.values())
        self.adapters.check(self._sequences.values())
        self._planners.check()

    # -- parts ---------------------------------------------------------------------------------

    def _land(self, host: HostKV, step: int) -> None:
        """Copies of steps up to this one have arrived, or are waited for."""
        landed = host.land(step)
        for sequence in landed:
            if sequence.dead and not sequence.in_flight:
                self._ends.free(sequence)
        if landed:
            self._planners.landed()
