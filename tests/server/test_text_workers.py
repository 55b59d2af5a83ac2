"""Tokenising and rendering: bounded in time and memory, and over when their caller is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.clients import shard_generate
from support.clients.public_api import generate, text_request, violations
from support.pods.costs import cpu_seconds
from support.pods.harness import SERVING, ServerProcess, serve
from support.texts.hostile import with_template, with_token, with_tokenizer
from support.waiting import wait_for
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import chat_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as v1
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

SECONDS = 60.0
#: The text of a token of the model's, which a test makes it draw.
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
CALL_ID, END_ID = 2, 1
DEFAULTS = {"do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 1.0, "max_length": 9}
SHORT = {"max_new_tokens": 2, "ignore_eos": True}
#: A rendering that would take hours.
ENDLESS = "loop"


def chat(content: str) -> Any:
    return chat_pb2.Chat(messages=[{"role": "user", "content": [{"text": content}]}])


def tokens(content: str) -> Any:
    return service.TokenizeRequest(chat=chat(content))


def routed(*inputs: str) -> Any:
    """A router's batch of requests with these inputs."""
    requests = [
        pb.Request(
            id=at,
            inputs=text,
            truncate=100,
            parameters=pb.NextTokenChooserParameters(temperature=1.0, repetition_penalty=1.0),
            stopping_parameters=pb.StoppingCriteriaParameters(
                max_new_tokens=9, ignore_eos_token=True
            ),
        )
        for at, text in enumerate(inputs)
    ]
    return pb.Batch(id=1, requests=requests, size=len(requests), max_tokens=1000)


def cpu_ticks(pid: int) -> int:
    """CPU time that a process has had; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0
    return int(fields[11]) + int(fields[12])


def busy(server: ServerProcess) -> list[int]:
    """Process ids of the text workers that have something to do."""
    before = {pid: cpu_ticks(pid) for pid in server.text_worker_pids()}
    time.sleep(0.3)
    return [pid for pid, ticks in before.items() if cpu_ticks(pid) > ticks]


def at_rest(server: ServerProcess) -> bool:
    """Whether every worker is there and none has anything to do."""
    return len(server.text_worker_pids()) == 2 and not busy(server)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A pod whose chat template does what a message says."""
    model = with_template(tmp_path_factory.mktemp("model") / "hostile")
    assert with_token(model, CALL) == CALL_ID
    (model / "generation_config.json").write_text(json.dumps(DEFAULTS | {"eos_token_id": 1}))
    limits = ["--text-timeout", "3", "--text-memory-bytes", str(128 * 2**20)]
    limits += ["--max-concurrent-requests", "2", "--max-front-end-bytes", "1200000"]
    limits += ["--max-message-bytes", str(2**20)]
    # What a worker has loaded, and so what it may use, is that of its command line.
    with serve("--model-id", str(model), *limits, own_imports=True) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[Any]:
    """The next good chat is served, whatever a test here has sent."""
    stub = server.stub()
    yield stub
    wait_for(lambda: at_rest(server))
    assert stub.Tokenize(tokens("hello there"), timeout=SECONDS).token_count > 1
    assert server.health() == SERVING


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        (ENDLESS, "--text-timeout"),
        ("double", "--text-memory-bytes"),
        pytest.param("lipsum", "--text-", marks=pytest.mark.slow),  # one of both
        ("constant", "--text-memory-bytes"),
    ],
)
def test_a_template_that_takes_too_much_is_refused_with_the_limit(
    stub: Any, content: str, limit: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.Tokenize(tokens(content), timeout=SECONDS)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert limit in violations(refused.value)["chat"]


def test_a_rendering_ends_with_its_callers_deadline(server: ServerProcess, stub: Any) -> None:
    workers = set(server.text_worker_pids())
    with pytest.raises(grpc.RpcError) as over:
        stub.Tokenize(tokens(ENDLESS), timeout=1)
    assert over.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: len(workers - set(server.text_worker_pids())) == 1)


def test_a_rendering_ends_when_its_caller_leaves(server: ServerProcess, stub: Any) -> None:
    workers = set(server.text_worker_pids())
    stream = stub.Generate(v1.GenerateRequest(chat=chat(ENDLESS)), timeout=SECONDS)
    wait_for(lambda: bool(busy(server)))
    stream.cancel()
    wait_for(lambda: len(workers - set(server.text_worker_pids())) == 1)


def test_a_call_that_has_lost_two_workers_is_refused_and_they_are_replaced(
    server: ServerProcess, stub: Any
) -> None:
    both = {*server.text_worker_pids()}
    future = stub.Tokenize.future(tokens(ENDLESS), timeout=SECONDS)
    wait_for(lambda: bool(busy(server)))
    (first,) = both.intersection(busy(server))
    os.kill(first, signal.SIGKILL)
    (second,) = both - {first}
    wait_for(lambda: second in busy(server))
    os.kill(second, signal.SIGKILL)
    assert future.code() is grpc.StatusCode.UNAVAILABLE
    assert "grpc-retry-pushback-ms" in dict(future.trailing_metadata())


def test_short_texts_do_not_wait_for_busy_workers(server: ServerProcess, stub: Any) -> None:
    endless = stub.Tokenize.future(tokens(ENDLESS), timeout=SECONDS)
    wait_for(lambda: bool(busy(server)))
    assert len(generate(stub, text_request("import os\n", stopping=SHORT)).samples) == 1
    assert not endless.done()
    endless.cancel()


def test_tokens_takes_a_place_as_every_call_does(server: ServerProcess, stub: Any) -> None:
    endless = [stub.Tokenize.future(tokens(ENDLESS), timeout=SECONDS) for _ in range(2)]
    wait_for(lambda: len(busy(server)) == 2)
    with pytest.raises(grpc.RpcError) as refused:
        stub.Tokenize(service.TokenizeRequest(text="short"), timeout=SECONDS)
    for call in endless:
        call.cancel()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-concurrent-requests" in refused.value.details()
    assert "grpc-retry-pushback-ms" in dict(refused.value.trailing_metadata())


def test_calls_that_hold_too_much_memory_together_are_refused(
    server: ServerProcess, stub: Any
) -> None:
    first = stub.Tokenize.future(tokens(ENDLESS + " " + "x" * 200_000), timeout=SECONDS)
    wait_for(lambda: bool(busy(server)))
    with pytest.raises(grpc.RpcError) as refused:
        stub.Tokenize(service.TokenizeRequest(text="x" * 500_000), timeout=SECONDS)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-front-end-bytes" in refused.value.details()
    assert "grpc-retry-pushback-ms" in dict(refused.value.trailing_metadata())
    first.cancel()
    wait_for(lambda: at_rest(server))
    assert (
        stub.Tokenize(service.TokenizeRequest(text="x" * 500_000), timeout=SECONDS).token_count > 1
    )


def test_a_chat_of_too_many_messages_is_refused_by_their_number(stub: Any) -> None:
    many = chat_pb2.Chat(messages=[chat_pb2.ChatMessage()] * 4_100)
    with pytest.raises(grpc.RpcError) as refused:
        stub.Tokenize(service.TokenizeRequest(chat=many), timeout=SECONDS)
    assert "4100" in violations(refused.value)["chat.messages"]


def test_long_texts_have_the_tokens_that_short_ones_have(stub: Any) -> None:
    word = "word " * 100
    alone = stub.Tokenize(
        service.TokenizeRequest(text=word, return_token_ids=True), timeout=SECONDS
    ).token_ids
    many = stub.Tokenize(
        service.TokenizeRequest(text=word * 50, return_token_ids=True), timeout=SECONDS
    )
    assert many.token_count == len(many.token_ids)
    assert many.token_ids[: len(alone) - 1] == alone[:-1]


def test_a_prompt_too_long_is_refused_with_its_length(stub: Any) -> None:
    text = text_request("word " * 20_000, stopping=SHORT)
    with pytest.raises(grpc.RpcError) as refused:
        generate(stub, text)
    assert "has 40001 tokens" in violations(refused.value)["prompt"]
    text.truncate = 5
    assert generate(stub, text).started.prompt_token_count == 5


def test_workers_load_neither_torch_nor_grpc(server: ServerProcess) -> None:
    for pid in server.text_worker_pids():
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in loaded
        assert "cygrpc" not in loaded
        assert "tokenizers" in loaded


# -- the end of a pod ----------------------------------------------------------------------------


@pytest.fixture
def unlimited(tmp_path: Path) -> list[str]:
    """Flags of a pod whose renderings only a caller ends."""
    model = with_template(tmp_path / "hostile")
    return ["--model-id", str(model), "--text-timeout", "3600"]


@pytest.mark.slow
def test_an_abandoned_rendering_does_not_keep_a_pod_from_stopping(unlimited: list[str]) -> None:
    with serve(*unlimited) as server:
        workers = server.text_worker_pids()
        with pytest.raises(grpc.RpcError):
            server.stub().Tokenize(tokens(ENDLESS), timeout=0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_rendering_that_outlasts_the_drain_is_refused_and_ended(unlimited: list[str]) -> None:
    with serve(*unlimited, "--graceful-termination-timeout", "0.5") as server:
        workers = server.text_worker_pids()
        endless = server.stub().Tokenize.future(tokens(ENDLESS), timeout=SECONDS)
        wait_for(lambda: bool(busy(server)))
        server.process.send_signal(signal.SIGTERM)
        assert endless.code() is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(20) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_workers_and_engine_do_not_outlive_a_killed_front_end(unlimited: list[str]) -> None:
    with serve(*unlimited) as server:
        children = server.children()
        threading.Thread(
            target=lambda: server.stub().Tokenize.future(tokens(ENDLESS)).exception(), daemon=True
        ).start()
        wait_for(lambda: bool(busy(server)))
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not any(cpu_ticks(pid) for pid in children))


# -- chats of tokenpod.v1 ------------------------------------------------------------------------


def asked(content: str, **more: Any) -> v1.GenerateRequest:
    said = [{"role": "user", "content": [{"text": content}]}]
    return v1.GenerateRequest(chat={"messages": said, **more}, stopping=SHORT)


SCHEMAS = {
    "no JSON": ('{"a": ', "tools[0].parameters_schema"),
    "too deep": ("[" * 200_000, "tools[0].parameters_schema"),
    "too deep for the template": ('{"a": ' * 900 + "{}" + "}" * 900, ""),
}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_wrong_schema_is_refused_by_its_path_and_ends_no_worker(
    server: ServerProcess, stub: Any, kind: str
) -> None:
    schema, place = SCHEMAS[kind]
    api, workers = GenerationServiceStub(server.channel()), set(server.text_worker_pids())
    request = asked("schema", tools=[{"name": "f", "parameters_schema": schema}])
    with pytest.raises(grpc.RpcError) as caught:
        list(api.Generate(request, timeout=SECONDS))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [*violations(caught.value)] == [f"chat.{place}".rstrip(".")]
    assert set(server.text_worker_pids()) == workers
    request.chat.tools[0].parameters_schema = '{"type": {}}'
    asks = service.TokenizeRequest(chat=request.chat)
    assert api.Tokenize(asks, timeout=SECONDS).token_count > 1


def test_tools_are_limited_and_cost_the_front_end_little(server: ServerProcess, stub: Any) -> None:
    api = GenerationServiceStub(server.channel())

    def with_tool(schema: dict[str, Any]) -> v1.GenerateRequest:
        return asked("hello", tools=[{"name": "f", "parameters_schema": json.dumps(schema)}])

    def dates(count: int) -> dict[str, Any]:
        return {"properties": {f"p{at}": {"format": "date-time"} for at in range(count)}}

    before = cpu_seconds(server.process.pid)
    # The engine may refuse it as too long: that is reported by another field.
    with contextlib.suppress(grpc.RpcError):
        list(api.Generate(with_tool(dates(2000)), timeout=SECONDS))
    for call in (with_tool({"anyOf": [{}] * 9000}), with_tool(dates(20_000))):
        with pytest.raises(grpc.RpcError) as caught:
            list(api.Generate(call, timeout=SECONDS))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [*violations(caught.value)] == ["chat.tools"]
    with pytest.raises(grpc.RpcError) as caught:
        api.Tokenize(service.TokenizeRequest(chat=call.chat), timeout=SECONDS)
    assert "--max-constraint-bytes" in violations(caught.value)["chat.tools"]
    # Their check on the event loop took several seconds.
    assert cpu_seconds(server.process.pid) - before < 1.0


def test_a_call_of_a_tool_is_streamed_and_ends_the_turn(server: ServerProcess) -> None:
    api = GenerationServiceStub(server.channel())
    only = {"type": "object", "properties": {"a": {"const": "é"}}, "required": ["a"]}
    schema = json.dumps({**only, "additionalProperties": False})
    request = asked("call it", tools=[{"name": "f", "parameters_schema": schema}])
    request.chat.parallel_tool_calls = False
    request.chat.tool_choice.mode = chat_pb2.TOOL_MODE_REQUIRED
    request.sampling.temperature = 0
    request.stopping.max_new_tokens = 80
    events = list(api.Generate(request, timeout=SECONDS))
    finished = events[-2].finished
    pieces = [e.tokens.tool_call for e in events if e.tokens.HasField("tool_call")]
    assert (pieces[0].call_index, pieces[0].name) == (0, "f")
    assert json.loads("".join(piece.arguments for piece in pieces)) == {"a": "é"}
    (call,) = finished.message.tool_calls
    assert (call.id, call.name) == (pieces[0].id, "f")
    assert call.arguments == "".join(piece.arguments for piece in pieces)
    assert finished.finish_reason == v1.FINISH_REASON_TOOL_CALLS
    assert (finished.text, list(finished.message.content)) == ("", [])
    # Without tools it is text: the call, and once it is there the end.
    request.chat.ClearField("tools")
    request.chat.ClearField("tool_choice")
    request.chat.ClearField("parallel_tool_calls")
    request.sampling.allowed_token_ids.extend([CALL_ID, END_ID])
    request.sampling.logit_bias[CALL_ID] = 30.0
    ends = {"max_new_tokens": 8, "eos_boost": {"factor": 100.0}}
    request.stopping.CopyFrom(v1.StoppingOptions(**ends))
    request.chat.messages[0].content[0].text = "no tools"
    (plain,) = api.GenerateOnce(
        service.GenerateOnceRequest(request=request), timeout=SECONDS
    ).results
    assert (plain.text, plain.finish_reason) == (CALL, v1.FINISH_REASON_EOS_TOKEN)


def test_reasoning_that_the_template_opens_comes_as_its_own(server: ServerProcess) -> None:
    api = GenerationServiceStub(server.channel())
    request = asked("think hard", template_arguments={"mood": "!"})
    request.sampling.temperature = 0
    events = list(api.Generate(request, timeout=SECONDS))
    finished, usage = events[-2].finished, events[-1].completed.usage
    assert "".join(event.tokens.reasoning for event in events).strip() == finished.reasoning.strip()
    assert (finished.text, finished.message.reasoning) == ("", finished.reasoning)
    assert usage.reasoning_token_count == usage.generated_token_count == 2
    request.output.raw_text = True
    plain = list(api.Generate(request, timeout=SECONDS))
    assert plain[-2].finished.text.strip() == finished.reasoning
    assert plain[-1].completed.usage.reasoning_token_count == 0
    model = api.GetModel(service.GetModelRequest(), timeout=SECONDS).model
    assert model.chat_template.reasoning_parser == "think"
    assert model.chat_template.tool_parser == "hermes"
    assert {"chat.tools.name", "chat.template_arguments", "output.raw_text"} <= {*model.features}


def test_the_models_defaults_are_used_where_a_request_leaves_them_open(
    server: ServerProcess,
) -> None:
    api = GenerationServiceStub(server.channel())
    told = api.GetModel(service.GetModelRequest(), timeout=SECONDS).model.sampling_defaults
    assert told == v1.SamplingOptions(do_sample=True, temperature=0.5, top_k=5)

    def answer(**sampling: Any) -> Any:
        request = v1.GenerateRequest(text="def f(", sampling=sampling, stopping=SHORT)
        request.stopping.max_new_tokens = 40
        asks = service.GenerateOnceRequest(request=request)
        return api.GenerateOnce(asks, timeout=SECONDS)

    def ids(answer: Any) -> list[int]:
        return list(answer.results[0].tokens.token_ids)

    open_, same = answer(seed=7), answer(seed=7, do_sample=True, temperature=0.5, top_k=5)
    assert open_.started.seed == 7
    assert ids(open_) == ids(same)
    assert ids(answer(seed=7, top_k=1)) == ids(answer(temperature=0)) != ids(open_)
    assert not answer(do_sample=False).started.HasField("seed")
    # Other protocols have rules of their own.
    request = pb.GenerateRequest(text="def f(", stopping=SHORT)
    theirs = shard_generate.generate(server.shard(), request, timeout=SECONDS)
    assert theirs.samples[0].token_ids == ids(answer(temperature=0))[:2]


# -- hostile tokenizers --------------------------------------------------------------------------


def test_a_panic_of_the_tokenizer_is_answered(tmp_path: Path) -> None:
    model = with_tokenizer(tmp_path / "panics", pre_tokenizer={"type": "FixedLength", "length": 0})
    with serve("--model-id", str(model)) as server:
        for text in ("short", "long " * 5_000):
            with pytest.raises(grpc.RpcError) as refused:
                generate(server.stub(), text_request(text, stopping=SHORT), timeout=SECONDS)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "tokenizer" in violations(refused.value)["text"]
            assert server.health() == SERVING
        assert server.stop() == 0


def test_a_replacement_that_fills_memory_ends_with_its_call(tmp_path: Path) -> None:
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1_000_000}
    model = with_tokenizer(tmp_path / "grows", normalizer=grows)
    flags = ["--text-memory-bytes", str(128 * 2**20)]
    with serve("--model-id", str(model), *flags) as server:
        stub, shard = server.stub(), server.shard()
        with pytest.raises(grpc.RpcError) as refused:
            stub.Tokenize(service.TokenizeRequest(text="a" * 1_000), timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "--text-memory-bytes" in violations(refused.value)["text"]
        assert stub.Tokenize(service.TokenizeRequest(text="bcd"), timeout=SECONDS).token_count > 1
        # A router's request that does the same ends alone: the others of its batch go on.
        answer = shard.Prefill(pb.PrefillRequest(batch=routed("a" * 1_000, "bcd")), timeout=SECONDS)
        ended = {g.request_id: g.HasField("generated_text") for g in answer.generations}
        assert ended == {0: True, 1: False}
        assert answer.batch.request_ids == [1]
        shard.ClearCache(pb.ClearCacheRequest(), timeout=SECONDS)
        assert server.stop() == 0
