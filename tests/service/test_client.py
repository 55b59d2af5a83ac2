"""The engine link's asyncio side, against a real socket pair whose other end the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tokenpod.core.constraints import Regex
from tokenpod.core.link import FrameDecoder, encode_frame
from tokenpod.core.messages import (
    Abort,
    Advance,
    Ask,
    Broken,
    EngineOptions,
    Loading,
    Ready,
    ToEngine,
)
from tokenpod.core.outputs import (
    Advanced,
    Drafted,
    Failure,
    FailureCode,
    FinishCode,
    Load,
    Started,
    StepOutputs,
    Top,
    Vectors,
)
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.service.calls.errors import Internal, Unavailable
from tokenpod.service.pod.client import EngineClient

OPTIONS = EngineOptions("/model", None, "cpu", 1, 8, 64)
READY = Ready("float32", "float32", "cpu", "contiguous", None, 100, 128, 1000, 1, 4, 0.1, 0.1)


@dataclass
class Notes:
    """A sink that writes down what it hears."""

    tokens: list[tuple[int, int, FinishCode]] = field(default_factory=list)
    tops: list[Top | None] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)
    satisfied: list[tuple[int, bool]] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)
    wakes: int = 0
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def on_started(self, started: Started) -> None:
        self.started.append(started.sequence_id)

    def on_vectors(self, vectors: Vectors) -> None:
        """Nothing is asked of these."""

    def on_drafted(self, drafted: Drafted) -> None:
        self.drafted.append(drafted)

    def on_satisfied(self, sequence_id: int, *, whole: bool) -> None:
        self.satisfied.append((sequence_id, whole))

    def on_token(
        self, sequence_id: int, token_id: int, logprob: float, finish: FinishCode, top: Top | None
    ) -> None:
        self.tokens.append((sequence_id, token_id, finish))
        self.tops.append(top)

    def on_failure(self, failure: Failure) -> None:
        self.failures.append(failure)

    def on_fault(self, sequence_id: int, fault: Internal) -> None:
        self.faults.append((sequence_id, fault.error_id))

    def wake(self) -> None:
        self.wakes += 1
        self.woken.set()

    async def news(self) -> None:
        async with asyncio.timeout(10):
            await self.woken.wait()
        self.woken.clear()


@dataclass
class Engine:
    """The far end of the link."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    inbox: list[Any] = field(default_factory=list)
    frames: Any = field(default_factory=lambda: FrameDecoder(ToEngine))

    def say(self, *messages: msgspec.Struct) -> None:
        encoder = msgspec.msgpack.Encoder()
        self.writer.write(b"".join(bytes(encode_frame(encoder, m)) for m in messages))

    async def hear(self) -> Any:
        async with asyncio.timeout(10):
            while not self.inbox:
                data = await self.reader.read(1 << 16)
                assert data, "the client hung up"
                self.inbox += self.frames.feed(data)
        return self.inbox.pop(0)

    def die(self) -> None:
        self.writer.close()


@contextlib.asynccontextmanager
async def linked(
    loading: list[Loading] | None = None,
) -> AsyncIterator[tuple[EngineClient, Engine]]:
    """A client and its engine, introduced."""
    heard: list[Loading] = [] if loading is None else loading
    ours, theirs = socket.socketpair()
    client = await EngineClient(on_loading=heard.append).open(ours)
    client.send(OPTIONS)
    engine = Engine(*await asyncio.open_unix_connection(sock=theirs))
    try:
        assert await engine.hear() == OPTIONS
        yield client, engine
    finally:
        client.close()
        engine.die()


def request(*sequence_ids: int) -> Request:
    return Request(list(sequence_ids), [1, 2], SamplingParams(), StoppingParams(max_new_tokens=4))


def step(*tokens: tuple[int, int, FinishCode], at: int = 1, **rest: Any) -> StepOutputs:
    ids, token_ids, finishes = ([entry[part] for entry in tokens] for part in range(3))
    load = Load(1, 2, 3, 1000, 900, 50)
    return StepOutputs(1, at, ids, token_ids, [0.0] * len(ids), finishes, load, **rest)


RUNNING, LENGTH = FinishCode.RUNNING, FinishCode.LENGTH


async def test_front_ends_never_name_a_sequence_alike() -> None:
    clients = [EngineClient(on_loading=print, index=index, count=3) for index in range(3)]
    named = [client.new_sequence_ids(2) + client.new_sequence_ids(1) for client in clients]
    assert named == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


async def test_loading_and_readiness_are_passed_on() -> None:
    loading: list[Loading] = []
    async with linked(loading) as (client, engine):
        engine.say(Loading(1, 2), Loading(2, 2), READY)
        assert await asyncio.wait_for(client.ready, 10) == READY
        assert loading == [Loading(1, 2), Loading(2, 2)]


async def test_each_sink_hears_of_its_own_sequences_and_wakes_once_a_step() -> None:
    async with linked() as (client, engine):
        one, two = Notes(), Notes()
        client.submit(request(0, 1), one)
        client.submit(request(2), two)
        assert await engine.hear() == request(0, 1)
        top = Top(2, [5, 6], [-0.1, -2.0])
        started = [Started(0, 0, 1), Started(2, 0, 1)]
        tokens = [(0, 10, RUNNING), (1, 11, RUNNING), (2, 12, RUNNING)]
        engine.say(step(*tokens, started=started, tops=[top]))
        await one.news()
        assert one.tokens == tokens[:2]
        assert two.tokens == tokens[2:]
        assert (one.started, two.started) == ([0], [2])
        assert (one.tops, two.tops) == ([None, None], [top])
        assert (one.wakes, two.wakes) == (1, 1)
        assert client.load.waiting_tokens == 3


class Panic(BaseException):
    """As libraries in Rust raise it: no Exception."""


class Faulty(Notes):
    """Raises in one of its methods."""

    def __init__(self, method: str, error: type[BaseException]) -> None:
        super().__init__()
        self._error = error
        setattr(self, method, self._raise)

    def _raise(self, *_: object, **__: object) -> None:
        raise self._error("a secret text")


@pytest.mark.parametrize("error", [OverflowError, RecursionError, Panic])
@pytest.mark.parametrize(
    "method",
    [
        *("on_started", "on_satisfied", "on_drafted", "on_vectors", "on_token"),
        *("on_failure", "wake"),
    ],
)
async def test_a_sink_that_raises_ends_alone(
    method: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine hears of it, the log has the error under an id, and other sinks go on."""
    async with linked() as (client, engine):
        faulty, other = Faulty(method, error), Notes()
        client.submit(request(0, 1), faulty)
        client.submit(request(2), other)
        engine.say(
            step(
                *((0, 10, RUNNING), (2, 12, RUNNING)),
                started=[Started(0, 0, 1)],
                satisfied={0: True},
                drafted=[Drafted(0, 1, 1)],
                vectors=[Vectors(0, 1, 1, bytes(4))],
                failures=[Failure(1, FailureCode.DATA_LOSS, "NaN")],
            )
        )
        await other.news()
        ((sequence_id, error_id),) = faulty.faults
        assert sequence_id == (1 if method in ("on_failure", "wake") else 0)
        heard = [await engine.hear() for _ in range(3)]
        assert heard == [request(0, 1), request(2), Abort([sequence_id])]
        assert [record.error_id for record in caplog.records] == [error_id]
        engine.say(step((0, 11, RUNNING), (2, 13, LENGTH)))
        await other.news()
        assert other.tokens == [(2, 12, RUNNING), (2, 13, LENGTH)]


async def test_a_request_that_cannot_be_sent_is_not_waited_for() -> None:
    """Else work would be pending for ever, and the engine would seem to be stuck."""
    async with linked() as (client, engine):
        # Half of a character, as JSON can write it: no message can hold it.
        bad = msgspec.structs.replace(request(0), constraint=Regex("\ud800"))
        with pytest.raises(UnicodeEncodeError):
            client.submit(bad, Notes())
        with pytest.raises(UnicodeEncodeError):
            await client.advance(
                start=[bad], start_chunks=[0], resume=[], waits=False, sink=Notes()
            )
        assert not client.pending
        client.submit(request(1), Notes())
        assert await engine.hear() == request(1)


async def test_a_finished_sequence_is_forgotten() -> None:
    async with linked() as (client, engine):
        notes = Notes()
        client.submit(request(0), notes)
        assert client.pending
        engine.say(step((0, 10, LENGTH)))
        await notes.news()
        assert not client.pending
        engine.say(step((0, 99, RUNNING)), READY)
        await asyncio.wait_for(client.ready, 10)
        assert notes.tokens == [(0, 10, LENGTH)]


async def test_an_aborted_sequence_is_not_heard_of_again() -> None:
    async with linked() as (client, engine):
        notes = Notes()
        client.submit(request(0, 1), notes)
        client.abort([1, 77])
        assert await engine.hear() == request(0, 1)
        assert await engine.hear() == Abort([1, 77])
        engine.say(step((0, 10, RUNNING), (1, 11, RUNNING)))
        await notes.news()
        assert notes.tokens == [(0, 10, RUNNING)]


async def test_a_step_of_sequences_nobody_knows_disturbs_nobody() -> None:
    async with linked() as (client, engine):
        failure = Failure(78, FailureCode.DATA_LOSS, "NaN")
        engine.say(step((77, 1, LENGTH), started=[Started(77, 0, 1)], failures=[failure]), READY)
        assert await asyncio.wait_for(client.ready, 10) == READY


async def test_a_failure_reaches_its_sink_alone() -> None:
    async with linked() as (client, engine):
        one, two = Notes(), Notes()
        client.submit(request(0), one)
        client.submit(request(1), two)
        failure = Failure(0, FailureCode.DATA_LOSS, "NaN")
        engine.say(step((1, 5, RUNNING), failures=[failure]))
        await one.news()
        assert one.failures == [failure]
        assert (two.failures, two.tokens) == ([], [(1, 5, RUNNING)])


async def test_a_router_step_returns_after_its_tokens() -> None:
    async with linked() as (client, engine):
        notes = Notes()
        advancing = asyncio.create_task(
            client.advance(start=[request(0)], start_chunks=[0], resume=[], waits=False, sink=notes)
        )
        asked = await engine.hear()
        assert isinstance(asked, Advance)
        engine.say(step((0, 10, RUNNING), advanced=[Advanced(asked.op, 1, 2, 3)]))
        assert await asyncio.wait_for(advancing, 10) == Advanced(asked.op, 1, 2, 3)
        assert notes.tokens == [(0, 10, RUNNING)]
        assert not client.pending


@pytest.mark.parametrize("words", [[], [Broken("out of memory")]], ids=["silent", "broken"])
async def test_a_lost_engine_fails_all_that_is_under_way_once(words: list[Broken]) -> None:
    async with linked() as (client, engine):
        notes = Notes()
        client.submit(request(0, 1), notes)
        advancing = asyncio.create_task(
            client.advance(
                start=[request(2)], start_chunks=[0], resume=[], waits=False, sink=Notes()
            )
        )
        await engine.hear()
        engine.say(*words)
        engine.die()
        why = await asyncio.wait_for(asyncio.shield(client.lost), 10)
        assert str(why) == (words[0].message if words else "the engine process ended")
        assert [(f.sequence_id, f.code) for f in notes.failures] == [
            (0, FailureCode.UNAVAILABLE),
            (1, FailureCode.UNAVAILABLE),
        ]
        assert notes.wakes == 1
        advanced = await asyncio.wait_for(advancing, 10)
        assert advanced.failure is not None
        assert advanced.failure.code is FailureCode.UNAVAILABLE
        assert not client.pending


async def test_nothing_is_asked_of_a_lost_engine() -> None:
    async with linked() as (client, engine):
        engine.die()
        await asyncio.wait_for(asyncio.shield(client.lost), 10)
        with pytest.raises(Unavailable) as refused:
            client.submit(request(0), Notes())
        assert refused.value.retry_after
        assert not client.pending


async def test_work_makes_no_engine_look_younger() -> None:
    async with linked() as (client, _):
        before = client.last_step_at, client.heard_at
        client.submit(request(0), Notes())
        assert (client.last_step_at, client.heard_at) == before


async def test_a_step_after_a_pause_is_timed_from_the_work_on() -> None:
    async with linked() as (client, engine):
        idle_since, sink = client.last_step_at, Notes()
        await asyncio.sleep(0.2)
        client.submit(request(0), sink)
        engine.say(step((0, 7, LENGTH), at=time.monotonic_ns()))
        await sink.news()
        assert 0 < client.usual_step < (client.last_step_at - idle_since) / 1e9 - 0.15


async def test_an_engine_is_asked_for_a_sign() -> None:
    async with linked() as (client, engine):
        client.ask()
        assert await engine.hear() == Ask()


async def test_sequence_ids_are_never_given_twice() -> None:
    async with linked() as (client, _):
        assert client.new_sequence_ids(2) + client.new_sequence_ids(3) == [0, 1, 2, 3, 4]
