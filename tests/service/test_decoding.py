"""What cannot be decoded, and which field is to blame."""

from __future__ import annotations

import pytest

from tokenpod.protos.generate.v3 import generate_pb2 as pb
from tokenpod.service.decoding import WHOLE, decoded, tolerant
from tokenpod.service.errors import InvalidArgument

BAD = b"ab\xff"


def _spoiled(request: pb.GenerateRequest) -> bytes:
    """`request` with every "bad" in its texts turned into three bytes that are not UTF-8."""
    return request.SerializeToString().replace(b"bad", BAD)


def _blamed(data: bytes) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        decoded(tolerant(pb.GenerateRequest.FromString)(data))
    return caught.value


def test_a_good_message_passes() -> None:
    request = pb.GenerateRequest(text="Größe", sampling={"logit_bias": {1: 2.0}, "top_p": 0.5})
    assert decoded(tolerant(pb.GenerateRequest.FromString)(request.SerializeToString())) == request


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
    error = _blamed(_spoiled(request_))
    assert error.field == field
    assert error.problem == "is not valid UTF-8: invalid start byte at byte 2"


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05ab", b"\xff" * 20, b"\x0b", b"\x0f"])
def test_bytes_that_are_no_message_are_blamed_on_the_whole(data: bytes) -> None:
    assert _blamed(data).field == WHOLE


def test_a_broken_message_inside_is_named() -> None:
    assert _blamed(b"\x22\x01\xff").field == "sampling"
