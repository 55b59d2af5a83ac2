"""How large requests may be: legal ones of every method fit, and each method has a limit."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import Descriptor

from support.clients import wirefuzz
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.methods import SMALL
from tokenpod.service.rpc.wire import count, fields_of
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

PREFILL = "/generate.v3.TextGenerationService/Prefill"


def fits(path: str, kind: Descriptor, data: bytes, *, trusted: bool = False) -> bool:
    size = TABLE.limits(max_logit_bias=1024, trusted=trusted)[path].size_for(len(data))
    try:
        for _ in count(fields_of(kind), data, size):
            pass
    except InvalidArgument:
        return False
    return True


def prefill(requests: int) -> bytes:
    """A router's batch, with every field that routers set."""
    stopping = pb.StoppingCriteriaParameters(max_new_tokens=20, stop_sequences=["a"])
    parameters = pb.NextTokenChooserParameters(
        temperature=1, top_k=3, top_p=0.5, typical_p=0.9, do_sample=True, seed=1
    )
    chunks = pb.Input(chunks=[pb.InputChunk(text="x")])
    request = pb.Request(
        id=1, inputs="x", input_chunks=chunks, truncate=10, add_special_tokens=True,
        parameters=parameters, stopping_parameters=stopping, blocks=[1], slots=[1], chunk_len=1,
    )  # fmt: skip
    return bytes(pb.PrefillRequest(batch={"requests": [request] * requests}).SerializeToString())


@pytest.mark.parametrize("rpc", wirefuzz.rpcs() + wirefuzz.embedding_rpcs(), ids=str)
def test_every_rpc_has_a_limit_and_its_plain_request_fits(rpc: wirefuzz.Rpc) -> None:
    path = f"/{rpc.method.containing_service.full_name}/{rpc.method.name}"
    assert fits(path, rpc.method.input_type, rpc.plain().SerializeToString())


def test_a_batch_of_thousands_fits_the_routers_socket() -> None:
    kind = pb.PrefillRequest.DESCRIPTOR
    assert fits(PREFILL, kind, prefill(2000))
    assert fits(PREFILL, kind, prefill(8000), trusted=True)
    assert not fits(PREFILL, kind, prefill(8000))


def test_larger_messages_may_hold_more_in_proportion() -> None:
    limits = TABLE.limits()[PREFILL]
    plain, larger = limits.size_for(4 * 1024 * 1024), limits.size_for(16 * 1024 * 1024)
    assert (larger.fields, larger.elements) == (4 * plain.fields, 4 * plain.elements)


def test_what_the_operator_allows_fits() -> None:
    request = pb.GenerateRequest(
        text="x", sampling={"logit_bias": dict.fromkeys(range(50_000), 1.0)}
    )
    path = "/generate.v3.TextGenerationService/Generate"
    limits = TABLE.limits(max_logit_bias=50_000)[path].size
    kind = pb.GenerateRequest.DESCRIPTOR
    for _ in count(fields_of(kind), request.SerializeToString(), limits):
        pass
    assert not fits(path, kind, request.SerializeToString())


def test_a_message_beyond_its_methods_bytes_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidArgument, match="has 5000 bytes; this method takes at most 4096"):
        SMALL.size_for(5000)
