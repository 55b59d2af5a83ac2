"""Bad input, field by field: a clear refusal that names the field, and the server goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from harness import ServerProcess, generate, text_request, violations

from tokenpod.protos.generate.v1 import generate_pb2 as v1
from tokenpod.protos.generate.v2 import generate_pb2 as v2
from tokenpod.protos.generate.v3 import generate_pb2 as v3

PROMPT = "def f(x):\n"
#: What a refusal may be. NOT_FOUND: a batch id; RESOURCE_EXHAUSTED: a message over the size limit.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


def base_generate() -> Any:
    return text_request(PROMPT, stopping={"max_new_tokens": 2})


def base_batch(pb: Any) -> Any:
    request = pb.Request(
        id=1,
        inputs=PROMPT,
        truncate=20,
        parameters={"temperature": 1, "top_p": 1, "typical_p": 1, "repetition_penalty": 1},
        stopping_parameters={"max_new_tokens": 2},
    )
    return pb.Batch(id=9, requests=[request], size=1, max_tokens=22)


def bases(pb: Any) -> dict[str, Any]:
    """A valid request of every rpc of one wire generation."""
    found = {
        "Info": pb.InfoRequest(),
        "ServiceDiscovery": pb.ServiceDiscoveryRequest(),
        "ClearCache": pb.ClearCacheRequest(id=12345),
        "FilterBatch": pb.FilterBatchRequest(batch_id=1, request_ids=[1]),
        "Warmup": pb.WarmupRequest(batch=base_batch(pb)),
        "Prefill": pb.PrefillRequest(batch=base_batch(pb)),
        "Decode": pb.DecodeRequest(batches=[pb.CachedBatch(id=77, request_ids=[1], size=1)]),
        "Health": pb.HealthRequest(),
    }
    if pb is not v2:
        found["Tokens"] = pb.TokensRequest(text=PROMPT)
    if pb is v3:
        found["Generate"] = base_generate()
    return found


def extremes(field: Any) -> list[Any]:
    """Values at the ends of a scalar field's type."""
    match field.cpp_type:
        case Field.CPPTYPE_FLOAT | Field.CPPTYPE_DOUBLE:
            return [0.0, -1.0, 3.4e38, -3.4e38, 1e-38, math.nan, math.inf, -math.inf]
        case Field.CPPTYPE_UINT32:
            return [0, 1, 2**31, 2**32 - 1]
        case Field.CPPTYPE_UINT64:
            return [0, 2**63, 2**64 - 1]
        case Field.CPPTYPE_INT32:
            return [0, -(2**31), 2**31 - 1]
        case Field.CPPTYPE_ENUM:
            return [0, 1, 99, -1, 2**31 - 1]
        case Field.CPPTYPE_BOOL:
            return [False, True]
        case _:
            text = ["", "x", "\0", "\U0001f600" * 50, "a" * 100_000]
            return [t.encode() for t in text] if field.type == Field.TYPE_BYTES else text


def mutations(message: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Copies of `message`, each with one field at an extreme, with the field's path."""
    for field in message.DESCRIPTOR.fields:
        name = f"{path}{field.name}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for keys in (1, 2000):
                copy = type(message)()
                copy.CopyFrom(message)
                getattr(copy, field.name).update({2**32 - 1 - i: math.nan for i in range(keys)})
                yield name, copy
        elif field.message_type is not None:
            yield from _nested(message, field, name)
        elif field.is_repeated:
            for value in extremes(field):
                for count in (1, 10_000):
                    if isinstance(value, str) and len(value) * count > 1_000_000:
                        continue
                    copy = type(message)()
                    copy.CopyFrom(message)
                    getattr(copy, field.name).extend([value] * count)
                    yield name, copy
        else:
            for value in extremes(field):
                copy = type(message)()
                copy.CopyFrom(message)
                setattr(copy, field.name, value)
                yield name, copy


def _nested(message: Any, field: Any, name: str) -> Iterator[tuple[str, Any]]:
    repeated = field.is_repeated
    inner = getattr(message, field.name)
    part = (inner[0] if len(inner) else None) if repeated else inner
    if part is None:
        return
    for path, changed in mutations(part, f"{name}."):
        copy = type(message)()
        copy.CopyFrom(message)
        target = getattr(copy, field.name)
        (target[0] if repeated else target).CopyFrom(changed)
        yield path, copy
    cleared = type(message)()
    cleared.CopyFrom(message)
    cleared.ClearField(field.name)
    yield name, cleared


def call(server: ServerProcess, pb: Any, method: str, payload: bytes) -> grpc.RpcError | None:
    """Send raw bytes; the error, if that is the answer."""
    path = f"/{pb.DESCRIPTOR.package}.TextGenerationService/{method}"
    channel = server.channel()
    try:
        if method == "Generate":
            for _ in channel.unary_stream(path)(payload, timeout=60):
                pass
        else:
            channel.unary_unary(path)(payload, timeout=60)
    except grpc.RpcError as error:
        return error
    finally:
        channel.close()
        server.channels.remove(channel)
    return None


def still_fine(stub: Any) -> None:
    assert len(generate(stub, base_generate()).samples[0].token_ids) == 2


CASES = [
    pytest.param(pb, method, id=f"{pb.DESCRIPTOR.package}-{method}")
    for pb in (v1, v2, v3)
    for method in bases(pb)
]


@pytest.mark.parametrize(("pb", "method"), CASES)
def test_every_field_at_its_extremes_is_served_or_refused_by_name(
    server: ServerProcess, stub: Any, pb: Any, method: str
) -> None:
    for path, message in mutations(bases(pb)[method]):
        error = call(server, pb, method, message.SerializeToString())
        if error is None:
            continue
        about = f"{path}: {error.code()}: {error.details()}"
        assert error.code() in REFUSALS, about
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            assert violations(error), about
            assert len(error.details() or "") < 1000, about
    call(server, pb, "ClearCache", b"")
    still_fine(stub)


@pytest.mark.parametrize(("pb", "method"), CASES)
def test_bytes_that_are_no_message_are_an_invalid_argument(
    server: ServerProcess, stub: Any, pb: Any, method: str
) -> None:
    # Field 1 with a length that runs past the end; a lone continuation byte.
    for garbage in (b"\x0a\xff\xff\xff\x7f", b"\xff"):
        error = call(server, pb, method, garbage)
        assert error is not None
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
    still_fine(stub)


def test_invalid_utf8_is_an_invalid_argument(server: ServerProcess) -> None:
    request = base_generate().SerializeToString()
    broken = request.replace(PROMPT.encode(), b"\xff" * len(PROMPT))
    error = call(server, v3, "Generate", broken)
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text": ""}, "text"),
        ({"token_ids": {"ids": []}}, "token_ids.ids"),
        ({"token_ids": {"ids": [1, 4096]}}, "token_ids.ids[1]"),
        ({"chat": {"messages": []}}, "chat.messages"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
        ({"sampling": {"temperature": 0.0, "do_sample": True}}, "sampling.temperature"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
        ({"sampling": {"min_p": -0.1}}, "sampling.min_p"),
        ({"sampling": {"typical_p": math.inf}}, "sampling.typical_p"),
        ({"sampling": {"repetition_penalty": -1.0}}, "sampling.repetition_penalty"),
        ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": -2.5}}, "sampling.frequency_penalty"),
        ({"sampling": {"logit_bias": {5: math.nan}}}, "sampling.logit_bias[5]"),
        ({"sampling": {"logit_bias": {4096: 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"n": 2**31}}, "sampling.n"),
        ({"sampling": {"n": 2, "best_of": 1}}, "sampling.best_of"),
        ({"sampling": {"best_of": 2}}, "sampling.best_of"),
        ({"stopping": {"max_new_tokens": 0}}, "stopping.max_new_tokens"),
        ({"stopping": {"max_new_tokens": 2**32 - 1}}, "stopping.max_new_tokens"),
        ({"stopping": {"max_new_tokens": 2, "min_new_tokens": 3}}, "stopping.min_new_tokens"),
        ({"stopping": {"stop_sequences": ["x"] * 10_000}}, "stopping.stop_sequences"),
        ({"stopping": {"stop_sequences": [""]}}, "stopping.stop_sequences[0]"),
        ({"stopping": {"stop_sequences": ["é" * 121]}}, "stopping.stop_sequences[0]"),
        ({"stopping": {"stop_token_ids": [4096]}}, "stopping.stop_token_ids[0]"),
        ({"output": {"top_n_tokens": 6}}, "output.top_n_tokens"),
        ({"request_id": "é"}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"priority": 101}, "priority"),
    ],
)
def test_a_refusal_names_the_field_its_value_and_the_limit(
    stub: Any, change: dict[str, Any], field: str
) -> None:
    fields = change if {"text", "token_ids", "chat"} & set(change) else {"text": PROMPT} | change
    with pytest.raises(grpc.RpcError) as refused:
        generate(stub, v3.GenerateRequest(**fields))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert list(violations(refused.value)) == [field]
    assert (refused.value.details() or "").startswith(field)


def test_a_message_over_the_limit_is_refused(server: ServerProcess, stub: Any) -> None:
    error = call(server, v3, "Generate", text_request("x" * 5_000_000).SerializeToString())
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    still_fine(stub)


def test_an_unknown_rpc_is_unimplemented(server: ServerProcess) -> None:
    error = call(server, v3, "NoSuchThing", b"")
    assert error is not None
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_details_travel_as_google_rpc_status(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        generate(stub, text_request(""))
    status = rpc_status.from_call(refused.value)
    kinds = [detail.TypeName() for detail in status.details]
    bad = error_details_pb2.BadRequest.DESCRIPTOR.full_name
    info = error_details_pb2.ErrorInfo.DESCRIPTOR.full_name
    assert kinds == [bad, info]
