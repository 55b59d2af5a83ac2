"""A scheduler with a reference executor below it and a suspicious client above it.

The executor keeps, for every slot, a fingerprint of the token prefix whose keys and values it
holds, and checks each step against it. The client keeps what each sequence and each router step
is owed. Anything unexpected is an AssertionError.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import islice

from support.engines.planner_probe import Stalls, preempt_sequence
from tokenpod.core.messages import PROBE_TOKENS, Advance
from tokenpod.core.new_row import NewRow
from tokenpod.core.outputs import Advanced, Failure, FailureCode, FinishCode
from tokenpod.core.plan import GIVEN, LAST, UNSAMPLED, StepPlan
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.core.windows import WindowRoom
from tokenpod.scheduler.policies.exact import Exact
from tokenpod.scheduler.policies.reserve import Reserve
from tokenpod.scheduler.pool.given import VIRTUAL
from tokenpod.scheduler.scheduler import Limits, Scheduler, Settled, Step
from tokenpod.scheduler.sequences.sequence import Sequence

SECOND = 1_000_000_000
POLICIES = ("admission", "batching", "drafting", "preemption")


def request(ids, prompt, *, max_new_tokens=4, **options) -> Request:
    """A request; options are those of Request and of StoppingParams."""
    stopping = {
        name: options.pop(name)
        for name in list(options)
        if name in StoppingParams.__struct_fields__
    }
    return Request(
        sequence_ids=[ids] if isinstance(ids, int) else list(ids),
        prompt=list(prompt),
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=max_new_tokens, **stopping),
        **options,
    )


class Guesses:
    """A source of drafts: 1 or 2, by chance, as what is chosen; now and then none."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    watched = True

    def find(self, sequence: Sequence, most: int) -> list[int]:
        return [self._chance.randint(1, 2) for _ in range(self._chance.randint(0, most))]

    def forget(self, sequence: Sequence) -> None:
        pass


@dataclass
class Work:
    """One row of a step."""

    sequence: Sequence
    row: int
    start: int
    tokens: list[int]
    slots: list[int]
    samples: int
    output_index: int

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def drafts(self) -> list[int]:
        return self.tokens[1:] if self.samples > 1 else []


def works_of(step: Step | None) -> list[Work]:
    """The rows of a step, one by one."""
    if step is None:
        return []
    plan = StepPlan.from_bytes(step.plan.to_bytes())
    ends = plan.r_tokens.cumsum().tolist()
    assert len(plan.t_token) == len(plan.t_slot) == ends[-1]
    works = []
    for at, end in enumerate(ends):
        n = int(plan.r_tokens[at])
        tokens = slice(end - n, end)
        sequence = step.sequences[at]
        works.append(
            Work(
                sequence,
                int(plan.r_row[at]),
                int(plan.r_start[at]),
                [
                    _with_id(plan, sequence, token, int(plan.r_start[at]) + i)
                    for i, token in enumerate(plan.t_token[tokens].tolist())
                ],
                plan.t_slot[tokens].tolist(),
                int(plan.r_samples[at]),
                int(plan.r_output[at]),
            )
        )
    assert [work.sequence for work in works for _ in range(work.samples)] == step.sampled
    return works


def _with_id(plan: StepPlan, sequence: Sequence, token: int, place: int) -> int:
    """A token as the tree has it: virtual ones have the ids of their adapter's."""
    if token > GIVEN:
        return token
    at = GIVEN - token - sum(map(len, plan.given))
    if at < 0:  # a given embedding
        return int(sequence.inputs[place])
    assert plan.soft_adapter[at] == sequence.request.adapter
    return VIRTUAL - int(plan.soft_index[at])


@dataclass
class Row:
    """What the executor knows of a row."""

    sequence_id: int
    tokens: list[int]
    prompt_length: int
    #: Tokens that were known when it took the row: the prompt, and outputs from before preemptions.
    given: int
    #: Fingerprints of the prefixes of `tokens`, and the slots, by position.
    marks: list[int]
    slots: list[int]
    #: Window slots, by position, where there are any; of those left behind, whatever was said.
    windows: list[int]
    #: Positions from here on were written by this row, and no good token has followed yet.
    unproven_from: int
    #: Of an adapter whose keys and values are ready: what it puts before the prompt.
    ready: list[int]


class ReferenceExecutor:
    """Writes fingerprints instead of keys and values."""

    def __init__(self, scheduler: Scheduler, choose) -> None:
        self.scheduler = scheduler
        #: (sequence id, index of the output) -> token, -1: NaN.
        self.choose = choose
        self.memory: dict[int, int] = {}
        #: The same of layers with a window, by window slot.
        self.window_memory: dict[int, int] = {}
        self.rows: dict[int, Row] = {}
        #: What has been sampled, by sequence id: a row may be another one after a preemption.
        self.outputs: defaultdict[int, list[int]] = defaultdict(list)
        self.users: Counter[int] = Counter()
        #: By slot.
        self.adapters = {0: 0}
        #: Copies from the host's memory that have not arrived: of which step, slot and mark.
        self.coming: list[tuple[int, int, int]] = []
        self.arrived = 0
        self.chance = random.Random(1)
        self.restored = 0
        #: Where rows keep states: of each row and snapshot, how many positions it has been through,
        #: and the fingerprint of these. And how many rows have begun with a snapshot.
        self.states: dict[int, tuple[int, int]] = {}
        self.begun = 0

    def launch(self, step: Step) -> list[int]:
        """Run a step; the tokens it samples, one for each sample of each work."""
        plan = step.plan
        for number in plan.freed.tolist():
            self.users.subtract(self.rows.pop(number).slots)
        self._copy(plan)
        for slot, adapter, index in zip(
            plan.ready_slot.tolist(), plan.ready_adapter.tolist(), plan.ready_index, strict=True
        ):
            assert self.users[slot] == 0, "a slot is filled that a row attends to"
            self.memory[slot] = hash((adapter, int(index)))
        ready = zip(plan.ready_window.tolist(), plan.ready_slot.tolist(), strict=False)
        self.window_memory.update((own, self.memory[slot]) for own, slot in ready)
        for row, snapshot in zip(plan.saved_row.tolist(), plan.saved_to.tolist(), strict=True):
            assert snapshot > self.scheduler.limits.max_rows >= row
            self.states[snapshot] = self.states[row]
        prefix, in_window = iter(plan.prefix_slot.tolist()), iter(plan.prefix_window.tolist())
        for number, ask, cached in zip(
            plan.n_row.tolist(), plan.asks, plan.n_prefix.tolist(), strict=True
        ):
            self._add_row(number, ask, [*islice(prefix, cached)], [*islice(in_window, cached)])
        assert not [*prefix, *in_window]
        for snapshot, row in zip(plan.loaded_from.tolist(), plan.loaded_row.tolist(), strict=True):
            assert row in plan.n_row.tolist()
            self.states[row] = self.states[snapshot]
            self.begun += 1
        works = works_of(step)
        self._check_shape(works)
        self._check_adapters(plan, works)
        shared = {int(s) for node in self.scheduler.kv.tree.nodes() for s in node.slots}
        for work in works:
            self._write(work, shared)
        if (room := self.scheduler.limits.windows) is not None:
            self._write_windows(plan, works, room)
        return [token for work in works for token in self._sample_each(work, shared)]

    def _copy(self, plan: StepPlan) -> None:
        """What goes out comes first; what comes in takes its time if nobody waits."""
        base = self.scheduler.kv.total + 1
        pairs = [*zip(plan.copy_from.tolist(), plan.copy_to.tolist(), strict=True)]
        awaited = [plan.step - behind for behind in plan.awaited.tolist()]
        # They arrive in order; some at once, some late.
        if self.chance.random() < 0.5:
            awaited.append(plan.step - self.chance.randint(0, 3))
        self.arrived = max(self.arrived, *awaited, 0)
        self._arrive()
        out = [(self.memory[source], to) for source, to in pairs if source < base]
        assert all(to >= base for _, to in out)
        assert len({to for _, to in pairs}) == len(pairs)
        self.memory.update((to, mark) for mark, to in out)
        for source, to in pairs[len(out) :]:
            assert source >= base > to, "what comes in stands behind what goes out"
            assert self.users[to] == 0
            self.coming.append((plan.step, to, self.memory[source]))
            self.memory.pop(to, None)
            self.restored += 1
        self._arrive()

    def _arrive(self) -> None:
        while self.coming and self.coming[0][0] <= self.arrived:
            _, to, mark = self.coming.pop(0)
            self.memory[to] = mark

    def _check_adapters(self, plan: StepPlan, works: list[Work]) -> None:
        self.adapters |= zip(plan.put_slot.tolist(), plan.put_adapter.tolist(), strict=True)
        slots = plan.r_adapter.tolist() or [0] * len(works)
        for work, slot in zip(works, slots, strict=True):
            asked = work.sequence.request
            assert self.adapters[slot] == (0 if asked.virtual_tokens else asked.adapter)

    def _add_row(self, number: int, ask: NewRow, prefix: list[int], in_window: list[int]) -> None:
        rows, request = self.scheduler.limits.max_rows, ask.request
        assert number == rows if request.probe else 0 <= number < rows
        sequence_id, count = request.sequence_ids[ask.stream], request.virtual_tokens
        if before := self.rows.pop(number, None):
            assert before.sequence_id == sequence_id, "a row with two sequences"
            self.users.subtract(before.slots)
        virtual = [VIRTUAL - i for i in range(count)]
        tokens = [*virtual, *request.prompt, *ask.outputs]
        ready = [hash((request.adapter, i)) for i in range(count * request.virtual_kv)]
        assert len(prefix) >= len(ready)
        assert len(prefix) < len(tokens)
        assert list(ask.outputs) == self.outputs[sequence_id], "not the outputs that it had"
        row = Row(sequence_id, tokens, request.positions, len(tokens), [], [], [], 0, ready)
        row.windows = in_window
        row.marks.append(zlib.crc32(request.salt.encode()))
        row.slots, row.unproven_from = prefix, len(prefix)
        self._mark(row)
        self.users.update(prefix)
        self.rows[number] = row
        self.states[number] = 0, row.marks[0]

    @staticmethod
    def _mark(row: Row) -> None:
        # marks[p + 1] is the fingerprint of tokens[: p + 1].
        while len(row.marks) <= len(row.tokens):
            at = len(row.marks) - 1
            mark = hash((row.marks[-1], row.tokens[at]))
            row.marks.append(row.ready[at] if at < len(row.ready) else mark)

    def _check_shape(self, works: list[Work]) -> None:
        assert works
        assert len({work.row for work in works}) == len(works)
        assert all(work.row == work.sequence.row for work in works)
        sizes = [min(work.n_tokens, 2) for work in works]
        assert sizes == sorted(sizes), "works with a single token come first"
        prompts = [w for w in works if w.tokens[0] != LAST]
        probes = [w.n_tokens for w in prompts if w.sequence.request.probe]
        assert len(probes) <= 1
        assert sum(probes) < PROBE_TOKENS
        rest = sum(w.n_tokens for w in prompts) - sum(probes)
        assert rest <= self.scheduler.limits.prefill_tokens

    def _write(self, work: Work, shared: set[int]) -> None:
        row = self.rows[work.row]
        assert row.sequence_id == work.sequence.id
        assert work.start == len(row.slots), "every position is computed once, in order"
        end = work.start + work.n_tokens
        assert work.n_tokens == len(work.slots) >= 1
        first_end = end - len(work.drafts)
        assert first_end <= len(row.tokens), "a token that does not exist is computed"
        assert bool(work.samples) == (first_end >= row.given)
        known = row.tokens[work.start : first_end] if work.start < row.given else [LAST]
        assert work.tokens == [*known, *work.drafts]
        assert not work.samples or work.output_index == first_end - row.prompt_length
        assert end <= work.sequence.bound
        marks = row.marks[: first_end + 1]
        if work.drafts:
            assert first_end == len(row.tokens), "drafts behind a token that nobody knows"
            for draft in work.drafts:
                marks.append(hash((marks[-1], draft)))
        for position, slot in enumerate(map(int, work.slots), work.start):
            assert 0 <= slot < self.scheduler.kv.total
            assert slot not in shared, "a shared slot is written"
            assert self.users[slot] == 0, "a slot is written that a row attends to"
            self.users[slot] += 1
            self.memory[slot] = marks[position + 1]
            row.slots.append(slot)
        found = [self.memory[slot] for slot in row.slots]
        assert found == marks[1 : end + 1], "attended slots hold another prefix"
        if not self.scheduler.limits.sharing:
            # A position that the state has been through is computed again by itself alone.
            through = [work.start, end] if work.n_tokens == 1 else [work.start]
            assert self.states[work.row] in [(at, marks[at]) for at in through], "another's state"
            self.states[work.row] = end, marks[end]

    def _write_windows(self, plan: StepPlan, works: list[Work], room: WindowRoom) -> None:
        """All keys and values of a step are written before any is read."""
        assert len(plan.t_window) == plan.tokens, "a token without a window slot"
        assert len(set(plan.t_window.tolist())) == plan.tokens, "two tokens have a window slot"
        own = iter(plan.t_window.tolist())
        for work in works:
            row = self.rows[work.row]
            written = row.slots[work.start :]
            row.windows[work.start :] = [*islice(own, work.n_tokens)]
            for place, slot in zip(row.windows[work.start :], written, strict=True):
                assert 0 <= place < room.slots
                self.window_memory[place] = self.memory[slot]
        for work in works:
            row = self.rows[work.row]
            first = max(work.start - room.window + 1, 0)
            found = [self.window_memory[place] for place in row.windows[first:]]
            marks = [self.memory[slot] for slot in row.slots[first:]]
            assert found == marks, "window slots hold another prefix"

    def _sample_each(self, work: Work, shared: set[int]) -> list[int]:
        """Behind a wrong draft nothing is drawn, and what it wrote is overwritten."""
        tokens = [self._sample(work, shared)] if work.samples else []
        for draft in work.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(self._sample(work, shared))
        wrong = work.samples - len(tokens)
        slots = self.rows[work.row].slots
        self.users.subtract(slots[len(slots) - wrong :])
        del slots[len(slots) - wrong :]
        return tokens + [UNSAMPLED] * wrong

    def _sample(self, work: Work, shared: set[int]) -> int:
        row = self.rows[work.row]
        index = len(row.tokens) - row.prompt_length
        token = self.choose(row.sequence_id, index)
        if token < 0:
            # What this row computed since its last good token is garbage, if it has not been shared
            # yet. Whoever reads it later will see.
            for position in range(row.unproven_from, len(row.tokens)):
                if row.slots[position] not in shared:
                    self.memory[row.slots[position]] = row.marks[position + 1] = -row.sequence_id
                    if row.windows:
                        self.window_memory[row.windows[position]] = -row.sequence_id
            end = len(row.slots)
            self.states[work.row] = end, row.marks[min(end, len(row.marks) - 1)]
        else:
            row.unproven_from = len(row.tokens)
        row.tokens.append(token if token >= 0 else -1 - row.sequence_id)
        self.outputs[row.sequence_id].append(token)
        self._mark(row)
        return token


@dataclass
class Owed:
    """What the client knows of a sequence."""

    request: Request
    held: bool = False
    tokens: list[int] = field(default_factory=list)
    started: int = 0
    #: "finish", "failure", "abort" once it has ended.
    ended: str = ""


class Driver:
    """Drives a scheduler step by step, with or without overlap, and checks all that comes out."""

    def __init__(self, *, overlap=False, choose=lambda sequence_id, index: 0, **limits) -> None:
        policies = {name: limits.pop(name) for name in POLICIES if name in limits}
        self.safe = policies.get("admission", Exact) in (Exact, Reserve)
        self.scheduler = Scheduler(Limits(**{"max_positions": 10_000} | limits), **policies)
        self.stalls = Stalls(self.scheduler)
        self.executor = ReferenceExecutor(self.scheduler, choose)
        self.overlap = overlap
        self.now = 0
        self.steps = self.accepted = 0
        self.sequences: dict[int, Owed] = {}
        self.ops: dict[int, Advance] = {}
        self.ops_done: list[int] = []
        #: By op that is done: sequences that wait for a row.
        self.waiting: dict[int, list[int]] = {}
        self.last_step: Step | None = None
        self._flying: tuple[Step, list[int]] | None = None
        #: By step under way: the last one whose copies had arrived.
        self.arrived: dict[int, int] = {}

    # -- what clients do -----------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self.sequences |= {i: Owed(request) for i in request.sequence_ids}
        self.scheduler.submit(request)
        self._hear(self.scheduler.drain_events())
        self.scheduler.check()

    def abort(self, *ids: int) -> None:
        for sequence_id in ids:
            owed = self.sequences.get(sequence_id)
            if owed and not owed.ended:
                owed.ended = "abort"
        self.scheduler.abort(ids)
        self.scheduler.check()

    def preempt(self, *ids: int) -> list[int]:
        """Those of them that were running sequences of the batcher, and were preempted."""
        before = self.scheduler.load().preemptions
        preempted = [i for i in ids if preempt_sequence(self.scheduler, i)]
        assert not any(self.sequences[i].held for i in preempted), "a router's sequence"
        self.scheduler.check()
        assert self.scheduler.load().preemptions == before + len(preempted)
        return preempted

    def advance(self, op: int, start=(), chunks=None, resume=(), waits=False) -> Failure | None:
        start = list(start)
        chunks = chunks if chunks is not None else [0] * len(start)
        message = Advance(op, start, chunks, list(resume), waits)
        failure = self.scheduler.advance(message)
        if failure is None:
            self.ops[op] = message
            self.sequences |= {i: Owed(r, held=True) for r in start for i in r.sequence_ids}
        self.scheduler.check()
        return failure

    # -- time ----------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One turn of the engine's loop; whether anything was under way."""
        step = self.scheduler.plan(self.now)
        self._check_held(step)
        previous, self._flying = self._flying, None
        self.last_step = step
        if step is not None:
            self.steps += 1
            self._flying = (step, self.executor.launch(step))
            self.arrived[step.plan.step] = self.executor.arrived
        if previous is not None:
            self._settle(*previous)
        if self._flying is not None and not self.overlap:
            flying, self._flying = self._flying, None
            self._settle(*flying)
        self._hear(self.scheduler.drain_events())
        self.scheduler.check()
        assert not self.safe or self.stalls.count == 0
        return step is not None or previous is not None

    def run(self, turns: int = 100_000) -> None:
        """Turn until nothing happens."""
        while turns and self.turn():
            turns -= 1

    def drain(self) -> None:
        """Let everything end, and see that nothing is left."""
        self.run()
        stuck = [op for op in self.ops if op not in self.ops_done]
        # Others may wait behind one that waits for a row.
        assert not stuck or self.ops[stuck[0]].waits, "router steps that never completed"
        self.abort(*[i for i, owed in self.sequences.items() if owed.held])
        self.run()
        assert sorted(self.ops_done) == sorted(self.ops)
        left = [i for i, owed in self.sequences.items() if not owed.ended]
        assert not left, f"sequences that never ended: {left}"
        assert not self.scheduler.busy
        kv = self.scheduler.kv
        assert kv.available == kv.total
        kv.evict(kv.tree.evictable)
        assert kv.free == kv.total
        self.scheduler.check()
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)

    def outputs(self, sequence_id: int) -> list[int]:
        return self.sequences[sequence_id].tokens

    def planned(self) -> dict[int, int]:
        """Tokens of each sequence in the last step."""
        return {w.sequence.id: w.n_tokens for w in works_of(self.last_step)}

    # -- what comes back -----------------------------------------------------------------------

    def _settle(self, step: Step, tokens: list[int]) -> None:
        arrived = self.arrived.pop(step.plan.step)
        settled = self.scheduler.settle(step, tokens, self.now, arrived=arrived)
        sampled = [sequence.id for sequence in step.sampled]
        told = [at for at in settled.samples if at >= 0]  # others ended without a token
        assert told == sorted(set(told))
        for at, sequence_id, token in zip(
            settled.samples, settled.sequence_ids, settled.token_ids, strict=True
        ):
            assert at < 0 or (sampled[at], tokens[at]) == (sequence_id, token)
        self.accepted += sum(drafted.accepted for drafted in settled.drafted)
        self._hear(settled)
        # A deadline may have ended it in the plan of the next step.
        self._hear(self.scheduler.drain_events())
        for at, sequence_id in enumerate(sampled):
            owed = self.sequences[sequence_id]
            if tokens[at] != UNSAMPLED:
                assert owed.ended or at in settled.samples, "a token is lost"

    def _hear(self, settled: Settled) -> None:
        for started in settled.started:
            owed = self.sequences[started.sequence_id]
            assert not owed.ended
            owed.started += 1
            assert owed.started == 1
            assert 0 <= started.cached_tokens < len(owed.request.prompt)
        for sequence_id, token, finish in zip(
            settled.sequence_ids, settled.token_ids, settled.finishes, strict=True
        ):
            self._hear_token(self.sequences[sequence_id], token, finish)
        for failure in settled.failures:
            owed = self.sequences[failure.sequence_id]
            assert not owed.ended, f"{owed.ended}, then {failure}"
            owed.ended = f"failure {failure.code.name}"
        for advanced in settled.advanced:
            self.ops_done.append(advanced.op)
            self.waiting[advanced.op] = advanced.waiting
            self._check_answer(advanced)
        assert len(set(self.ops_done)) == len(self.ops_done), "a router step completed twice"

    def _check_answer(self, advanced: Advanced) -> None:
        """Each sequence of a router's step waits, is behind, has ended, or has got a token."""
        op = self.ops[advanced.op]
        named = {i for r in op.start for i in r.sequence_ids} | set(op.resume)
        for sequence_id in named:
            if self.sequences[sequence_id].ended:
                continue
            owed, behind = self.sequences[sequence_id], advanced.behind.get(sequence_id, 0)
            assert 0 <= behind <= owed.request.positions
            assert bool(owed.tokens) == (not behind), "complete without its tokens"
            assert behind or sequence_id not in advanced.waiting, "it waited and has begun"
        untouched = [
            i
            for i in advanced.waiting
            if advanced.behind.get(i) == self.sequences[i].request.positions
        ]
        assert not op.waits or not named or set(untouched) < named, "nobody was stepped"

    def _hear_token(self, owed: Owed, token: int, finish: FinishCode) -> None:
        assert not owed.ended, f"{owed.ended}, then a token"
        if token < 0:
            assert finish == FinishCode.TIME_LIMIT
            assert not owed.tokens
            assert self.now >= owed.request.stopping.time_limit_at
        else:
            owed.tokens.append(token)
            assert owed.started == 1
            assert finish == expected_finish(owed, self.now)
        if finish:
            owed.ended = "finish"

    def _check_held(self, step: Step | None) -> None:
        for work in works_of(step):
            sequence_id = work.sequence.id
            if self.sequences[sequence_id].held:
                asked = [
                    op
                    for op, message in self.ops.items()
                    if op not in self.ops_done
                    and (
                        sequence_id in message.resume
                        or any(sequence_id in r.sequence_ids for r in message.start)
                    )
                ]
                assert asked, "a router's sequence ran unasked"


def expected_finish(owed: Owed, now: int) -> FinishCode:
    """What the last token means, after the rules in words."""
    stopping, count, token = owed.request.stopping, len(owed.tokens), owed.tokens[-1]
    assert count <= stopping.max_new_tokens
    full = count == stopping.max_new_tokens
    may_stop = full or count > stopping.min_new_tokens
    if full and stopping.length_first:
        return FinishCode.LENGTH
    if may_stop and token in stopping.eos_token_ids:
        return FinishCode.EOS
    if may_stop and token in stopping.stop_token_ids:
        return FinishCode.STOP_TOKEN
    if full:
        return FinishCode.LENGTH
    if stopping.time_limit_at is not None and now >= stopping.time_limit_at:
        return FinishCode.TIME_LIMIT
    return FinishCode.RUNNING


__all__ = ["SECOND", "Driver", "FailureCode", "ReferenceExecutor", "expected_finish", "request"]
