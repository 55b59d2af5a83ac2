"""What a message costs, by the fields on its wire, and which field is to blame."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.rpc.wire import (
    MESSAGE_FIELDS,
    SEARCH_SLICE,
    SLICE,
    WHOLE,
    Malformed,
    Size,
    count,
    fault_in,
    fields_of,
)
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

BAD = b"ab\xff"
FIELDS = fields_of(pb.GenerateRequest.DESCRIPTOR)
NESTED = MESSAGE_FIELDS
ANY = Size(fields=10**9, elements=10**9)


def walk(data: bytes, most: Size = ANY) -> int:
    """Slices of the walk."""
    return len(list(count(FIELDS, data, most)))


def least_fields(data: bytes) -> int:
    """The smallest limit that lets `data` pass."""
    for fields in itertools.count():
        try:
            walk(data, Size(fields, 10**9))
        except InvalidArgument:
            continue
        return fields
    raise AssertionError


def blamed(data: bytes) -> InvalidArgument:
    search = fault_in(FIELDS, data)
    while True:
        try:
            next(search)
        except StopIteration as found:
            fault: InvalidArgument = found.value
            return fault


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (pb.GenerateRequest(), 0),
        (pb.GenerateRequest(text="Größe", priority=3), 2),
        (pb.GenerateRequest(text="x" * 1000), 1),
        (pb.GenerateRequest(sampling={"temperature": 0.5, "seed": 2**64 - 1}), NESTED + 2),
        (pb.GenerateRequest(stopping={"stop_sequences": ["", "a", "b"]}), NESTED + 3),
        (pb.GenerateRequest(sampling={"logit_bias": {1: 2.0, 3: 4.0}}), 3 * NESTED + 4),
        (pb.GenerateRequest(token_ids={"ids": range(1000)}), NESTED + 1),
        (
            pb.GenerateRequest(chat={"messages": [{"role": "u", "content": "x"}] * 3}),
            4 * NESTED + 6,
        ),
    ],
)
def test_every_field_on_the_wire_counts_and_messages_count_more(message: Any, fields: int) -> None:
    assert least_fields(message.SerializeToString()) == fields


def test_fields_that_nobody_knows_count_too_and_are_not_looked_into() -> None:
    assert least_fields(b"\xf8\x7f\x01" * 5) == 5
    assert least_fields(b"\xfa\x7f\x03\x08\x01\x08" * 5) == 5


def test_numbers_of_a_packed_list_count_one_by_one() -> None:
    data = pb.GenerateRequest(token_ids={"ids": [1, 200, 100_000] * 100}).SerializeToString()
    walk(data, Size(30, 300))
    with pytest.raises(InvalidArgument, match="at most 299 numbers") as refused:
        walk(data, Size(30, 299))
    assert refused.value.field == "token_ids.ids"


def test_numbers_of_several_lists_count_together() -> None:
    ids = pb.GenerateRequest(token_ids={"ids": [1] * 100}).SerializeToString()
    walk(ids * 3, Size(30, 300))
    with pytest.raises(InvalidArgument):
        walk(ids * 3, Size(30, 299))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\x2a\x80\x02" + b"\x1a\x00" * 128, "stopping.stop_sequences"),
        (b"\x22\x80\x02" + b"\x52\x00" * 128, "sampling.logit_bias"),
        (b"\x1a\x80\x02" + b"\x0a\x00" * 128, "chat.messages"),
        (b"\xf8\x7f\x01" * 128, WHOLE),
        (b"\x48\x01" * 128, WHOLE),
        (b"\x0b\x0c" * 128, WHOLE),
    ],
)
def test_the_list_that_is_too_long_is_named(data: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument, match="at most 50 fields") as refused:
        walk(data, Size(50, 50))
    assert refused.value.field == field


def test_the_walk_is_bounded_by_the_limit_and_not_by_the_message() -> None:
    data = b"\xf8\x7f\x01" * 1_000_000
    steps = count(FIELDS, data, Size(10 * SLICE, 0))
    assert [next(steps) for _ in range(10)] == [None] * 10
    with pytest.raises(InvalidArgument):
        next(steps)


def test_a_walk_and_a_search_for_a_fault_stop_at_every_slice() -> None:
    texts = pb.GenerateRequest(stopping={"stop_sequences": ["x"] * 3 * SLICE})
    data = texts.SerializeToString()
    assert walk(data) == 3
    spoiled = pb.GenerateRequest(text="bad").SerializeToString().replace(b"bad", BAD)
    search = fault_in(FIELDS, data + spoiled)
    assert len(list(search)) == 3 * SLICE // SEARCH_SLICE


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x05ab",
        b"\xff" * 20,
        b"\x0f",
        b"\x0e",
        b"\x80" * 64,
        b"\x0d\x01",
        b"\x22\x01\xff",
    ],
)
def test_what_is_no_message_is_noticed_on_the_way(data: bytes) -> None:
    with pytest.raises(Malformed):
        walk(data)


@given(st.binary(max_size=200))
def test_whatever_parses_can_be_walked_and_what_can_not_is_blamed(data: bytes) -> None:
    try:
        pb.GenerateRequest.FromString(data)
    except DecodeError:
        assert blamed(data).problem
        return
    walk(data)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(text="bad"), "text"),
        (pb.GenerateRequest(text="fine", request_id="bad"), "request_id"),
        (
            pb.GenerateRequest(stopping={"stop_sequences": ["a", "b", "bad"]}),
            "stopping.stop_sequences[2]",
        ),
        (
            pb.GenerateRequest(chat={"messages": [{"role": "user"}, {"content": "bad"}]}),
            "chat.messages[1].content",
        ),
    ],
)
def test_the_first_field_that_is_not_utf8_is_named(
    request_: pb.GenerateRequest, field: str
) -> None:
    error = blamed(request_.SerializeToString().replace(b"bad", BAD))
    assert error.field == field
    assert error.problem == "is not valid UTF-8: invalid start byte at byte 2"


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05ab", b"\xff" * 20, b"\x0b", b"\x0f"])
def test_bytes_that_are_no_message_are_blamed_on_the_whole(data: bytes) -> None:
    assert blamed(data).field == WHOLE


def test_a_broken_message_inside_is_named() -> None:
    assert blamed(b"\x22\x01\xff").field == "sampling"
