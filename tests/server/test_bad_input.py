"""Every field of every rpc at its extremes: refused by name or served, and nothing breaks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grpc
import pytest

from support.clients import wirefuzz
from support.clients.public_api import generate, violations
from support.clients.wirefuzz import GARBAGE, F, Rpc
from support.examples import ALL as EVERY
from support.pods.harness import ServerProcess
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service

ALL = wirefuzz.rpcs()
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
CODES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    #: Decode and FilterBatch of a batch that is not there.
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    #: What this server does not do: fields of tokenpod.v1 and fmaas, rpcs of vllm.grpc.engine.
    grpc.StatusCode.UNIMPLEMENTED,
    #: What its flags do not switch on: rpcs of adapters.
    grpc.StatusCode.FAILED_PRECONDITION,
}
#: Fields that may be as large as their type allows: ids, hints of routers that the server does
#: without, bounds that mean "all" where they exceed what there is.
LEGAL_MAXIMA = {
    *("id", "seed", "truncate", "top_k", "time_limit_ms", "chunk_len", "cache_len"),
    *("size", "max_tokens", "max_blocks", "current_tokens", "blocks", "slots", "request_ids"),
    *("truncate_input_tokens", "time_limit_millis", "max_tokens"),
}


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    """The next plain request works, whatever the tests here have sent."""
    channel = server.channel()
    yield channel
    wirefuzz.clear(channel)
    request = Rpc(wirefuzz.TOKENPOD, _method("Generate")).plain()
    assert len(generate(server.stub(), request).samples[0].token_ids) == 2
    log = server.log.read_text()
    assert "internal error" not in log
    assert "Traceback" not in log


def _method(name: str) -> Any:
    return service.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name[name]


def _refusal(channel: grpc.Channel, rpc: Rpc, data: bytes) -> grpc.RpcError | None:
    try:
        rpc.send(channel, data)
    except grpc.RpcError as error:
        return error
    return None


def _names(field: str) -> str:
    return re.sub(r"\[\d+\]", "", field)


def _must_be_refused(case: wirefuzz.Case) -> bool:
    """A value that no request for text may have. In a Prefill such a request ends alone."""
    if case.rpc.method.name not in ("Generate", "GenerateStream"):
        return False
    value, name = case.value, case.field.name
    if case.field.is_repeated and name != "stop_sequences":
        value = value[0] if isinstance(value, list) and len(value) == 1 else None
    if case.field.type == F.TYPE_FLOAT:
        if not math.isfinite(value):
            return True
        return abs(value) > 1e30
    if case.field.type in (F.TYPE_UINT32, F.TYPE_UINT64, F.TYPE_INT32):
        return value in (wirefuzz.U32, -(2**31)) and name not in LEGAL_MAXIMA
    return isinstance(value, list) and len(value) == 10_000


def _ended_alone(answers: list[Any]) -> bool:
    """Whether the one request of a router's batch got a token that says nothing, and no more."""
    (answer,) = answers
    if not hasattr(answer, "generations") or len(answer.generations) != 1 or answer.batch.size:
        return False
    text = answer.generations[0].generated_text
    return (text.text, text.generated_tokens) == ("", 1)


@pytest.mark.parametrize("rpc", ALL, ids=str)
def test_each_field_at_its_extremes(channel: grpc.Channel, rpc: Rpc) -> None:
    # Every sixth extreme of a field, other ones from rpc to rpc, or all.
    step = 1 if EVERY else 6
    for case in islice(wirefuzz.cases(rpc), ALL.index(rpc) % step, None, step):
        answers: list[Any] = []
        error = None
        try:
            answers = rpc.send(channel, case.data)
        except grpc.RpcError as failure:
            error = failure
        if error is None:
            assert not _must_be_refused(case) or _ended_alone(answers), f"{case} was served"
        else:
            assert error.code() in CODES, f"{case}: {error}"
        if error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            ((name, problem),) = violations(error).items()
            field, too_long = _names(name), "this method takes at most" in problem
            related = field.startswith(case.path) or case.path.startswith(field)
            known = field.rpartition(".")[0] and case.path.startswith(field.rpartition(".")[0])
            fine = related or known or too_long or field in ("prompt", "input")
            assert fine, f"{case} was blamed on {field}"
        if rpc.method.name == "Prefill":
            wirefuzz.clear(channel)


@pytest.mark.parametrize("rpc", ALL, ids=str)
def test_text_that_is_not_utf8_is_refused_by_its_field(channel: grpc.Channel, rpc: Rpc) -> None:
    for path in wirefuzz.string_fields(rpc.method.input_type):
        error = _refusal(channel, rpc, wirefuzz.raw(path, b"ok \xff\xfe"))
        name = ".".join(field.name for field in path)
        assert error is not None, name
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {error}"
        ((field, problem),) = violations(error).items()
        assert _names(field) == name
        assert "is not valid UTF-8" in problem
        assert "byte 3" in problem


@pytest.mark.parametrize("rpc", ALL, ids=str)
def test_garbage_is_refused_as_no_message(channel: grpc.Channel, rpc: Rpc) -> None:
    for kind, data in GARBAGE.items():
        error = _refusal(channel, rpc, data)
        assert error is not None, kind
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{kind}: {error}"
        assert len(violations(error)) == 1, f"{kind}: {error}"


@pytest.mark.parametrize("rpc", ALL, ids=str)
def test_unknown_fields_and_other_rpcs_messages_do_no_harm(channel: grpc.Channel, rpc: Rpc) -> None:
    # Each message goes to an eighth of the rpcs, or to all.
    for other in ALL if EVERY else ALL[ALL.index(rpc) % 8 :: 8]:
        data = other.plain().SerializeToString() + b"\xf8\x7f\x01" + rpc.short
        error = _refusal(channel, rpc, data)
        assert error is None or error.code() in CODES, f"{other} as {rpc}: {error}"
    wirefuzz.clear(channel)


def _invalid(stub: Any, request: Any, **call: Any) -> dict[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=30, **call))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return violations(caught.value)


HUGE = {
    "stopping.stop_sequences": {"stopping": {"stop_sequences": ["\n"] * 10_000}},
    "stopping.stop_token_ids": {"stopping": {"stop_token_ids": [1] * 10_000}},
    "sampling.logit_bias": {"sampling": {"logit_bias": dict.fromkeys(range(100000), 1.0)}},
    "sampling.n": {"sampling": {"n": 2**31}},
    "request_id": {"request_id": "x" * 100_000},
}


@pytest.mark.parametrize("field", HUGE)
def test_a_huge_value_is_refused_by_name_and_limit(stub: Any, field: str) -> None:
    ((name, problem),) = _invalid(stub, pb.GenerateRequest(text="x", **HUGE[field])).items()
    assert name == field
    assert re.search(r"\d+", problem)
    assert len(problem) < 200, "a refusal does not repeat what it refuses"


def test_a_message_under_the_limit_is_read_and_one_over_it_is_not(stub: Any) -> None:
    regex = "x" * (MAX_MESSAGE_BYTES - 128)
    request = pb.GenerateRequest(text="x", constraint={"regex": regex})
    assert "--max-constraint-bytes" in _invalid(stub, request)["constraint.regex"]
    request.constraint.regex += "x" * 256
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=30))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_bad_request_id_in_the_metadata_is_refused(stub: Any) -> None:
    metadata = (("x-request-id", "x" * 300),)
    assert "metadata x-request-id" in _invalid(
        stub, pb.GenerateRequest(text="x"), metadata=metadata
    )


def test_a_deadline_in_sixty_years_is_none(stub: Any) -> None:
    request = pb.GenerateRequest(text="x", stopping={"max_new_tokens": 2})
    assert (
        generate(stub, request, timeout=2e9).samples[0].finished.finish_reason
        == pb.FINISH_REASON_LENGTH
    )


@pytest.mark.parametrize("value", [1e-45, 1e-30, 1e-6])
@pytest.mark.parametrize("cut", [{}, {"top_p": 1e-45}, {"top_k": 2**32 - 1}, {"typical_p": 1e-45}])
def test_tiny_divisors_of_logits_are_no_division_by_zero(
    stub: Any, value: float, cut: dict[str, Any]
) -> None:
    for name in ("temperature", "repetition_penalty"):
        sampling = {name: value, "do_sample": True, "seed": 1, **cut}
        request = pb.GenerateRequest(text="x", sampling=sampling, stopping={"max_new_tokens": 3})
        assert generate(stub, request).samples[0].token_ids
