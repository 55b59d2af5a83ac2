"""Two planners, one step: the in-pod batcher's sequences and a router's run side by side.

The scheduler decides what the next step holds and what its outcome means; it knows lengths, slots
and limits, and nothing of tensors or protocols. A caller may plan step n + 1 before it settles step
n: a plan needs the lengths of sequences, not their tokens.

    submit, advance --> Queue --admitted--> Batcher, RouterSteps --next_rows--> step
         probes --------------------------> Probes _________________/             |
                                              ^------ settle: tokens, ends -------+

A sequence is RUNNING while its planner has it, and WAITING in the queue before and after that; it
ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listing
from types import MappingProxyType

import msgspec

from tokenpod.core.messages import PROBE_TOKENS, Advance, CacheEvents
from tokenpod.core.outputs import Failure, FailureCode, FinishCode, Load
from tokenpod.core.plan import UNSAMPLED
from tokenpod.core.requests import Request
from tokenpod.scheduler.drafts.drafting import Drafting, Landed
from tokenpod.scheduler.drafts.forced import Forced
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.kv.offload import Offload, offload_of
from tokenpod.scheduler.kv.preemption import Always, Preemption
from tokenpod.scheduler.kv.whole_texts import WholeTexts
from tokenpod.scheduler.planners.batcher import Batcher
from tokenpod.scheduler.planners.deadlines import Deadlines
from tokenpod.scheduler.planners.order import Arrival, Shortest
from tokenpod.scheduler.planners.planner import StepPlanner
from tokenpod.scheduler.planners.queue import Queue
from tokenpod.scheduler.planners.refusals import malformed, never_fits, too_much
from tokenpod.scheduler.planners.router_steps import Probes, RouterSteps
from tokenpod.scheduler.policies.admission_policy import Admission
from tokenpod.scheduler.policies.batching import Batching, Mixed
from tokenpod.scheduler.policies.exact import Exact
from tokenpod.scheduler.pool.blocks import BlockLog
from tokenpod.scheduler.pool.given import VectorIds
from tokenpod.scheduler.pool.windows import Windows
from tokenpod.scheduler.sequences.adapter_slots import AdapterSlots
from tokenpod.scheduler.sequences.beam_search import Top
from tokenpod.scheduler.sequences.events import Events
from tokenpod.scheduler.sequences.rows import Rows
from tokenpod.scheduler.sequences.samples import samples_of
from tokenpod.scheduler.sequences.sequence import (
    END_STATES,
    EndState,
    Group,
    Owner,
    Planner,
    Sequence,
    State,
)
from tokenpod.scheduler.sequences.table import Table
from tokenpod.scheduler.sequences.work import Limits, Settled
from tokenpod.scheduler.steps.estimates import Estimates
from tokenpod.scheduler.steps.gaps import GapBound
from tokenpod.scheduler.steps.machine_times import StepSize
from tokenpod.scheduler.steps.step import Step, StepBuilder
from tokenpod.scheduler.steps.step_times import Costs

_RECOMPUTE = Always(swap=False)
#: In a token's place: its logits had NaN or Inf; none was drawn.
_NO_TOKENS = -1, UNSAMPLED
#: Where the order of the queue is not that of arrival, what has left it computes so many steps.
_STEPS_AHEAD = 2

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
        measured: steps that were timed before, and their seconds.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        admission: Callable[[Table, Limits, int], Admission] = Exact,
        batching: Callable[[Limits], Batching] = Mixed,
        drafting: Callable[[KV], Drafting] | None = None,
        preemption: Preemption = _RECOMPUTE,
        forced_costs: Costs | None = None,
        measured: Iterable[tuple[StepSize, float]] = (),
    ) -> None:
        self.limits = limits
        slots, windows = limits.slots + PROBE_TOKENS, None
        if limits.windows is not None:
            windows = Windows(slots, limits.windows, caching=limits.caching)
        self.kv = (
            WholeTexts(slots)
            if limits.whole_prompts
            else KV(
                slots,
                caching=limits.caching,
                by_uses=limits.prefix_eviction == "lfu",
                offload=offload_of(limits),
                windows=windows,
                snapshots=limits.snapshots,
            )
        )
        self.adapters = AdapterSlots(
            limits.adapter_slots, limits.adapters, limits.adapter_heads, limits.whole_adapters
        )
        #: Tokens that constraints force.
        self.forced = Forced(limits.forced, forced_costs)
        self._rows = Rows(limits.max_rows)
        self._batching = batching(limits)
        self._admission = admission(self.kv.table, limits, self._batching.quantum)
        self._drafting = drafting(self.kv) if drafting else None
        self._queue = Queue(
            self.kv,
            self._rows,
            self.adapters,
            self._admission,
            Shortest(limits.prefill_tokens) if limits.shortest_first else Arrival(),
            swapped_first=preemption.swapped_first,
        )
        self._constrained = self._queue.masks
        self._batcher = Batcher(
            self.kv,
            self._rows,
            self._queue,
            admission=self._admission,
            batching=self._batching,
            preemption=preemption,
            forced=self.forced,
            drafting=self._drafting,
            whole_prompts=limits.whole_prompts,
            ahead=_STEPS_AHEAD * limits.prefill_tokens if limits.shortest_first else None,
        )
        self._routed = RouterSteps(self.kv, self._rows, self.forced, self._drafting)
        self._probes = Probes(self.kv, self._rows)
        #: Those that have had a sequence, in the order in which they settle.
        self._planners: tuple[StepPlanner, ...] = (self._batcher,)
        #: Every sequence that exists, by id.
        self._sequences: dict[int, Sequence] = {}
        self._estimates = Estimates(
            limits.prefill_tokens,
            self._drafting.costs if self._drafting else None,
            forced_costs,
            _gap_bound(limits, measured),
        )
        self._deadlines = Deadlines(self._sequences, self.kv, self._estimates.prompts)
        #: What may end some sequence, or is no token.
        self._ends = {*_NO_TOKENS}
        self._vectors = VectorIds()
        self._step_limits = limits.step
        self._cache_log: BlockLog | None = None
        self._steps = 0
        self._events = Events()

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never fit fails at once, among the next events."""
        if self.limits.mutual_prompts:
            request = msgspec.structs.replace(request, mutual=True)
        if refusal := self._refusal(request):
            problem, code = refusal
            self._events.failed(request.sequence_ids, code, problem)
            self._events.ended(EndState.IGNORED)
            return
        if request.probe:
            self._planners = (self._batcher, self._routed, self._probes)
            self._probes.add(*self._make(request, self._probes))
            return
        samples = self._make(request, self._batcher)
        for together in [samples] if self.limits.sharing else [[sample] for sample in samples]:
            self._queue.add(together)
        if request.timed:
            self._deadlines.add(samples[0])

    def advance(self, op: Advance) -> Failure | None:
        """Queue a router's step. A failure means that nothing of it exists."""
        if self.limits.mutual_prompts:
            start = [msgspec.structs.replace(request, mutual=True) for request in op.start]
            op = msgspec.structs.replace(op, start=start)
        failure = malformed(op, self._sequences, self.limits)
        failure = failure or too_much(op, self._routed.waiting_tokens, self.limits)
        if failure is not None:
            return failure
        self._planners = (self._batcher, self._routed, self._probes)
        fresh = [s for request in op.start for s in self._make(request, self._routed)]
        for sequence in fresh:
            self._queue.add([sequence])
        resumed = [self._sequences[sequence_id] for sequence_id in op.resume]
        self._routed.begin(op, fresh, resumed)
        return None

    def abort(self, sequence_ids: Iterable[int], *, stopped: bool = False) -> None:
        """End sequences: their slots are free at once, or when the step in flight settles.

        `stopped`: their output is complete.
        """
        for sequence_id in sequence_ids:
            if sequence := self._sequences.get(sequence_id):
                self._end(sequence, EndState.STOPPED if stopped else EndState.ABORTED)

    def _refusal(self, request: Request) -> tuple[str, FailureCode] | None:
        """Why a request can never run; None: it can."""
        if problem := never_fits(request, self.limits):
            return problem, FailureCode.INVALID_ARGUMENT
        if request.adapter and not self.adapters.knows(request.adapter):
            return "its adapter has been unloaded", FailureCode.NOT_FOUND
        return None

    def _make(self, request: Request, planner: Planner) -> list[Sequence]:
        """The sequences of a request, which nobody has queued yet."""
        if request.adapter and not self.adapters.knows(request.adapter):
            # A router's: it is the base model's then, as of any other name.
            changes = {"adapter": 0, "virtual_tokens": 0, "virtual_kv": False}
            request = msgspec.structs.replace(request, **changes)
        samples = samples_of(request, planner, self.kv.table, self._vectors)
        if not self._sequences:
            self._ends = {*_NO_TOKENS}
        self._ends |= request.stopping.eos_token_ids | request.stopping.stop_token_ids
        for sequence in samples:
            self._sequences[sequence.id] = sequence
            if request.adapter:
                self.adapters.enter(sequence)
        if self._drafting:
            self._drafting.began(samples)
        return samples

    # -- constraints ---------------------------------------------------------------------------

    @property
    def waiting_for_masks(self) -> list[Sequence]:
        """Sequences that can't go on before their next mask is there."""
        return self._constrained.waiting

    def masked(self, sequence_ids: Iterable[int], most: int | None = None) -> None:
        """The next masks of these sequences are there; `most` of them may go on, None: all."""
        self._queue.masked(sequence_ids, most)

    def end_constrained(self, sequence_id: int, failure: Failure | None = None) -> None:
        """End a sequence: its constraint allows nothing more, or has failed.

        A router's ends once the router asks for it, so that it hears of it.
        """
        if sequence := self._sequences.get(sequence_id):
            self._constrained.over[sequence_id] = sequence, failure

    # -- state ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any sequence could be advanced."""
        waiting = len(self._queue) or self._constrained.held or self._probes.waiting
        return bool(self._batcher.running or waiting or self._routed.ops or self._probes.running)

    def load(self) -> Load:
        """The counts that go to the service with every step."""
        kv, queue, held = self.kv, self._queue, self._constrained
        load = Load(
            running=self._batcher.running + len(self._routed.admitted),
            waiting=len(queue) - queue.swapped + len(held.held),
            waiting_tokens=queue.tokens + (held.held_tokens if held.held else 0),
            slots=kv.total - PROBE_TOKENS,
            free_slots=max(kv.free - PROBE_TOKENS, 0),
            evictable_slots=kv.tree.evictable,
            preemptions=self._batcher.preemptions,
            evicted_tokens=kv.tree.evicted,
            adapters=len(self.adapters.in_use) if kv.table.adapted else 0,
            swapped=queue.swapped,
            **self._events.counts,
        )
        return load if kv.offload is None else msgspec.structs.replace(load, **kv.offload.counts)

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
        self._routed.check()

    # -- steps ---------------------------------------------------------------------------------

    def plan(self, now: int, *, prompts: bool = True) -> Step | None:
        """The next step, or None if nothing can run.

        `prompts`: whether it may hold some beside streams.
        """
        self._end_late(now)
        self._end_constrained()
        self._admit()
        if self.kv.windows is not None:
            self.kv.windows.settle()
        builder = StepBuilder(self.kv, now, self._step_limits, self._rows.free)
        builder.takes_prompts = prompts or not self.streams_wait
        offload = self.kv.offload
        if offload is not None:
            offload.step = self._steps + 1
        self._add_rows(builder)
        if builder.empty and offload is not None and offload.flying:
            # There is nothing else to compute: the step waits for the copies.
            self._land(offload, self._steps + 1)
            self._add_rows(builder)
            assert offload.issued or not builder.empty, "copies to slots that may have gone"
        if builder.empty:
            self._estimates.idle()
            return None
        self._steps += 1
        builder.gap = self._estimates.planned(now)
        fresh, freed = self._rows.take_fresh(), self._rows.take_freed()
        if not self.adapters.pending:
            return builder.finish(self._steps, fresh, freed)
        puts = self.adapters.take_puts()
        ready = self.adapters.take_ready(self.kv.pool.take_unfilled())
        return builder.finish(self._steps, fresh, freed, puts, ready)

    def settle(
        self,
        step: Step,
        tokens: Listing[int],
        now: int,
        tops: Mapping[int, Top] = MappingProxyType({}),
        drafting_ns: int = 0,
        arrived: int | None = None,
        spoiled: Collection[int] = (),
        computed_ns: int | None = None,
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
            spoiled: rows of the plan whose vectors have NaN or Inf.
            computed_ns: how long a device has computed it; None: as long as it was under way.
        """
        self._estimates.settled(step, now, drafting_ns, computed_ns)
        self.kv.table.in_flight[step.places] -= 1
        left = step.ended(self.kv.table)
        drafted = self._check_drafts(step, tokens)
        self._take_each(step, tokens, tops, drafted, now)
        for row in step.pooled:
            self._take_vectors(step.sequences[row], whole=row not in spoiled)
        for draft in drafted.values():
            self._events.drafted(draft.sequence, draft.drafted, draft.accepted)
        for sequence in left:
            if not sequence.in_flight:
                self._free(sequence)
        for planner in self._planners:
            planner.settle(step)
        if self.kv.offload is not None:
            self._land(self.kv.offload, step.plan.step if arrived is None else arrived)
        return self._take_events()

    def drain_events(self) -> Settled:
        """Events without a step since the last call."""
        return self._take_events()

    def _take_events(self) -> Settled:
        """All events since the last call, and the router steps that are complete with them.

        Events and answers leave here alone, together: a router's next step names every sequence
        whose end it has not been sent, so an answer that leaves before the end of one of its
        sequences makes that next step fail.
        """
        events = self._events.take()
        if self._routed.ops:
            events.advanced += self._routed.answers()
        return events

    @property
    def _slots_for_batcher(self) -> int:
        """Slots that have been promised neither to routers' sequences nor to probes."""
        return self.kv.available - self._routed.reserved - self._probes.reserved

    def _admit(self) -> None:
        """Let in who may join: nobody, and nothing that was swapped out, if a step lacks room."""
        if self._queue.may_admit and not self._batcher.lacks_room(self._slots_for_batcher):
            joining = self._batcher.joining(self._queue.of_batcher)
            self._queue.admit(joining, self._planners)

    def _add_rows(self, step: StepBuilder) -> None:
        """Add to a step: if routers and the batcher have prompts, each gets half of the budget.

        Of its drafts each can have as many as its sequences are of all. Probes have a budget of
        their own.
        """
        budget = self._prompt_budget(step)
        if self._routed.ops:
            of_routers = budget - budget // 2 if self._batcher.has_prompts else budget
            running = self._batcher.running
            share = step.drafts_left * running // max(running + len(self._routed.admitted), 1)
            with step.kept_drafts(share):
                self._routed.next_rows(step, of_routers, self._routed.reserved)
        left = budget - step.prompt_tokens
        self._batcher.next_rows(step, left, self._slots_for_batcher)
        if self._probes.waiting:
            self._probes.next_rows(step, PROBE_TOKENS, self._probes.reserved)

    def _prompt_budget(self, step: StepBuilder) -> int:
        """Prompt tokens that the next step may have: fewer than it could, where streams wait."""
        if not step.takes_prompts:
            return 0
        gaps = self._estimates.gaps
        if gaps is None or not (self._batcher.has_prompts or self._routed.ops):
            return self.limits.prefill_tokens
        rows, context = self._decoding
        if not rows and not self.limits.short_prompts:
            return self.limits.prefill_tokens
        return gaps.prompt_tokens(rows, context, self._batcher.prompts)

    @property
    def _decoding(self) -> tuple[int, int]:
        """Sequences that decode; the tokens that they read together."""
        rows, context = self._batcher.decoding
        if self._routed.ops:
            more, read = self._routed.decoding
            rows, context = rows + more, context + read
        return rows, context

    @property
    def streams_wait(self) -> bool:
        """Whether sequences decode, whose gaps have a bound."""
        return self._estimates.gaps is not None and self._decoding[0] > 0

    @property
    def beside_steps(self) -> int | None:
        """Nanoseconds that other work may take between two steps; None: gaps have no bound."""
        gaps = self._estimates.gaps
        return None if gaps is None else gaps.beside(*self._decoding)

    def _land(self, offload: Offload, step: int) -> None:
        """Copies of steps up to this one have arrived, or are waited for."""
        landed = offload.land(step)
        for sequence in landed:
            if sequence.dead and not sequence.in_flight:
                self._free(sequence)
        if landed:
            self._batcher.settle(None)
            self._queue.freed()

    # -- tokens --------------------------------------------------------------------------------

    def _check_drafts(self, step: Step, tokens: Listing[int]) -> Mapping[int, Landed]:
        """Take back what wrong drafts of a step have computed; by id, who had drafts."""
        if self._drafting is None:
            return {}
        drafted = self._drafting.land(step, tokens)
        for draft in drafted.values():
            draft.sequence.planner.taken_back(draft.sequence, draft.wrong)
        return drafted

    def _take_each(
        self,
        step: Step,
        tokens: Listing[int],
        tops: Mapping[int, Top],
        drafted: Mapping[int, Landed],
        now: int,
    ) -> None:
        """Append a step's tokens, and note what they mean.

        Args:
            step: whose outcome it is.
            tokens: one for each sample, row after row.
            tops: of beams, by index into `tokens`.
            drafted: what has become of drafts, by sequence.
            now: in nanoseconds.
        """
        after = 0
        for at in [*self._to_look_at(step, tokens), len(tokens)]:
            if after < at:
                self._take_plain(step, tokens, slice(after, at))
            if at == len(tokens):
                break
            after = at + 1
            sequence, token = step.sampled[at], tokens[at]
            if sequence.group is not None:
                self._take_tops(sequence.group, sequence, tops.get(at), now)
            elif token != UNSAMPLED:
                if self._drafting and sequence.id not in drafted:
                    self._drafting.watch(sequence, token)
                self._take(sequence, token, at, now)
            elif sequence.constrained and not sequence.dead and at in step.rows_of_firsts:
                row = step.rows_of_firsts[at]
                # Drafts that may be wrong have been taken back.
                self._postpone(sequence, 1 + (row in step.forced) * step.drafts_of(row))

    def _to_look_at(self, step: Step, tokens: Listing[int]) -> list[int]:
        """The samples whose tokens may do more than lengthen a sequence, rising.

        All others are of sequences that have begun, and that neither end by them nor can do so
        otherwise: in most steps all but a few, and a step may have a thousand.
        """
        plan, table = step.plan, self.kv.table
        if self._drafting is not None or plan.samples != plan.sampling:
            return [*range(len(tokens))]
        places = step.sampled_places
        number = table.launched[places] - table.in_flight[places]
        plain = (number < table.plain[places]) & (table.ended[places] == 0)
        if not self._ends.isdisjoint(tokens):
            plain &= [token not in self._ends for token in tokens]
        others: list[int] = (~plain).nonzero()[0].tolist()
        return others

    def _take_plain(self, step: Step, tokens: Listing[int], some: slice) -> None:
        """Append the tokens of some samples, which do nothing else."""
        sequences, taken = step.sampled[some], tokens[some]
        for sequence, token in zip(sequences, taken, strict=True):
            sequence.outputs.append(token)
        events = self._events.settled
        events.sequence_ids += self.kv.table.id[step.sampled_places[some]].tolist()
        events.token_ids += taken
        events.finishes += [FinishCode.RUNNING] * len(taken)
        events.samples += range(some.start, some.stop)

    def _take(self, sequence: Sequence, token: int, at: int, now: int) -> None:
        """Append a token of a sequence, sample `at` of its step."""
        sequence.keep = sequence.keep and token >= 0
        if sequence.ended_as is not None:
            # Sampled after its end, before that was seen.
            return
        if token < 0 and sequence.constrained and sequence.request.sampling.bad_words:
            # What the mask allows, its bad words forbid; which these are now, the sampler knows.
            self.end_constrained(sequence.id)
            return
        if token < 0:
            self._spoil(sequence)
            return
        finish = sequence.append(token, now)
        if not sequence.proven:
            if len(sequence.outputs) == 1:
                self._start(sequence)
            sequence.prove()
            sequence.planner.inputs_settled(sequence)
        events = self._events.settled
        events.sequence_ids.append(sequence.id)
        events.token_ids.append(token)
        events.finishes.append(finish)
        events.samples.append(at)
        if finish:
            self._end(sequence, END_STATES[finish])

    def _take_vectors(self, sequence: Sequence, *, whole: bool) -> None:
        """End a sequence whose text has been read."""
        if sequence.dead:
            return
        if not whole:
            self._spoil(sequence)
            return
        self._start(sequence)
        self._events.finished([sequence.id], FinishCode.EOS)
        self._end(sequence, END_STATES[FinishCode.EOS])

    def _postpone(self, sequence: Sequence, n: int) -> None:
        """The mask of a row was late: its last `n` positions are computed again once it comes."""
        self.kv.take_back(sequence, n)
        sequence.launched -= n
        sequence.planner.unsampled(sequence, n)
        self._constrained.pause(sequence)

    def _take_tops(self, group: Group, sequence: Sequence, top: Top | None, now: int) -> None:
        """Take what the search of a beam needs; once it has that of all beams, they go on."""
        sequence.keep = sequence.keep and top is not None
        if sequence.dead:
            return
        if top is None:
            self._spoil(sequence)
            return
        if not group.take(sequence, top):
            return
        if not group.begun:
            self._start(group.first)
        if parents := group.advance(now):
            self._batcher.branched(group, parents)
            return
        finish = group.report(self._events.settled)
        self._end(group.first, END_STATES[finish])

    def _start(self, sequence: Sequence) -> None:
        """The first token of a sequence has come."""
        self._events.started(sequence)
        if not sequence.stream and sequence.node is not None:
            self.kv.tree.use(sequence.node)

    # -- ends ----------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, state: EndState) -> None:
        """End a sequence, with all beams of its search.

        Nothing more of it is planned. What it has is free at once, or when the step in flight
        settles. Its end has been noted among the events.
        """
        if sequence.dead:
            return
        # Of a search the first one last: those that wait for its prompt would be queued again.
        beams = [sequence] if sequence.group is None else reversed(sequence.group.sequences)
        for each in beams:
            running = each.state is State.RUNNING
            self._queue.remove(each)
            each.end(state)
            if each.owner is not Owner.PROBE and not each.alive:
                self._events.ended(state)
            if running:
                each.planner.drop(each)
            if not each.in_flight:
                self._free(each)

    def _free(self, sequence: Sequence) -> None:
        """A sequence has ended and has no step in flight: what it had is free."""
        self._admission.ended(sequence)
        if self._drafting:
            self._drafting.forget(sequence)
        self.kv.release(sequence)
        if self.kv.offload is not None:
            self.kv.offload.came_back(sequence)
        self._rows.give_back(sequence)
        sequence.planner.released(sequence)
        self._queue.freed()
        if sequence.request.timed:
            self._deadlines.forget(sequence.id)
        del self._sequences[sequence.id]
        if sequence.request.adapter:
            self.adapters.leave(sequence)
        sequence.leave()

    def _end_late(self, now: int) -> None:
        """End whoever is late, and whoever will be."""
        if not self._deadlines.watched:
            return
        for sequence, problem in self._deadlines.late(now, self._computed_next()):
            if problem is not None:
                self._fail(sequence, FailureCode.DEADLINE_EXCEEDED, problem)
                continue
            self._events.finished(sequence.reported, FinishCode.TIME_LIMIT)
            self._end(sequence, EndState.LENGTH)

    def _computed_next(self) -> Iterator[Sequence]:
        yield from self._queue.head[:1]
        yield from self._batcher.prefilling

    def _end_constrained(self) -> None:
        """End sequences whose constraints allow nothing more, or have failed."""
        for sequence_id, (sequence, failure) in [*self._constrained.over.items()]:
            if sequence.owner is Owner.ROUTER and not self._routed.names(sequence):
                continue
            if failure is None:
                self._events.finished([sequence_id], FinishCode.CONSTRAINT)
                self._end(sequence, END_STATES[FinishCode.CONSTRAINT])
            else:
                self._events.settled.failures.append(failure)
                refused = failure.code is FailureCode.INVALID_ARGUMENT
                self._end(sequence, EndState.IGNORED if refused else EndState.ABORTED)

    def _spoil(self, sequence: Sequence) -> None:
        problem = "the model computed NaN or Inf for this sequence"
        self._fail(sequence, FailureCode.DATA_LOSS, problem)

    def _fail(self, sequence: Sequence, code: FailureCode, problem: str) -> None:
        self._events.failed(sequence.reported, code, problem)
        self._end(sequence, EndState.ABORTED)


def _gap_bound(limits: Limits, measured: Iterable[tuple[StepSize, float]]) -> GapBound | None:
    """What keeps steps short while others stream."""
    if limits.max_gap is None:
        return None
    return GapBound(limits.max_gap, limits.least_prompt_tokens, limits.prefill_tokens, measured)
