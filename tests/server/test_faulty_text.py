"""Code that raises while it reads one request's text, in a running pod: nobody else notices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from support.clients.public_api import collect, generate, text_request
from support.pods import faulty_pod
from support.pods.harness import SERVING, ServerProcess, serve
from support.texts.hostile import with_template
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as v1
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service

SECONDS = 120.0
INNOCENT = text_request("def f(", stopping={"max_new_tokens": 200, "ignore_eos": True})
#: A chat with a tool, whose answer the parser of calls reads.
READ = v1.GenerateRequest(
    chat={"messages": [{"role": "user", "content": [{"text": "hello"}]}], "tools": [{"name": "f"}]},
    stopping={"max_new_tokens": 50, "ignore_eos": True},
    sampling={"n": 2, "temperature": 1.0},
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = with_template(tmp_path_factory.mktemp("model") / "hostile")
    flags = ["--model-id", str(model), "--tool-parser", "hermes"]
    with serve(*flags, script=faulty_pod.__file__) as running:
        yield running
        assert running.stop() == 0


def error_id(server: ServerProcess, error: grpc.RpcError) -> str:
    """The id that an INTERNAL tells its client, and the log under it; the client no more."""
    assert error.code() is grpc.StatusCode.INTERNAL
    told = re.fullmatch(r"internal error ([0-9a-f]{12}); .*", error.details())
    assert told
    assert faulty_pod.SECRET not in str(error)
    assert server.logged(told[1])
    assert server.logged(faulty_pod.SECRET)
    return told[1]


def test_a_parser_that_raises_ends_its_own_calls(server: ServerProcess) -> None:
    api = server.stub()
    alone = generate(api, INNOCENT).samples[0].text
    neighbour = api.Generate(INNOCENT, timeout=SECONDS)
    events = [next(neighbour) for _ in range(3)]
    ids = set()
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as streamed:
            list(api.Generate(READ, timeout=SECONDS))
        ids.add(error_id(server, streamed.value))
        with pytest.raises(grpc.RpcError) as once:
            api.GenerateOnce(service.GenerateOnceRequest(request=READ), timeout=SECONDS)
        ids.add(error_id(server, once.value))
    assert len(ids) == 6
    events += neighbour
    assert collect(events, 1).samples[0].text == alone
    assert server.health() == SERVING
    # Nothing of them is left in the engine: all of its rows are free.
    load = api.GetLoad(service.GetLoadRequest(), timeout=SECONDS)
    assert (load.running_sequence_count, load.waiting_sequence_count) == (0, 0)


def routed(number: int, *stops: str) -> Any:
    return {
        **{"id": number, "inputs": "def f(", "truncate": 100, "add_special_tokens": True},
        "input_chunks": {"chunks": [{"text": "def f("}]},
        "parameters": {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1},
        "stopping_parameters": {"max_new_tokens": 20, "stop_sequences": stops},
    }


def test_in_a_routers_batch_that_request_alone_ends(server: ServerProcess) -> None:
    stub = server.shard()
    batch = {"id": 1, "requests": [routed(1), routed(2, faulty_pod.RAISES), routed(3)], "size": 3}
    step = stub.Prefill(pb.PrefillRequest(batch=batch), timeout=SECONDS)
    assert [len(g.tokens.ids) for g in step.generations] == [1, 1, 1]
    step = stub.Decode(pb.DecodeRequest(batches=[step.batch]), timeout=SECONDS)
    one, ended, three = sorted(step.generations, key=lambda each: each.request_id)
    assert one.tokens.ids == three.tokens.ids
    assert (ended.tokens.texts, ended.tokens.is_special) == ([""], [True])
    text = ended.generated_text
    assert (text.text, text.generated_tokens) == ("", 2)
    assert text.finish_reason == pb.FINISH_REASON_EOS_TOKEN
    # Routers drop what has ended, and go on with the others to their end.
    kept = pb.FilterBatchRequest(batch_id=1, request_ids=[1, 3])
    left = stub.FilterBatch(kept, timeout=SECONDS).batch
    while left.request_ids:
        step = stub.Decode(pb.DecodeRequest(batches=[left]), timeout=SECONDS)
        assert {g.request_id for g in step.generations} <= {1, 3}
        left = step.batch
    assert {g.generated_text.generated_tokens for g in step.generations} == {20}
