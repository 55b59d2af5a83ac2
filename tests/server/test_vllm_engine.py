"""`vllm.grpc.engine`, by which gateways drive engines, over a real socket."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc
from smg_grpc_proto.generated import common_pb2 as common

from support.clients.public_api import PROMPT, generate, refused, violations
from support.pods.harness import ServerProcess
from support.waiting import wait_for
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer
from tokenpod_client.protos.tokenpod.v1 import generation_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as public
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

CALL = {"timeout": 120}
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
BAD = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def engine(server: ServerProcess) -> Any:
    return rpc.VllmEngineStub(server.channel())


@pytest.fixture(scope="module")
def prompt(server: ServerProcess) -> list[int]:
    """The tokens of PROMPT."""
    api = GenerationServiceStub(server.channel())
    asked = public.TokenizeRequest(text=PROMPT, return_token_ids=True)
    return list(api.Tokenize(asked, **CALL).token_ids)


def ask(ids: list[int], name: str = "", *, stream: bool = True, **params: Any) -> Any:
    return pb.GenerateRequest(
        request_id=name,
        tokenized={"input_ids": ids},
        sampling_params={**GREEDY, **params},
        stream=stream,
    )


def run(engine: Any, request: Any) -> tuple[list[Any], list[Any]]:
    """Chunks, and the completes after them."""
    answers = list(engine.Generate(request, **CALL))
    kinds = [answer.WhichOneof("response") for answer in answers]
    assert set(kinds) <= {"chunk", "complete"}
    chunks = [answer.chunk for answer in answers if answer.WhichOneof("response") == "chunk"]
    return chunks, [answer.complete for answer in answers[len(chunks) :]]


def reference(stub: Any, ids: list[int], **fields: Any) -> Any:
    request = generation_pb2.GenerateRequest(token_ids={"ids": ids}, **fields)
    return generate(stub, request).samples[0]


# -- Generate ----------------------------------------------------------------------------------


def test_token_ids_come_as_they_are_generated(engine: Any, stub: Any, prompt: list[int]) -> None:
    chunks, (complete,) = run(engine, ask(prompt))
    ids = [token for chunk in chunks for token in chunk.token_ids]
    expected = reference(stub, prompt, stopping={"max_new_tokens": 8, "ignore_eos": True})
    assert ids == expected.token_ids
    assert [chunk.completion_tokens for chunk in chunks] == [len(c.token_ids) for c in chunks]
    assert {chunk.prompt_tokens for chunk in chunks} == {len(prompt)}
    assert (complete.finish_reason, complete.completion_tokens) == ("length", 8)
    assert complete.prompt_tokens == len(prompt)
    assert not complete.output_ids, "the chunks had them"
    _, (whole,) = run(engine, ask(prompt, stream=False))
    assert list(whole.output_ids) == ids


def test_a_text_is_tokenised_here(engine: Any, prompt: list[int]) -> None:
    request = ask([], stream=False)
    request.text = PROMPT
    _, (complete,) = run(engine, request)
    assert complete.prompt_tokens == len(prompt)
    assert list(complete.output_ids) == list(
        run(engine, ask(prompt, stream=False))[1][0].output_ids
    )


def test_a_prompt_that_is_known_is_counted_as_cached(engine: Any, prompt: list[int]) -> None:
    longer = prompt * 6
    for _ in range(2):
        chunks, (complete,) = run(engine, ask(longer))
    assert chunks[0].cached_tokens == complete.cached_tokens == len(longer) - 1


def test_samples_of_a_request_end_each_by_itself(engine: Any, prompt: list[int]) -> None:
    params = {"n": 2, "temperature": 1.0, "seed": -5}
    chunks, completes = run(engine, ask(prompt, **params))
    assert sorted(complete.index for complete in completes) == [0, 1]
    streamed = {at: [t for c in chunks if c.index == at for t in c.token_ids] for at in (0, 1)}
    assert streamed[0] != streamed[1]
    _, whole = run(engine, ask(prompt, stream=False, **params))
    assert {complete.index: list(complete.output_ids) for complete in whole} == streamed


def test_log_probabilities_are_told_where_asked_for(
    engine: Any, stub: Any, prompt: list[int]
) -> None:
    chunks, _ = run(engine, ask(prompt, logprobs=2, prompt_logprobs=0))
    more, _ = run(engine, ask(prompt, prompt_logprobs=3))
    first, *others = more[0].input_logprobs.top_logprobs
    assert (len(first.values), len(others)) == (0, len(prompt) - 1)
    assert {len(top.token_ids) for top in others} == {3}
    told = chunks[0].input_logprobs
    assert not told.top_logprobs
    assert told.token_logprobs == more[0].input_logprobs.token_logprobs
    assert list(told.token_ids) == prompt
    assert not told.token_logprobs[0].HasField("value")
    assert all(each.value < 0 for each in told.token_logprobs[1:])
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
    stopping = {"max_new_tokens": 8, "ignore_eos": True}
    output = {"return_logprobs": True, "top_n_tokens": 2}
    expected = reference(stub, prompt, stopping=stopping, output=output)
    logprobs = [x for chunk in chunks for x in chunk.output_logprobs.token_logprobs]
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    tops = [list(t.token_ids) for chunk in chunks for t in chunk.output_logprobs.top_logprobs]
    assert tops == [list(top.token_ids) for top in expected.tops]


def test_a_stop_is_named(engine: Any, server: ServerProcess, prompt: list[int]) -> None:
    _, (plain,) = run(engine, ask(prompt, stream=False, max_tokens=30))
    ids = list(plain.output_ids)
    token = next(each for each in ids[3:] if ids.index(each) >= 3)
    _, (complete,) = run(engine, ask(prompt, stream=False, max_tokens=30, stop_token_ids=[token]))
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", token)
    assert list(complete.output_ids) == ids[: ids.index(token) + 1]
    api = GenerationServiceStub(server.channel())
    text = api.Detokenize(public.DetokenizeRequest(token_ids=ids), **CALL).text
    stop = text[12:16]
    _, (complete,) = run(engine, ask(prompt, max_tokens=30, stop=[stop]))
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)
    assert complete.completion_tokens < 30


def test_what_does_not_fit_is_left_out(engine: Any, prompt: list[int]) -> None:
    room = engine.GetModelInfo(pb.GetModelInfoRequest(), **CALL).max_context_length
    ids = (prompt * room)[: room - 2]
    for fields in ({"max_tokens": 50}, {"max_tokens": None}):
        _, (complete,) = run(engine, ask(ids, stream=False, **fields))
        assert (complete.completion_tokens, complete.finish_reason) == (2, "length")
    _, (cut,) = run(engine, ask(ids * 2, stream=False, truncate_prompt_tokens=-1, max_tokens=5))
    assert (cut.prompt_tokens, cut.completion_tokens) == (room - 1, 1)


REFUSED: dict[str, dict[str, Any]] = {
    "sampling_params.json_schema": {"sampling_params": {"json_schema": "{"}},
    "sampling_params.regex": {"sampling_params": {"regex": "("}},
    "sampling_params.choice.choices": {"sampling_params": {"choice": {}}},
    "sampling_params.logprobs": {"sampling_params": {"logprobs": 21}},
    "sampling_params.prompt_logprobs": {"sampling_params": {"prompt_logprobs": 21}},
    "sampling_params.max_tokens": {"sampling_params": {"max_tokens": 0}},
    "sampling_params.temperature": {"sampling_params": {"temperature": -1.0}},
    "sampling_params.logit_bias[-1]": {"sampling_params": {"logit_bias": {-1: 1.0}}},
    "sampling_params.truncate_prompt_tokens": {"sampling_params": {"truncate_prompt_tokens": 0}},
    "tokenized.input_ids[1]": {"tokenized": {"input_ids": [1, 999_999]}},
    "input": {"request_id": "no prompt"},
    "mm_inputs": {"text": "x", "mm_inputs": {}},
    "media_refs": {"text": "x", "media_refs": {}},
    "kv_transfer_params_json": {"text": "x", "kv_transfer_params_json": "{}"},
    "data_parallel_rank": {"text": "x", "data_parallel_rank": 1},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_done_is_refused_by_name(engine: Any, field: str) -> None:
    fields = REFUSED[field]
    if "sampling_params" in fields:
        fields = {"text": PROMPT} | fields
    error = refused(BAD, run, engine, pb.GenerateRequest(**fields))
    assert [*violations(error)] == [field]


# -- calls and their names ---------------------------------------------------------------------


def test_an_abort_ends_a_call_by_its_name(
    engine: Any, server: ServerProcess, prompt: list[int]
) -> None:
    """The gateway does not cancel a stream whose client has left: it aborts."""
    call = engine.Generate(ask(prompt, "mine", max_tokens=1900), **CALL)
    next(call)
    twin = refused(grpc.StatusCode.ALREADY_EXISTS, run, engine, ask(prompt, "mine"))
    assert "mine" in (twin.details() or "")
    engine.Abort(pb.AbortRequest(request_ids=["not there", "mine"]), **CALL)
    *_, last = call
    assert last.complete.finish_reason == "abort"
    assert 0 < last.complete.completion_tokens < 1900
    load = GenerationServiceStub(server.channel())
    asked = public.GetLoadRequest()
    wait_for(lambda: load.GetLoad(asked, **CALL).running_sequence_count == 0)
    _, (again,) = run(engine, ask(prompt, "mine"))
    assert again.finish_reason == "length", "the name is free"


# -- what a gateway asks -----------------------------------------------------------------------


def test_the_model_and_the_load_are_told(engine: Any) -> None:
    assert engine.HealthCheck(pb.HealthCheckRequest(), **CALL).healthy
    info = engine.GetModelInfo(pb.GetModelInfoRequest(), **CALL)
    assert (info.served_model_name, info.model_type) == ("demo", "llama")
    assert list(info.architectures) == ["LlamaForCausalLM"]
    assert list(info.eos_token_ids) == [1]
    assert info.is_generation
    assert info.max_req_input_len == info.max_context_length - 1
    server = engine.GetServerInfo(pb.GetServerInfoRequest(), **CALL)
    assert (server.server_type, server.data_parallel_size, server.block_size) == (
        "vllm-grpc",
        1,
        16,
    )
    (load,) = engine.GetLoads(pb.GetLoadsRequest(), **CALL).loads
    assert load.max_total_num_tokens > 0
    assert 0 <= load.token_usage <= 1
    assert load.max_running_requests == server.max_num_seqs


def test_the_tokenizer_comes_as_a_zip(engine: Any, tmp_path: Path) -> None:
    chunks = list(engine.GetTokenizer(common.GetTokenizerRequest(), **CALL))
    packed = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(packed).hexdigest()
    zipfile.ZipFile(io.BytesIO(packed)).extractall(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "messages" in config["chat_template"]
    there = Tokenizer.load(tmp_path)
    text = "def fé(n):\n    return '你好 😀'\n"
    demo = Tokenizer.load(Path(__file__).resolve().parents[2] / "models" / "demo")
    assert there.encode(text) == demo.encode(text)
    assert there.eos_token_ids == demo.eos_token_ids


def test_a_model_made_to_generate_names_the_rpc_for_it(engine: Any) -> None:
    request = pb.EmbedRequest(tokenized={"input_ids": [1]})
    code = grpc.StatusCode.FAILED_PRECONDITION
    error = refused(code, lambda each: engine.Embed(each, **CALL), request)
    assert "call tokenpod.v1.GenerationService/Generate" in error.details()


def test_profiles_are_not_served(engine: Any) -> None:
    calls = [
        (engine.StartProfile, common.StartProfileRequest()),
        (engine.StopProfile, common.StopProfileRequest()),
    ]
    for call, request in calls:
        refused(grpc.StatusCode.UNIMPLEMENTED, lambda c, r: c(r, **CALL), call, request)


# -- the prefix cache --------------------------------------------------------------------------


class Listener:
    """A subscription, and what it has told: the tokens of each known block, by its hash."""

    def __init__(self, engine: Any, **fields: Any) -> None:
        self._call = engine.SubscribeKvEvents(common.SubscribeKvEventsRequest(**fields), **CALL)
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}
        self.batches: list[Any] = []

    def hear(self) -> Any:
        batch = next(self._call)
        self.batches.append(batch)
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.blocks.clear()
            elif kind == "removed":
                for each in event.removed.block_hashes:
                    del self.blocks[each]
            else:
                self._store(event.stored)
        return batch

    def until(self, condition: Any) -> None:
        while not condition():
            self.hear()

    def stop(self) -> None:
        self._call.cancel()

    def _store(self, stored: Any) -> None:
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        assert parent is None or parent in self.blocks
        for block in stored.blocks:
            assert block.block_size == len(block.token_ids) == 16
            self.blocks[block.block_hash] = tuple(block.token_ids)
            self.parents[block.block_hash] = parent
            parent = block.block_hash

    def holds(self, ids: list[int]) -> bool:
        """Whether all whole blocks of a prompt are known, each below the one before it."""
        parent: int | None = None
        for at in range(0, len(ids) - len(ids) % 16, 16):
            found = [
                each
                for each, tokens in self.blocks.items()
                if tokens == tuple(ids[at : at + 16]) and self.parents[each] == parent
            ]
            if not found:
                return False
            (parent,) = found
        return True


def test_a_gateway_hears_what_the_cache_holds(engine: Any) -> None:
    first, second = list(range(100, 150)), [*range(100, 120), *range(500, 530)]
    run(engine, ask(first))
    listener = Listener(engine)
    listener.until(lambda: listener.holds(first))
    run(engine, ask(second))
    listener.until(lambda: listener.holds(second))
    assert listener.holds(first)
    numbers = [batch.sequence_number for batch in listener.batches if not batch.load.load_only]
    assert numbers == list(range(1, len(numbers) + 1))
    samples = [batch.load.sample for batch in listener.batches]
    assert samples == list(range(1, len(samples) + 1))
    late = Listener(engine, start_sequence_number=7)
    late.until(lambda: late.holds(first) and late.holds(second))
    assert late.batches[0].sequence_number == 8
    late.stop()
    engine.FlushCache(common.FlushCacheRequest(timeout_s=60), **CALL)
    listener.until(lambda: not listener.blocks)
    chunks, _ = run(engine, ask(first))
    assert chunks[0].cached_tokens == 0
    listener.stop()


def test_the_load_is_told_while_nothing_changes(engine: Any) -> None:
    listener = Listener(engine, load_records_before_first_batch=True)
    listener.until(lambda: listener.batches and listener.batches[-1].load.load_only)
    last = listener.batches[-1]
    assert not last.events
    assert last.sequence_number == max(batch.sequence_number for batch in listener.batches)
    assert last.load.max_running_requests > 0
    assert last.load.max_total_num_tokens > 0
    listener.stop()


def test_the_cache_is_not_emptied_under_a_call(engine: Any, prompt: list[int]) -> None:
    call = engine.Generate(ask(prompt, max_tokens=1900), **CALL)
    next(call)
    answer = engine.FlushCache(common.FlushCacheRequest(), **CALL)
    assert (answer.success, answer.message) == (False, "requests under way: 1")
    call.cancel()
    assert engine.FlushCache(common.FlushCacheRequest(timeout_s=60), **CALL).success
    error = refused(BAD, engine.FlushCache, common.FlushCacheRequest(timeout_s=-1))
    assert [*violations(error)] == ["timeout_s"]
    far = common.SubscribeKvEventsRequest(start_sequence_number=2**64 - 1)
    error = refused(BAD, lambda: list(engine.SubscribeKvEvents(far, **CALL)))
    assert [*violations(error)] == ["start_sequence_number"]
