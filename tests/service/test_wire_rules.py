"""What tokenpod.v1 refuses on the wire: fields, types, values and oneofs that it does not know."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from support.clients import wirefuzz
from support.clients.wirefuzz import varint
from support.examples import examples
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.intake import Parser
from tokenpod.service.rpc.wire import DEEPEST
from tokenpod_client.protos.tokenpod.v1 import chat_pb2, generation_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as pb

GENERATE = "/tokenpod.v1.GenerationService/Generate"
ONCE = "/tokenpod.v1.GenerationService/GenerateOnce"
UNKNOWN = varint(2047 << 3) + b"\x01"


async def parse(data: bytes, method: str = GENERATE, *, strict: bool = True) -> object:
    row, limits = TABLE.rows[method], TABLE.limits(strict=strict)[method]
    return await Parser.of(row.request.FromString, limits).parse(data)


async def refusal(data: bytes, method: str = GENERATE) -> tuple[str, str]:
    """The field that is named, and what is said of it."""
    with pytest.raises(InvalidArgument) as caught:
        await parse(data, method)
    return caught.value.field, caught.value.problem


def within(number: int, inner: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(inner)) + inner


async def test_an_unknown_field_is_named_by_path_and_number() -> None:
    field, problem = await refusal(b"\x0a\x01x" + UNKNOWN)
    assert field == "2047"
    assert problem == "is not known to this server: the message has no field 2047"
    assert (await refusal(within(4, UNKNOWN)))[0] == "sampling.2047"
    assert (await refusal(within(1, within(4, UNKNOWN)), ONCE))[0] == "request.sampling.2047"
    message = within(1, chat_pb2.ChatMessage(role="user").SerializeToString())
    second = within(1, within(2, UNKNOWN))
    assert (await refusal(within(3, message + second)))[0] == "chat.messages[1].content[0].2047"
    assert (await refusal(within(13, UNKNOWN)))[0] == "labels[0].2047"
    assert (await refusal(within(5, within(7, UNKNOWN))))[0] == "stopping.time_limit.2047"


@pytest.mark.parametrize(
    ("data", "field", "given"),
    [
        (b"\x08\x01", "text", 0),
        (within(4, b"\x12\x00"), "sampling.temperature", 2),
        (within(4, b"\x1d\x00\x00\x00\x00"), "sampling.top_k", 5),
        (b"\x20\x01", "sampling", 0),
        (b"\x0b\x0c", "text", 3),
    ],
)
async def test_a_known_number_of_another_type_is_told_so(
    data: bytes, field: str, given: int
) -> None:
    named, problem = await refusal(data)
    assert named == field
    assert f"has wire type {given} instead of" in problem


async def test_numbers_of_a_list_may_come_one_by_one_or_packed() -> None:
    one_by_one, packed = within(2, b"\x08\x05\x08\x06"), within(2, within(1, b"\x05\x06"))
    assert await parse(one_by_one) == await parse(packed)


async def test_an_unknown_value_of_an_enum_is_refused() -> None:
    def chosen(value: bytes) -> bytes:
        return within(3, within(4, b"\x08" + value))

    assert await refusal(chosen(b"\x63")) == (
        "chat.tool_choice.mode",
        "is 99, which is no value that this server knows",
    )
    assert "is -1," in (await refusal(chosen(b"\xff" * 9 + b"\x01")))[1]
    assert await parse(chosen(b"\x02"))


async def test_a_oneof_that_is_set_twice_is_refused() -> None:
    text, ids = b"\x0a\x01x", within(2, within(1, b"\x05"))
    assert await refusal(text + ids) == ("prompt", "is set twice: text and token_ids")
    assert await refusal(ids + ids) == ("prompt", "is set twice: token_ids and token_ids")
    constraint = within(12, within(1, b"{}") + within(3, b"x"))
    assert (await refusal(text + constraint))[0] == "constraint.kind"
    # Each message has its own.
    part = within(2, within(1, b"x"))
    assert await parse(within(3, within(1, part + part)))


async def test_the_operator_can_have_all_of_it_ignored() -> None:
    data = b"\x0a\x01x" + UNKNOWN + within(3, within(4, b"\x08\x63"))
    assert await parse(data, strict=False)
    assert ServerSettings().unknown_fields == "refuse"
    assert TABLE.limits()[GENERATE].strict
    assert not TABLE.limits(strict=False)[GENERATE].strict


def test_no_other_protocol_is_strict() -> None:
    strict = {row.service for row in TABLE if row.strict}
    names = ("GenerationService", "EmbeddingService", "AdapterService")
    ours = {f"tokenpod.v1.{name}" for name in names}
    assert strict == {*ours, "tokenpod.admin.v1.AdminService"}


async def test_messages_within_messages_have_an_end() -> None:
    value = struct_pb2.Value(number_value=1)
    for _ in range(DEEPEST // 2):
        value = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[value]))
    data = within(3, within(6, within(1, within(2, value.SerializeToString()))))
    assert await refusal(data) == ("request", f"nests messages more than {DEEPEST} deep")
    deep = b""
    for _ in range(5000):
        deep = within(6, within(1, deep))
    assert "deep" in (await refusal(within(3, within(6, within(1, within(2, deep))))))[1]


PATHS = list(wirefuzz.paths(pb.GenerateOnceRequest.DESCRIPTOR))


@settings(deadline=None, derandomize=True, max_examples=examples(60))
@given(st.lists(st.sampled_from(PATHS), max_size=6), st.data())
async def test_whatever_a_generated_client_writes_is_known(
    paths: list[tuple[object, ...]], data: st.DataObject
) -> None:
    request = pb.GenerateOnceRequest()
    for path in paths:
        values = wirefuzz.extremes(path[-1])
        if path[-1].enum_type is not None:  # type: ignore[attr-defined]
            values = tuple(path[-1].enum_type.values_by_number)  # type: ignore[attr-defined]
        wirefuzz.put(request, path, data.draw(st.sampled_from(values)))  # type: ignore[arg-type]
    sent = request.SerializeToString(deterministic=True)
    parsed: Any = await parse(sent, ONCE)
    # Not compared as messages: a NaN is not itself.
    assert parsed.SerializeToString(deterministic=True) == sent
    with pytest.raises(InvalidArgument, match="2047 is not known"):
        await parse(sent + UNKNOWN, ONCE)


async def test_two_million_unknown_fields_are_not_walked_over() -> None:
    steps = UNKNOWN * 600_000
    assert (await refusal(steps))[0] == "2047"
    known = generation_pb2.GenerateRequest(priority=1).SerializeToString() * 1_000_000
    assert "at most 32768 fields" in (await refusal(known))[1]
