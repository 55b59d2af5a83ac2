"""A model that computes NaN for one token: who hears of it, and who does not."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from support.clients.public_api import generate
from support.pods.harness import ServerProcess, serve
from tokenpod.models import demo
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as public
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

#: Its embedding is NaN.
POISON = 4000
GOOD = [5, 17, 301, 44, 9, 120, 77, 12, 8, 33]
LENGTH = {"max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on the demo model with one bad row, in a head of its own a good one."""
    folder = tmp_path_factory.mktemp("model") / "poisoned"
    shutil.copytree(Path(demo.__file__).parent, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    embedding[POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with serve("--model-id", str(folder)) as running:
        yield running
        assert running.stop() == 0


def ask(ids: list[int], **fields: Any) -> public.GenerateRequest:
    return public.GenerateRequest(
        token_ids=public.TokenIds(ids=ids), **{"stopping": LENGTH, "sampling": {}} | fields
    )


def lost(stub: Any, request: public.GenerateRequest) -> None:
    with pytest.raises(grpc.RpcError) as ended:
        generate(stub, request)
    assert ended.value.code() is grpc.StatusCode.DATA_LOSS
    assert "NaN" in ended.value.details()


def test_the_request_alone_fails_and_its_companions_are_what_they_are_alone(
    poisoned: ServerProcess,
) -> None:
    stub = poisoned.stub()
    requests = [ask([*GOOD[at:], at + 3]) for at in range(4)]
    alone = [generate(stub, request).samples[0].token_ids for request in requests]
    together: dict[int, list[int]] = {}

    def run(at: int) -> None:
        together[at] = generate(stub, requests[at]).samples[0].token_ids

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for at in range(6):
        lost(stub, ask([*GOOD[: at + 1], POISON, 7]))
    for thread in threads:
        thread.join(60)
    assert [together[at] for at in range(4)] == alone


def test_nothing_that_followed_the_bad_token_is_cached(poisoned: ServerProcess) -> None:
    stub = poisoned.stub()
    prefix = [501, 502, 503, 504, 505, 506]
    for _ in range(2):
        lost(stub, ask([*prefix, POISON, 600, 601]))
    once = generate(stub, ask([*prefix, POISON + 1, 600]))
    # The failed prompts left nothing: not even what came before the bad token.
    assert once.started.cached_token_count == 0
    again = generate(stub, ask([*prefix, POISON + 1, 600]))
    assert again.started.cached_token_count == len(prefix) + 1
    assert again.samples[0].token_ids == once.samples[0].token_ids


def test_a_bad_token_that_was_sampled_ends_its_stream_and_leaves_a_sound_prompt(
    poisoned: ServerProcess,
) -> None:
    stub = poisoned.stub()
    forced = {"sampling": {"logit_bias": {POISON: 100.0}}}
    # The token itself was sound; what the model made of it was not. It is sent, but a client that
    # has not read it when the error's trailers come drops it.
    for _ in range(20):
        events: list[Any] = []
        with pytest.raises(grpc.RpcError) as ended:
            events.extend(stub.Generate(ask(GOOD[::-1], **forced), timeout=60))
        assert ended.value.code() is grpc.StatusCode.DATA_LOSS
        if len(events) > 1:
            break
    assert [list(event.tokens.token_ids) for event in events[1:]] == [[POISON]]
    follow_up = generate(stub, ask(GOOD[::-1]))
    assert follow_up.started.cached_token_count == len(GOOD) - 1
    # What was computed of the bad token is not there to be found.
    lost(stub, ask([*GOOD[::-1], POISON, 3]))
    assert len(follow_up.samples[0].token_ids) == LENGTH["max_new_tokens"]


def test_in_the_public_api_the_other_samples_end_first(poisoned: ServerProcess) -> None:
    api = GenerationServiceStub(poisoned.channel())
    # One of two samples, or both or neither of other seeds, draws the bad token.
    sampling = {"n": 2, "temperature": 1.0, "logit_bias": {POISON: 9.0}}
    stopping = {"max_new_tokens": 12, "ignore_eos": True}
    for seed in range(40):
        request = public.GenerateRequest(
            token_ids={"ids": GOOD}, sampling=sampling | {"seed": seed}, stopping=stopping
        )
        events: list[Any] = []
        with contextlib.suppress(grpc.RpcError):
            call = api.Generate(request, timeout=60)
            events.extend(call)
        finished = [e.finished for e in events if e.WhichOneof("event") == "finished"]
        if call.code() is grpc.StatusCode.DATA_LOSS and finished:
            break
    else:
        pytest.fail("no seed had one sample fail and the other not")
    (survivor,) = finished
    runs = [e.tokens for e in events if e.WhichOneof("event") == "tokens"]
    told = [t for run in runs if run.sample_index == survivor.sample_index for t in run.token_ids]
    assert len(told) == survivor.generated_token_count == 12
    assert POISON not in told[:-1]
    assert not [e for e in events if e.WhichOneof("event") == "completed"]
    asked = service.GenerateOnceRequest(request=request)
    with pytest.raises(grpc.RpcError) as ended:
        api.GenerateOnce(asked, timeout=60)
    assert ended.value.code() is grpc.StatusCode.DATA_LOSS


def test_a_routers_request_ends_alone_and_its_batch_goes_on(poisoned: ServerProcess) -> None:
    tokenizer = Tokenizer.from_file(str(Path(demo.__file__).parent / "tokenizer.json"))
    bad = tokenizer.decode([POISON])
    assert POISON in tokenizer.encode(bad).ids
    requests = [pb.Request(id=at, inputs=text) for at, text in enumerate(["import os\n", bad])]
    for each in requests:
        each.stopping_parameters.max_new_tokens = 3
        each.stopping_parameters.ignore_eos_token = True
    with grpc.insecure_channel(f"unix:{poisoned.uds}") as channel:
        stub = rpc.TextGenerationServiceStub(channel)
        answer = stub.Prefill(pb.PrefillRequest(batch=pb.Batch(id=1, requests=requests)))
        ended = {g.request_id: g for g in answer.generations}[1].generated_text
        assert (ended.text, ended.finish_reason) == ("", pb.FINISH_REASON_EOS_TOKEN)
        kept = stub.FilterBatch(pb.FilterBatchRequest(batch_id=1, request_ids=[0])).batch
        for _ in range(2):
            answer = stub.Decode(pb.DecodeRequest(batches=[kept]))
        assert answer.generations[0].generated_text.generated_tokens == 3
