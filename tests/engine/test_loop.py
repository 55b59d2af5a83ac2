"""The loop over a real socket, with an executor that only counts."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

from tokenpod.core.errors import EngineError
from tokenpod.core.link import Link, LinkClosed
from tokenpod.core.messages import (
    Abort,
    AdapterDone,
    Ask,
    FromEngine,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
)
from tokenpod.core.outputs import FailureCode, StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.sampling.prompt_scores import PromptScores
from tokenpod.engine.steps.executor import StepResult
from tokenpod.engine.steps.step_executor import scored_rows
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.scheduler import Limits, Scheduler

CHUNK = 4


class Counting:
    """Samples the token 1, or -1 (NaN) for the rows in `bad`.

    Scores every prompt token -1.0; of two likeliest ones it is the second, and its rank is its id.
    """

    def __init__(self) -> None:
        self.bad = False

    def launch(self, plan):
        samples = int(plan.r_samples.sum())
        scores = {row: self._score(following) for row, following in scored_rows(plan)}
        token = -1 if self.bad else 1
        result = StepResult([token] * samples, [-0.5] * samples, [], scores)

        class Launched:
            def wait(self):
                return result

        return Launched()

    def _score(self, following):
        own = torch.from_numpy(following.copy())
        tops = torch.stack([own + 1, own], 1)
        return PromptScores(torch.full((len(own),), -1.0), tops, tops * -0.5, own)


class Pod:
    """A loop and the service's end of its link."""

    def __init__(self, *, overlap: bool) -> None:
        ours, theirs = socket.socketpair()
        self._end = ours
        self.link = Link[FromEngine](ours, FromEngine)
        self.executor = Counting()
        limits = Limits(slots=200, max_rows=8, max_positions=200, prefill_tokens=CHUNK)
        link = Link[ToEngine](theirs, ToEngine)
        #: Nanoseconds, as the loop's clock shows them.
        self.now = 1
        self.loop = EngineLoop(
            link, Scheduler(limits), self.executor, overlap=overlap, clock=lambda: self.now
        )

    def send(self, message) -> None:
        self.link.send(message)

    def hang_up(self) -> None:
        self._end.close()

    def turn(self, times: int = 1) -> list[StepOutputs]:
        heard: list[StepOutputs] = []
        for _ in range(times):
            # Changes nothing, but an idle loop would wait for a message.
            self.send(Abort([]))
            self.loop.turn()
            heard += self.link.receive(0.0)
        return heard


@pytest.fixture(params=[False, True], ids=["settles at once", "overlaps"])
def pod(request):
    made = Pod(overlap=request.param)
    yield made
    made.hang_up()


def scored(sequence_id: int, **options) -> Request:
    """A prompt of several pieces whose tokens are to be scored."""
    return Request(
        sequence_ids=[sequence_id],
        prompt=list(range(3 * CHUNK)),
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=2),
        prompt_logprobs=True,
        **options,
    )


def test_a_prompt_in_pieces_is_scored_whole(pod):
    pod.send(scored(1))
    heard = pod.turn(8)
    (started,) = (started for outputs in heard for started in outputs.started)
    assert started.prompt_logprobs == [-1.0] * (3 * CHUNK - 1)
    details = started.prompt_details
    assert details.rank_list() == list(range(1, 3 * CHUNK))
    assert details.tops(5) == ([7, 6], [-3.5, -3.0])
    assert not pod.loop._scored


def test_scores_of_a_prompt_that_was_aborted_are_dropped(pod):
    pod.send(scored(1))
    pod.turn(2)
    assert len(pod.loop._scored) == 1
    pod.send(Abort([1]))
    pod.turn(3)
    assert not pod.loop._scored


def test_scores_of_a_prompt_that_failed_are_dropped(pod):
    pod.executor.bad = True
    pod.send(scored(1))
    heard = pod.turn(5)
    assert [failure.sequence_id for outputs in heard for failure in outputs.failures] == [1]
    assert not pod.loop._scored


def test_scores_of_a_prompt_that_ran_out_of_time_are_dropped(pod):
    pod.send(scored(1, deadline_at=pod.now + 200_000_000))
    pod.turn(2)
    assert len(pod.loop._scored) == 1
    pod.now += 200_000_001
    heard = pod.turn(3)
    assert [failure.sequence_id for outputs in heard for failure in outputs.failures] == [1]
    assert not pod.loop._scored


def test_the_load_is_told_once_when_an_abort_leaves_nothing_to_step(pod):
    pod.send(scored(1))
    (*_, busy) = pod.turn(2)
    assert busy.load.running == 1
    pod.send(Abort([1]))
    (*_, idle) = pod.turn(2)
    assert (idle.load.running, idle.load.free_slots + idle.load.evictable_slots) == (0, 200)
    assert pod.turn(3) == []


def test_who_asks_is_answered_in_the_same_turn_with_or_without_work(pod):
    pod.send(Ask())
    assert len(pod.turn()) == 1
    pod.send(scored(1))
    pod.turn(2)
    pod.send(Ask())
    assert pod.turn()


def test_the_loop_ends_with_its_link(pod):
    pod.hang_up()
    with pytest.raises(LinkClosed):
        pod.loop.run()


class Ones:
    """Guesses what is sampled."""

    watched = True

    def find(self, sequence, most):
        return [1] * most

    def forget(self, sequence):
        pass


def test_what_has_waited_for_tokens_is_launched_before_they_are_told():
    """A row with drafts gives up overlap; the device then waits for as little as may be."""
    order: list[str] = []

    class Noting(Counting):
        def launch(self, plan):
            order.append("launch")
            return super().launch(plan)

    inbox = [Request([1], [5, 6], SamplingParams(), StoppingParams(9), drafts=2)]

    class End:
        def receive(self, seconds):
            messages = [*inbox]
            inbox.clear()
            return messages

        def send(self, message):
            order.append("tell")

    limits = Limits(slots=200, max_rows=2, max_positions=100, prefill_tokens=CHUNK)
    scheduler = Scheduler(limits, drafting=lambda kv: Drafting(Ones(), 2, kv))
    loop = EngineLoop(End(), scheduler, Noting(), overlap=True, clock=lambda: 1)
    for _ in range(4):
        loop.turn()
    assert order[:5] == ["launch", "launch", "tell", "launch", "tell"]


def test_it_says_when_it_waits_for_the_device_or_for_messages():
    """Who reads adapters works then."""
    seen: list[tuple[str, bool]] = []
    inbox = [Request([1], [5, 6], SamplingParams(), StoppingParams(2))]

    class Pace:
        waits = False

        def __enter__(self):
            self.waits = True

        def __exit__(self, *_):
            self.waits = False

    class End:
        def receive(self, seconds):
            seen.append(("receive", pace.waits))
            messages = [*inbox]
            inbox.clear()
            return messages

        def send(self, message):
            seen.append(("send", pace.waits))

    class Noting(Counting):
        def launch(self, plan):
            seen.append(("launch", pace.waits))
            launched = super().launch(plan)
            wait = launched.wait
            launched.wait = lambda: [seen.append(("wait", pace.waits)), wait()][1]
            return launched

    pace = Pace()
    book = SimpleNamespace(pace=pace, settle=lambda: None, busy=False)
    limits = Limits(slots=200, max_rows=2, max_positions=100, prefill_tokens=CHUNK)
    scheduler = Scheduler(limits)
    loop = EngineLoop(End(), scheduler, Noting(), overlap=True, clock=lambda: 1, adapters=book)
    while scheduler.busy or inbox:
        loop.turn()
    loop.turn()
    # The first and the last have nothing else to do; between them a step is under way.
    receives = [waits for name, waits in seen if name == "receive"]
    assert receives[0]
    assert receives[-1]
    assert not any(receives[1:-1])
    assert {waits for name, waits in seen if name == "wait"} == {True}
    assert not any(waits for name, waits in seen if name in ("launch", "send"))


class Checked(Pod):
    """Counts checks of the scheduler."""

    def __init__(self) -> None:
        super().__init__(overlap=False)
        self.checks = 0
        check = self.loop.scheduler.check

        def counted() -> None:
            self.checks += 1
            check()

        self.loop.scheduler.check = counted

    def answer(self, sequence_id: int) -> None:
        """A request, to its end."""
        self.send(scored(sequence_id))
        while self.loop.scheduler.busy or sequence_id not in self._ended:
            self.loop.turn()
            for outputs in self.link.receive(0.0):
                finishes = zip(outputs.sequence_ids, outputs.finishes, strict=True)
                self._ended |= {each for each, finish in finishes if finish}

    _ended: frozenset[int] = frozenset()


def test_the_scheduler_is_checked_while_nothing_runs_once_a_second_at_most():
    pod = Checked()
    pod.answer(1)
    assert pod.checks == 0
    pod.loop.turn()
    assert pod.checks == 1
    pod.answer(2)
    assert pod.loop._patience() == 1.0
    pod.now += 999_000_000
    pod.turn()
    assert pod.checks == 1
    pod.now += 1_000_000
    assert pod.loop._patience() == 0.01
    pod.loop.turn()
    assert pod.checks == 2
    assert pod.loop._patience() is None, "nothing has happened since"
    pod.hang_up()


@pytest.mark.parametrize(
    ("lose", "facts"),
    [
        (lambda scheduler: scheduler._rows._free.pop(), "taken"),
        (
            lambda scheduler: scheduler.kv._allocator.allocate(3, position=0, room=3),
            "slots in no or two places",
        ),
    ],
    ids=["a row", "slots"],
)
def test_a_scheduler_that_has_lost_something_ends_the_engine_with_the_facts(lose, facts):
    pod = Checked()
    pod.answer(1)
    lose(pod.loop.scheduler)
    with pytest.raises(EngineError, match="state is inconsistent while nothing runs") as failed:
        pod.loop.turn()
    assert facts in str(failed.value)
    assert "of 200 slots" in str(failed.value)
    pod.hang_up()


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_counted_with_their_rows_tokens_and_busy_time(overlap):
    pod = Pod(overlap=overlap)
    launch = pod.executor.launch

    def launch_for_ten_nanoseconds(plan):
        launched = launch(plan)

        class Launched:
            def wait(self):
                pod.now += 10
                return launched.wait()

        return Launched()

    pod.executor.launch = launch_for_ten_nanoseconds
    pod.now = 1000
    request = Request(
        [0], [7] * 6, SamplingParams(), StoppingParams(max_new_tokens=3), arrived_at=0
    )
    pod.send(request)
    outputs = pod.turn(12)
    counts = outputs[-1].load.steps
    # A prompt of six tokens in chunks of four, and two more tokens.
    assert (counts.steps, counts.tokens) == (4, 8)
    assert (counts.rows, counts.busy_ns) == (4, 40)
    pod.now += 500
    assert pod.turn(3) == [], "an idle engine is not busy"


def test_an_engine_without_slots_for_adapters_loads_and_unloads_none(pod):
    pod.send(LoadAdapter(1, "law", "law"))
    pod.send(UnloadAdapter(2, "law"))
    first, second = (each for each in pod.turn(2) if isinstance(each, AdapterDone))
    assert (first.op, first.failure) == (1, FailureCode.INVALID_ARGUMENT)
    assert "--max-adapters" in first.message
    assert (second.op, second.failure) == (2, FailureCode.NOT_FOUND)
