"""Whether drafts pay, by a clock that is simulated: a step's time follows from its tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import pytest

from support.engines.scheduler_driver import Driver, request
from tokenpod.core.constraints import Regex
from tokenpod.core.plan import LAST, UNSAMPLED
from tokenpod.scheduler.drafts.draft_choice import Choosing
from tokenpod.scheduler.drafts.drafting import MOST_ROWS, Drafting
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.steps.step_times import Costs, StepTimes

pytestmark = pytest.mark.compute

MOST = 4
MILLISECOND = 1_000_000
#: What is drawn, always; a wrong guess is another token.
RIGHT, WRONG = 7, 8


class Source:
    """Each guess is right with this chance, and there are any with that.

    `small`: milliseconds that each guess takes, if an executor's draft model makes it.
    """

    def __init__(self, right: float, some: float = 1.0, small: float | None = None) -> None:
        self.right, self.some = right, some
        self.watched, self.small = small is None, small or 0.0
        self.chance = random.Random(5)
        self.asked = 0

    def find(self, sequence, most):
        self.asked += 1
        if self.chance.random() >= self.some:
            return []
        return [RIGHT if self.chance.random() < self.right else WRONG for _ in range(most)]

    def forget(self, sequence):
        pass


@dataclass
class Machine:
    """What steps take, in milliseconds: weights, each token, and the host before and after."""

    fixed: float
    token: float
    host: float
    overlap: bool
    #: What the first steps with drafts take besides, one after the other.
    first_uses: tuple[float, ...] = ()

    def rate(self, rows, tokens, source=None):
        """Tokens per millisecond of so many sequences of so many tokens, and drafted ones."""
        drafting = None
        if source is not None:
            drafting = partial(Drafting, source, MOST, costs=Costs())
        limits = Limits(slots=200_000, max_rows=rows, max_positions=5000, prefill_tokens=1000)
        scheduler = Scheduler(limits, drafting=drafting)
        for i in range(rows):
            scheduler.submit(request(i, [1, 2], max_new_tokens=tokens, drafts=MOST))
        now, free, made, flying = 0, 0, 0, []
        first_uses = iter(self.first_uses)
        while scheduler.busy or flying:
            step = scheduler.plan(now)
            if step is not None:
                now += int(self.host / 2 * MILLISECOND)
                took = int((self.fixed + self.token * step.plan.tokens) * MILLISECOND)
                small = 0
                if step.drafting and not source.watched:
                    most = max(step.drafts_of(row) for row, _ in step.drafting)
                    small = int(source.small * most * MILLISECOND)
                if step.drafting:
                    slow = int(next(first_uses, 0.0) * MILLISECOND)
                    took, small = took + slow, small and small + slow
                free = max(now, free) + took + small
                flying.append((step, free, small))
            if flying and (len(flying) > 1 or step is None or not self.overlap):
                done, end, small = flying.pop(0)
                now = max(now, end)
                settled = scheduler.settle(done, drawn(done.plan), now, drafting_ns=small)
                made += len(settled.token_ids)
                now += int(self.host / 2 * MILLISECOND)
        assert made == rows * tokens
        return made / (now / MILLISECOND), scheduler.load().drafted_tokens


def drawn(plan):
    """The right token each time, and nothing behind a wrong draft."""
    tokens, at = [], 0
    for n, samples in zip(plan.r_tokens.tolist(), plan.r_samples.tolist(), strict=True):
        drafts = plan.t_token[at : at + n].tolist()[n - samples + 1 :] if samples else []
        at += n
        if samples:
            assert LAST not in drafts
            kept = [*drafts, WRONG].index(WRONG)
            tokens += [RIGHT] * (kept + 1) + [UNSAMPLED] * (len(drafts) - kept)
    return tokens


GPU = Machine(fixed=4.0, token=0.01, host=0.6, overlap=True)
CPU = Machine(fixed=2.0, token=1.0, host=0.1, overlap=False)
#: Its time is that of its tokens: drafts are never free.
BUSY = Machine(fixed=0.1, token=1.0, host=0.1, overlap=True)


@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize(
    ("machine", "rows", "right", "least"),
    [
        (GPU, 1, 1.0, 3.7),
        (GPU, 1, 0.75, 2.4),
        (GPU, 16, 0.9, 2.9),
        (CPU, 1, 0.95, 1.8),
        (CPU, 1, 0.6, 1.0),
    ],
)
def test_right_guesses_make_it_faster(machine, rows, right, least):
    plain, _ = machine.rate(rows, 1000)
    faster, drafted = machine.rate(rows, 1000, Source(right))
    assert drafted > 100
    assert faster / plain > least


@pytest.mark.sampled(2, "slow", by_turns=True)
@pytest.mark.parametrize(
    ("machine", "rows", "right", "small", "least"),
    [
        (GPU, 1, 0.75, 0.3, 2.0),
        (GPU, 16, 0.75, 0.5, 1.6),
        (GPU, 1, 0.75, 3.0, 0.98),
        (GPU, 1, 0.1, 0.3, 0.98),
        (CPU, 1, 0.3, 0.5, 0.98),
        (BUSY, 32, 0.5, 1.0, 0.98),
    ],
)
def test_a_draft_model_is_used_where_its_own_time_pays(machine, rows, right, small, least):
    """Nobody can watch it, so it is tried, and again now and then."""
    plain, _ = machine.rate(rows, 1000)
    faster, drafted = machine.rate(rows, 1000, Source(right, small=small))
    assert drafted > 0
    assert faster / plain > least


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("small", [None, 0.3])
@pytest.mark.parametrize("first_uses", [(400.0,), (400.0, 50.0), (0.0, 400.0), (*[0.0] * 9, 400.0)])
def test_a_slow_step_does_not_end_drafts(first_uses, small):
    """Kernels are loaded and memory is taken when something is done for the first time."""
    machine = replace(GPU, first_uses=first_uses)
    usual, _ = GPU.rate(1, 1000, Source(0.75, small=small))
    got, drafted = machine.rate(1, 1000, Source(0.75, small=small))
    assert drafted > 600
    lost = 2 * sum(first_uses) if small else sum(first_uses)
    # N-grams pause for 64 steps after the first, and for 128 after the second.
    assert 1000 / got - lost < (1.1 if small else 1.5) * 1000 / usual


def test_a_draft_model_that_was_given_up_is_tried_again():
    source = Source(0.0, small=0.3)
    counts = [GPU.rate(1, tokens, source)[1] for tokens in (500, 2900)]
    assert 0 < counts[0] < counts[1]


@pytest.mark.sampled(8, "slow")
@pytest.mark.parametrize("machine", [GPU, CPU, BUSY], ids=["gpu", "cpu", "busy"])
@pytest.mark.parametrize("rows", [1, 8, MOST_ROWS])
@pytest.mark.parametrize(
    ("right", "some"), [(0.0, 1.0), (0.1, 1.0), (0.3, 0.2), (0.6, 0.05), (0.75, 0.5)]
)
def test_it_is_never_slower_by_more_than_a_fiftieth(machine, rows, right, some):
    tokens = 400 if rows < 64 else 100
    plain, _ = machine.rate(rows, tokens)
    got, _ = machine.rate(rows, tokens, Source(right, some))
    assert got / plain > 0.98


def test_in_a_large_batch_nobody_is_asked():
    source = Source(1.0)
    plain, _ = GPU.rate(MOST_ROWS + 40, 20)
    got, drafted = GPU.rate(MOST_ROWS + 40, 20, source)
    assert (got, drafted) == (plain, 0)
    # Their last step has fewer of them.
    assert source.asked <= MOST_ROWS + 40


def test_a_request_that_wants_no_drafts_has_none():
    source = Source(1.0)
    limits = Limits(slots=200, max_rows=2, max_positions=100, prefill_tokens=64)
    scheduler = Scheduler(limits, drafting=lambda kv: Drafting(source, MOST, kv))
    scheduler.submit(request(1, [1, 2], max_new_tokens=9))
    scheduler.submit(request(2, [1, 2], max_new_tokens=9, drafts=2))
    most = {1: 0, 2: 0}
    while (step := scheduler.plan(0)) is not None:
        for sequence, samples in zip(step.sequences, step.plan.r_samples.tolist(), strict=True):
            most[sequence.id] = max(most[sequence.id], samples)
        scheduler.settle(step, drawn(step.plan), 0)
    assert most == {1: 1, 2: 3}


def test_what_finding_drafts_takes_is_learned_by_their_number():
    """Of which some is there for the first one alone."""
    costs = Costs()
    assert costs.finding(1, 4) == 0
    for steps, took in ((2, 980), (6, 1940)):
        costs.note(1 + steps, 5000, drafts=True, gap=None)
        costs.note_finding(1, steps, took)
    expected = {1: 490, 2: 980, 4: 1460, 6: 1940, 8: 2420}
    assert {n: costs.finding(1, n) for n in expected} == pytest.approx(expected)
    # Of more rows, of which only few drafts are known, in proportion.
    costs.note_finding(4, 2, 1200)
    assert costs.finding(4, 6) == pytest.approx(3600)
    assert costs.finding(2, 2) == pytest.approx(980 + 220 / 3)


@pytest.mark.parametrize(("small", "expected"), [(None, {1: 3, 2: 3}), (0.1, {1: 1, 2: 3})])
def test_a_constrained_row_has_no_drafts_that_are_not_known_yet(small, expected):
    limits = Limits(slots=200, max_rows=2, max_positions=100, prefill_tokens=64)
    source = Source(1.0, small=small)
    scheduler = Scheduler(limits, drafting=lambda kv: Drafting(source, MOST, kv))
    scheduler.submit(request(1, [1, 2], max_new_tokens=9, drafts=2, constraint=Regex("a+")))
    scheduler.submit(request(2, [1, 2], max_new_tokens=9, drafts=2))
    scheduler.masked([1])
    most = {1: 0, 2: 0}
    while (step := scheduler.plan(0)) is not None:
        for sequence, samples in zip(step.sequences, step.plan.r_samples.tolist(), strict=True):
            most[sequence.id] = max(most[sequence.id], samples)
        scheduler.settle(step, drawn(step.plan), 0)
    assert most == expected


@pytest.mark.parametrize("overlap", [False, True], ids=["settled at once", "overlapped"])
def test_a_router_that_drafts_in_every_step_keeps_no_stream_waiting(overlap):
    drafting = partial(Drafting, Source(1.0), MOST)
    driver = Driver(
        overlap=overlap, slots=5000, max_rows=8, prefill_tokens=64, drafting=drafting, choose=right
    )
    driver.advance(1, [request(i, [i, 1], max_new_tokens=400, drafts=MOST) for i in (10, 11)])
    driver.submit(request(1, [1, 1], max_new_tokens=400, drafts=MOST))
    driver.run(4)
    for op in range(2, 42):
        driver.advance(op, resume=[10, 11])
        driver.turn()
    assert len(driver.outputs(10)) > 80
    # Overlapped, a row with drafts is in every other step.
    assert len(driver.outputs(1)) > 80
    driver.abort(1, 10, 11)
    driver.drain()


@pytest.mark.parametrize("overlap", [False, True], ids=["settled at once", "overlapped"])
def test_where_a_step_has_too_few_drafts_each_row_gets_its_share(overlap):
    """A router's rows are added first, and want more drafts than a step holds."""
    drafting, rows = partial(Drafting, Source(1.0), 8), [*range(10, 50)]
    driver = Driver(
        overlap=overlap,
        slots=60_000,
        max_rows=48,
        prefill_tokens=64,
        drafting=drafting,
        choose=right,
    )
    driver.advance(1, [request(i, [i, 1], max_new_tokens=1000, drafts=8) for i in rows])
    driver.submit(request(1, [1, 1], max_new_tokens=1000, drafts=8))
    driver.run(6)
    before = {i: len(driver.outputs(i)) for i in (1, *rows)}
    for op in range(2, 22):
        driver.advance(op, resume=rows)
        driver.turn()
    # 256 drafts for 41 rows. Overlapped, a row with drafts is in every other step.
    least = 6 * (9 if overlap else 19)
    assert all(len(driver.outputs(i)) - n >= least for i, n in before.items())
    driver.abort(1, *rows)
    driver.drain()


def right(sequence_id, index):
    """See `RIGHT`."""
    return RIGHT


def test_a_choice_holds_for_its_planner_whatever_another_one_chooses(monkeypatch):
    made = []
    choose = Choosing._choose
    monkeypatch.setattr(Choosing, "_choose", lambda *given: made.append(1) or choose(*given))
    drafting = partial(Drafting, Source(0.0), MOST, costs=Costs())
    driver = Driver(slots=5000, max_rows=8, prefill_tokens=64, drafting=drafting, choose=right)
    driver.advance(1, [request(i, [i, 1], max_new_tokens=400, drafts=MOST) for i in (10, 11)])
    driver.submit(request(1, [1, 1], max_new_tokens=400, drafts=MOST))
    driver.run(4)
    made.clear()
    for op in range(2, 82):
        driver.advance(op, resume=[10, 11])
        driver.turn()
    # Eight steps each.
    assert len(made) <= 2 * (80 // 8 + 1)
    driver.abort(1, 10, 11)
    driver.drain()


def test_nothing_is_drafted_while_memory_is_promised_to_others():
    """Each has its bound, one after the other; at once both don't fit."""
    limits = Limits(slots=44, max_rows=2, max_positions=100, prefill_tokens=64)
    scheduler = Scheduler(limits, drafting=lambda kv: Drafting(Source(1.0), MOST, kv))
    scheduler.submit(request(1, [1] * 24, max_new_tokens=3, drafts=MOST))
    scheduler.submit(request(2, [2], max_new_tokens=30, drafts=MOST))
    drafted_with = set()
    while (step := scheduler.plan(0)) is not None:
        if step.drafting:
            drafted_with.add(len(step.sequences))
        scheduler.settle(step, drawn(step.plan), 0)
    assert scheduler.load().accepted_tokens > 10
    assert drafted_with == {1}


def test_a_size_of_steps_that_was_not_seen_for_long_is_unknown():
    times = StepTimes()

    def note(tokens, took):
        times.passed()
        times.note(tokens, took)

    assert times.of(3) is None
    note(1, 10)
    note(8, 80)
    assert (times.of(1), times.of(8), times.of(16), times.of(32)) == (10, 80, 80, 160)
    assert 10 < times.of(4) < 80
    note(1, 30)
    assert times.of(1) == 10, "one of the first was held up"
    for _ in range(600):
        note(1, 20)
    assert times.of(2) == times.of(1) == pytest.approx(20, abs=0.1)
    for _ in range(600):
        times.passed()
    assert times.of(1) is None, "steps of other kinds count, too"
