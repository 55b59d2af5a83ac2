"""The wire between service and engine, over a real socket pair."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpod.core.link import FrameDecoder, Link, LinkClosed, PatientLink, encode_frame
from tokenpod.core.messages import Abort, Advance, FromEngine, ToEngine
from tokenpod.core.outputs import Load, StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams

REQUEST = Request(
    sequence_ids=[1, 2],
    prompt=[5, 6, 7],
    sampling=SamplingParams(do_sample=True, seed=2**64 - 1, logit_bias={3: -1.5}),
    stopping=StoppingParams(max_new_tokens=4, eos_token_ids=frozenset({0}), time_limit_at=2**62),
    salt="tenant",
)
MESSAGES = [REQUEST, Abort([1, 2**62]), Advance(1, [REQUEST], [0], [7, 8], waits=True)]


def test_messages_arrive_as_they_were_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Link(ours, ToEngine), Link(theirs, ToEngine)
        for message in MESSAGES:
            sender.send(message)
        assert receiver.receive(None) == MESSAGES


@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_frames_survive_any_fragmentation(cuts: list[int]) -> None:
    encoder = msgspec.msgpack.Encoder()
    stream = b"".join(encode_frame(encoder, message) for message in MESSAGES * 3)
    decoder = FrameDecoder(ToEngine)
    received = []
    at = 0
    while at < len(stream):
        step = cuts[at % len(cuts)]
        received += decoder.feed(stream[at : at + step])
        at += step
    assert received == MESSAGES * 3


def test_receive_returns_at_once_when_there_is_nothing_and_it_may_not_wait() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert Link(theirs, ToEngine).receive(0.0) == []


def test_a_waiting_receive_is_woken_by_a_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Timer(0.05, lambda: Link(ours, ToEngine).send(Abort([3])))
        sender.start()
        assert Link(theirs, ToEngine).receive(None) == [Abort([3])]
        sender.join()


def test_the_death_of_the_other_side_is_seen_on_both_paths() -> None:
    ours, theirs = socket.socketpair()
    link = Link(theirs, ToEngine)
    ours.close()
    with pytest.raises(LinkClosed):
        link.receive(None)
    with pytest.raises(LinkClosed):
        link.send(Abort([1]))
    theirs.close()


def test_step_outputs_decode_as_a_message_from_the_engine() -> None:
    load = Load(running=1, waiting=0, waiting_tokens=0, slots=8, free_slots=7, evictable_slots=0)
    outputs = StepOutputs(1, 2, [3], [4], [-0.5], [0], load)
    frame = encode_frame(msgspec.msgpack.Encoder(), outputs)
    assert FrameDecoder(FromEngine).feed(bytes(frame)) == [outputs]


def flush_all(link: PatientLink[ToEngine]) -> None:
    while link.unsent:
        link.flush()


def test_a_patient_link_keeps_what_a_late_reader_has_not_taken_and_sends_it_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, reader = PatientLink(ours, ToEngine, patience=60), Link(theirs, ToEngine)
        sent = [Abort([0] * 50_000 + [at]) for at in range(20)]
        for message in sent:
            sender.send(message)
        assert sender.unsent
        arrived: list[ToEngine] = []
        while len(arrived) < len(sent):
            arrived += reader.receive(0.0)
            sender.flush()
        assert arrived == sent
        assert not sender.unsent


def test_a_patient_link_is_closed_to_one_who_reads_nothing_for_too_long() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = PatientLink(ours, ToEngine, patience=0.05)
        sender.send(Abort([0] * 1_000_000))
        with pytest.raises(LinkClosed):
            flush_all(sender)
