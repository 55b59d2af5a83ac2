"""Overload in virtual time: the real scheduler, the real counts, steps that take what we say."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tokenpod.core.outputs import FailureCode, FinishCode, Load
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.scheduler import Limits, Scheduler, Settled
from tokenpod.service.admission.admission import Outlook, Turnover
from tokenpod.service.admission.counters import PodCounters

SECOND = 1_000_000_000
ROWS = 64
PROMPT = 3
DEADLINE = 5.0


class Pod:
    """A pod in virtual time.

    Args:
        step_seconds: what a step with so many rows takes, at a moment.
        most: requests at once.
    """

    def __init__(self, step_seconds: Callable[[float, int], float], most: int = 4 * ROWS) -> None:
        self.now = 0
        self.counters = PodCounters.create(1)
        self.turnover = Turnover(self.counters, lambda: self.now / SECOND)
        self.ends: Counter[str] = Counter()
        #: Tokens of calls that ended well.
        self.good = 0
        self._step_seconds = step_seconds
        self._most = most
        limits = Limits(
            max_rows=ROWS,
            prefill_tokens=512,
            slots=100_000,
            max_positions=4096,
            prefix_caching=True,
        )
        self._scheduler = Scheduler(limits)
        self._engine = SimpleNamespace(load=Load(0, 0, 0, 0, 0, 0), usual_step=0.0)
        self.turnover.watch(self._engine, ROWS)
        self._calls: dict[int, Request] = {}
        self._began: dict[int, int] = {}
        self._count = 0

    def call(self, new_tokens: int, seconds: float | None = DEADLINE) -> bool:
        """A call arrives; whether it is taken in."""
        if self.counters.requests >= self._most:
            self.ends["full"] += 1
            return False
        begin_by = deadline_at = None
        if seconds is not None:
            if not self.turnover.outlook().fits(seconds):
                self.ends["refused"] += 1
                return False
            deadline_at = self.now + int(seconds * SECOND)
            within = self.turnover.begin_within(seconds, new_tokens)
            begin_by = self.now + int(within * SECOND)
        self._count += 1
        self.counters.add(requests=1, waiting=1)
        self._calls[self._count] = request = Request(
            sequence_ids=[self._count],
            prompt=[self._count % 1000 + 1] * PROMPT,
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=new_tokens),
            deadline_at=deadline_at,
            begin_by=begin_by,
        )
        self._scheduler.submit(request)
        return True

    def step(self) -> None:
        """One turn of the engine, or a hundredth of a second without work."""
        step = self._scheduler.plan(self.now)
        self._take(self._scheduler.drain_events())
        if step is None:
            self.now += SECOND // 100
            return
        took = self._step_seconds(self.now / SECOND, len(step.sequences))
        self.now += int(took * SECOND)
        usual = self._engine.usual_step
        self._engine.usual_step = usual + 0.05 * (took - usual) if usual else took
        self._engine.load = self._scheduler.load()
        self._take(self._scheduler.settle(step, [7] * len(step.sampled), self.now))

    def _take(self, settled: Settled) -> None:
        for started in settled.started:
            self.counters.add(waiting=-1)
            self._began[started.sequence_id] = started.began_at
        for sequence_id, finish in zip(settled.sequence_ids, settled.finishes, strict=True):
            if finish is FinishCode.LENGTH:
                self.good += self._calls[sequence_id].stopping.max_new_tokens
                self._end(sequence_id, "OK")
        for failure in settled.failures:
            assert failure.code is FailureCode.DEADLINE_EXCEEDED
            self._end(failure.sequence_id, failure.message.partition(":")[0])

    def _end(self, sequence_id: int, how: str) -> None:
        del self._calls[sequence_id]
        self.ends[how] += 1
        began_at = self._began.pop(sequence_id, None)
        self.counters.add(requests=-1, waiting=-(began_at is None))
        if began_at is not None:
            self.turnover.note((self.now - began_at) / SECOND)


def even(at: float, rows: int) -> float:
    """A step's time as a CPU has it: some for itself, more for each row."""
    return 0.004 + 0.0006 * rows


def uneven(at: float, rows: int) -> float:
    """A machine that others use too: up to a half faster or slower, differently each second."""
    return even(at, rows) * random.Random(int(at)).uniform(0.67, 1.5)


def equal(chance: random.Random) -> int:
    """Tokens of a call: all alike."""
    return 32


def mixed(chance: random.Random) -> int:
    """Many short ones, few long ones, which could not end in time on an idle pod."""
    return min(1 + int(chance.expovariate(1 / 32)), 200)


Lengths = Callable[[random.Random], int]


def warm(
    step_seconds: Callable[[float, int], float], lengths: Lengths, most: int = 4 * ROWS
) -> tuple[Pod, float]:
    """A pod that has served 128 clients, each of which waits for an answer; their tokens/s."""
    chance, pod = random.Random(1), Pod(step_seconds, most)
    while pod.now < 10 * SECOND:
        while pod.counters.requests < 2 * ROWS:
            pod.call(lengths(chance), None)
        pod.step()
    return pod, pod.good / 10


@pytest.mark.compute
@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize("times", [2, 10])
@pytest.mark.parametrize(
    ("step_seconds", "lengths", "least"),
    [(even, equal, 0.97), (uneven, equal, 0.85), (even, mixed, 0.7)],
    ids=["alike", "alike, on a machine that others use", "mixed"],
)
def test_beyond_the_load_that_can_be_served_as_much_ends_in_time(
    step_seconds: Callable[[float, int], float], lengths: Lengths, least: float, times: int
) -> None:
    pod, peak = warm(step_seconds, lengths)
    pod.good, began = 0, pod.now
    chance, due = random.Random(2), began / SECOND
    while pod.now < began + 20 * SECOND:
        while due * SECOND <= pod.now:
            pod.call(lengths(chance))
            due += chance.expovariate(times * peak / 32)
        pod.step()
    assert pod.good / 20 / peak >= least, pod.ends
    # Hardly anybody is told late.
    assert pod.ends["refused"] > 4 * pod.ends["the deadline can't be met any more"]


@pytest.mark.parametrize("step_seconds", [even, uneven])
def test_of_a_burst_those_are_taken_in_who_will_be_served(
    step_seconds: Callable[[float, int], float],
) -> None:
    """16 callers a row at once, who come again and again, and some who have no deadline."""
    pod, _ = warm(step_seconds, equal, most=100 * ROWS)
    pod.ends.clear()
    # Six times what a call takes among as many as run at once.
    seconds = 6 * 33 * even(0, ROWS)
    due = [pod.now / SECOND] * (16 * ROWS)
    patient, left = due[0] + seconds / 4, 50 * ROWS
    while left or pod.counters.requests:
        while left and due and due[0] * SECOND <= pod.now:
            left -= 1
            if not pod.call(32, seconds):
                heapq.heapreplace(due, pod.now / SECOND + seconds / 20)
            else:
                heapq.heappop(due)
        if patient * SECOND <= pod.now:
            for _ in range(2 * ROWS):
                assert pod.call(8, None)
            patient = math.inf
        before = pod.ends.total()
        pod.step()
        for _ in range(pod.ends.total() - before):
            heapq.heappush(due, pod.now / SECOND)
    assert pod.ends["refused"], "more came than could be served"
    # Were all of them let in, they would wait for as long as they may, and hardly one would end.
    late = pod.ends.total() - pod.ends["refused"] - pod.ends["OK"]
    assert pod.ends["OK"] > 4 * late, pod.ends


def test_who_is_refused_comes_again_when_there_may_be_room() -> None:
    """Ten times the callers that can be served, who come again after the hint: few have to."""
    pod, peak = warm(even, equal)
    pod.good, began = 0, pod.now
    chance, due = random.Random(2), began / SECOND
    again: list[tuple[float, float]] = []
    arrived = tries = 0

    def call(end: float) -> None:
        nonlocal tries
        now = pod.now / SECOND
        tries += 1
        if not pod.call(32, end - now):
            hint = max(pod.turnover.come_again(end - now), 1.0)
            heapq.heappush(again, (now + hint * chance.uniform(1, 1.5), end))

    while pod.now < began + 20 * SECOND:
        while due * SECOND <= pod.now:
            call(due + DEADLINE)
            arrived += 1
            due += chance.expovariate(10 * peak / 32)
        while again and again[0][0] * SECOND <= pod.now:
            _, end = heapq.heappop(again)
            if end * SECOND > pod.now:
                call(end)
        pod.step()
    assert pod.good / 20 / peak >= 0.97, pod.ends
    # After a second each it would be three and a half.
    assert tries / arrived < 1.1


def busy(running: int, waiting: int) -> Turnover:
    """Of 10 rows; 100 calls have run for a second each, and so many are there."""
    counters = PodCounters.create(1)
    turnover = Turnover(counters)
    load = Load(running, max(running + waiting - 10, 0), 0, 100, 100, 0)
    turnover.watch(SimpleNamespace(load=load, usual_step=0.1), 10)
    for _ in range(100):
        turnover.note(1.0)
    counters.add(requests=running + waiting, waiting=waiting)
    return turnover


def test_who_waits_is_told_by_those_ahead() -> None:
    outlook = busy(running=10, waiting=20).outlook()
    assert (outlook.wait, outlook.run) == (pytest.approx(2.0), pytest.approx(1.0))
    assert outlook.fits(3.4)
    assert not outlook.fits(3.3)


@pytest.mark.parametrize(("running", "waiting"), [(0, 0), (0, 10), (9, 0), (3, 7)])
def test_nobody_is_refused_while_there_is_no_line(running: int, waiting: int) -> None:
    assert busy(running, waiting).outlook().fits(0.001)


def test_a_short_line_keeps_nobody_away_who_may_be_short() -> None:
    turnover = busy(running=10, waiting=1)
    assert turnover.outlook().fits(0.5)
    assert turnover.begin_within(0.5, 100) == pytest.approx(0.125)


def test_a_call_for_few_tokens_may_begin_later() -> None:
    turnover = busy(running=10, waiting=20)
    assert turnover.begin_within(9.0, 100) == pytest.approx(9 - 1 / 0.9)
    assert turnover.begin_within(9.0, 4) == pytest.approx(9 - 0.5 / 0.9)


def test_calls_that_have_been_served_and_are_still_read_are_not_ahead() -> None:
    turnover = busy(running=10, waiting=0)
    turnover._counters.add(requests=50)
    assert turnover.outlook().wait == 0.0


def test_those_who_are_refused_are_told_to_come_one_after_the_other() -> None:
    now = 100.0
    turnover = busy(running=10, waiting=20)
    turnover._now = lambda: now
    hints = [turnover.come_again(None) for _ in range(31)]
    assert (hints[0], hints[30]) == (0.0, pytest.approx(3.0))
    # Who has no time for that is told so, and keeps nobody waiting.
    assert turnover.come_again(2.0) == turnover.come_again(None) == pytest.approx(3.1)
    now += 2.0
    assert turnover.come_again(None) == pytest.approx(1.2)
    now += 100.0
    assert turnover.come_again(None) == 0.0


def test_nothing_is_foretold_by_few_calls() -> None:
    counters = PodCounters.create(1)
    turnover = Turnover(counters)
    counters.add(requests=50, waiting=50)
    assert turnover.outlook() == Outlook()
    assert turnover.come_again(None) == 0.0
    turnover.watch(SimpleNamespace(load=Load(1, 49, 0, 100, 0, 0), usual_step=0.1), 1)
    for _ in range(15):
        turnover.note(60.0)
    assert turnover.outlook().fits(0.001)
    turnover.note(60.0)
    assert not turnover.outlook().fits(100.0)


def test_different_calls_are_given_more_time_than_equal_ones() -> None:
    counters = PodCounters.create(1)
    turnover = Turnover(counters)
    turnover.watch(SimpleNamespace(load=Load(1, 1, 0, 100, 0, 0), usual_step=0.1), 1)
    for _ in range(200):
        turnover.note(0.5)
        turnover.note(1.5)
    assert turnover.outlook().run == pytest.approx(2.0, rel=0.05)
