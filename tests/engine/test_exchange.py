"""Several front ends at one engine: each hears of its own sequences, and of nobody else's."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tokenpod.core.link import Link, LinkClosed, give_link
from tokenpod.core.messages import Abort, Broken, FromEngine, Ready, ToEngine
from tokenpod.core.outputs import (
    Advanced,
    Failure,
    FailureCode,
    Load,
    Started,
    StepOutputs,
    Top,
    Vectors,
)
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.exchange import Exchange, face_of

LOAD = Load(1, 2, 3, 4, 5, 6)
READY = Ready("float32", "float32", "cpu", "contiguous", None, 100, 128, 1000, 1, 4, 0.1, 0.1)


class House:
    """Three front ends and the engine's end of their links."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        self.joins, joins = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.engine = face_of([*(theirs for _, theirs in pairs), joins], patience=0.1)
        self.front_ends = [Link[FromEngine](ours, FromEngine) for ours, _ in pairs]  # type: ignore[arg-type]
        self.sockets = [end for pair in pairs for end in pair] + [self.joins, joins]

    def leave(self, front_end: int) -> None:
        self.sockets[2 * front_end].close()

    def replace(self, front_end: int) -> None:
        """Another process takes the place of one, which may still be there."""
        ours, theirs = socket.socketpair()
        with theirs:
            give_link(self.joins, front_end, theirs)
        self.sockets.append(ours)
        self.front_ends[front_end] = Link[FromEngine](ours, FromEngine)  # type: ignore[arg-type]

    def told(self, front_end: int) -> list[FromEngine]:
        return self.front_ends[front_end].receive(0.0)


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    for end in house.sockets:
        end.close()


def request(*sequence_ids: int) -> Request:
    return Request(
        sequence_ids=list(sequence_ids),
        prompt=[1],
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=4),
    )


def step(ids: list[int], **fields: object) -> StepOutputs:
    made = {"finishes": [0] * len(ids), **fields}
    return StepOutputs(
        step=7,
        at=8,
        sequence_ids=ids,
        token_ids=[100 + i for i in ids],
        logprobs=[-float(i) for i in ids],
        load=LOAD,
        **made,
    )


def test_one_front_end_has_the_link_to_itself() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert isinstance(face_of([theirs]), Link)


def test_each_front_end_is_told_of_its_own_rows_alone(house: House) -> None:
    house.engine.send(
        step(
            [5, 0, 3, 4, 1],
            started=[Started(4, 2, 1), Started(3, 0, 1)],
            tops=[Top(0, [9], [-0.1]), Top(3, [8], [-0.2], 5), Top(4, [7], [-0.3])],
            failures=[Failure(8, FailureCode.DATA_LOSS, "NaN")],
            advanced=[Advanced(1)],
        )
    )
    (first,), (second,), (third,) = (house.told(at) for at in range(3))
    assert first == step([0, 3], started=[Started(3, 0, 1)], advanced=[Advanced(1)])
    assert second == step(
        [4, 1],
        started=[Started(4, 2, 1)],
        tops=[Top(0, [8], [-0.2], 5), Top(1, [7], [-0.3])],
    )
    assert third == step(
        [5], tops=[Top(0, [9], [-0.1])], failures=[Failure(8, FailureCode.DATA_LOSS, "NaN")]
    )


def test_vectors_go_to_whose_text_they_are(house: House) -> None:
    vectors = [Vectors(i, 1, 1, bytes(4)) for i in (3, 4, 5)]
    ids, ends = [3, 4, 5], [2, 2, 2]
    house.engine.send(StepOutputs(1, 1, ids, [-1] * 3, [0.0] * 3, ends, LOAD, vectors=vectors))
    for front_end, own in enumerate(vectors):
        (told,) = house.told(front_end)
        assert isinstance(told, StepOutputs)
        assert told.vectors == [own]


def test_the_first_hears_of_every_step_and_the_others_of_theirs(house: House) -> None:
    house.engine.send(step([1]))
    assert house.told(0) == [step([])]
    assert len(house.told(1)) == 1
    assert house.told(2) == []


def test_what_concerns_the_engine_is_told_to_all(house: House) -> None:
    house.engine.send(Broken("out of order"))
    assert [house.told(at) for at in range(3)] == [[Broken("out of order")]] * 3


def test_requests_of_all_front_ends_arrive(house: House) -> None:
    for at, front_end in enumerate(house.front_ends):
        front_end.send(request(at))
        front_end.send(Abort([at]))
    arrived = house.engine.receive(1.0)
    assert sorted(m.sequence_ids for m in arrived) == [[0], [0], [1], [1], [2], [2]]


def test_a_front_end_that_is_gone_leaves_nothing_running(house: House) -> None:
    gone = house.front_ends[1]
    for message in (request(1, 4), request(7), request(10), request(13), Abort([7])):
        gone.send(message)
    house.front_ends[2].send(request(2))
    assert len(house.engine.receive(1.0)) == 6
    house.engine.send(
        step([4], finishes=[1], failures=[Failure(10, FailureCode.UNAVAILABLE, "gone")])
    )
    house.leave(1)
    assert house.engine.receive(1.0) == [Abort([1, 13])]
    # And the others go on.
    house.engine.send(step([1, 2]))
    assert house.told(2) == [step([2])]
    house.front_ends[2].send(Abort([2]))
    assert house.engine.receive(1.0) == [Abort([2])]


def test_a_step_for_one_that_has_just_gone_reaches_the_others(house: House) -> None:
    house.front_ends[1].send(request(1))
    house.engine.receive(1.0)
    house.leave(1)
    for _ in range(3):
        house.engine.send(step([1, 2]))
    assert house.told(2) == [step([2])] * 3
    assert house.engine.receive(1.0) == [Abort([1])]


def test_a_front_end_that_reads_no_more_is_given_up_and_the_others_go_on(house: House) -> None:
    house.front_ends[1].send(request(1))
    house.engine.receive(1.0)
    sent = 0
    aborts: list[ToEngine] = []
    while not aborts:
        house.engine.send(step([2, *[1] * 5000]))
        sent += 1
        assert [message.sequence_ids for message in house.told(2)] == [[2]]
        house.told(0)
        aborts = house.engine.receive(0.0)
    assert aborts == [Abort([1])]
    # Whatever had arrived, then the end.
    with pytest.raises(LinkClosed):
        all(house.told(1) for _ in range(sent + 1))


def test_a_new_front_end_hears_that_the_engine_is_ready_and_of_nothing_before(house: House) -> None:
    house.engine.send(READY)
    assert house.told(1) == [READY]
    house.front_ends[1].send(request(1, 4))
    house.engine.receive(1.0)
    house.leave(1)
    house.replace(1)
    assert house.engine.receive(1.0) == [Abort([1, 4])]
    house.engine.receive(0.0)
    assert house.told(1) == [READY]
    house.front_ends[1].send(request(7))
    assert house.engine.receive(1.0) == [request(7)]
    house.engine.send(step([7, 2]))
    assert house.told(1) == [step([7])]


def test_a_new_front_end_ends_the_link_of_the_one_before(house: House) -> None:
    house.front_ends[1].send(request(1))
    house.engine.receive(1.0)
    before = house.front_ends[1]
    house.replace(1)
    assert house.engine.receive(1.0) == [Abort([1])]
    with pytest.raises(LinkClosed):
        before.receive(0.0)


def test_without_the_first_there_is_nobody_to_work_for(house: House) -> None:
    house.leave(0)
    with pytest.raises(LinkClosed):
        house.engine.receive(1.0)


def test_an_exchange_waits_for_whoever_speaks_first() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    exchange = Exchange([theirs for _, theirs in pairs])
    assert exchange.receive(0.0) == []
    Link(pairs[1][0], FromEngine).send(request(1))  # type: ignore[arg-type]
    assert exchange.receive(None) == [request(1)]
    for pair in pairs:
        for end in pair:
            end.close()
