"""`fmaas`, TGIS's protocol, over a real socket: with our stubs, and with those of its clients."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.clients.public_api import PROMPT, generate, refused, violations
from support.outside import tgis_client
from support.pods.harness import SERVING, ServerProcess
from tokenpod_client.protos.fmaas import generation_pb2 as pb
from tokenpod_client.protos.fmaas.generation_pb2_grpc import GenerationServiceStub
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as public
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service

ROOT = Path(__file__).resolve().parents[2]
CALL = {"timeout": 120}


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Any:
    return GenerationServiceStub(server.channel())


def single(text: str = PROMPT, **params: Any) -> pb.SingleGenerationRequest:
    return pb.SingleGenerationRequest(request={"text": text}, params=params)


def stream(api: Any, request: pb.SingleGenerationRequest) -> list[Any]:
    return list(api.GenerateStream(request, **CALL))


def whole(api: Any, *texts: str, **params: Any) -> list[Any]:
    request = pb.BatchedGenerationRequest(requests=[{"text": t} for t in texts], params=params)
    return list(api.Generate(request, **CALL).responses)


def reference(stub: Any, text: str = PROMPT, **fields: Any) -> Any:
    """What `tokenpod.v1` makes of the same request."""
    return generate(stub, public.GenerateRequest(text=text, **fields)).samples[0]


# -- the stream --------------------------------------------------------------------------------


def test_a_stream_tells_of_the_prompt_and_then_of_each_token(api: Any, stub: Any) -> None:
    events = stream(api, single(stopping={"max_new_tokens": 10}))
    assert len(events) == 11
    first, *rest = events
    assert first.text == ""
    assert first.stop_reason == pb.NOT_FINISHED
    assert [event.generated_token_count for event in rest] == list(range(1, 11))
    assert {event.stop_reason for event in rest[:-1]} == {pb.NOT_FINISHED}
    assert rest[-1].stop_reason == pb.MAX_TOKENS
    expected = reference(stub, stopping={"max_new_tokens": 10})
    assert "".join(event.text for event in rest) == expected.text
    asked = service.TokenizeRequest(text=PROMPT)
    assert first.input_token_count == stub.Tokenize(asked, **CALL).token_count
    assert not any(event.tokens or event.input_tokens or event.seed for event in events)


def test_a_batch_is_answered_in_its_order(api: Any, stub: Any) -> None:
    texts = [PROMPT, "class Stack:\n", "import os\n"]
    answers = whole(api, *texts)
    for text, answer in zip(texts, answers, strict=True):
        assert answer.text == reference(stub, text, stopping={"max_new_tokens": 20}).text
        assert answer.generated_token_count == 20, "the default"
    assert whole(api) == []


def test_details_of_tokens_are_told_where_asked_for(api: Any, stub: Any) -> None:
    options = {"generated_tokens": True, "token_logprobs": True, "top_n_tokens": 3}
    stopping = {"max_new_tokens": 6}
    (answer,) = whole(api, PROMPT, stopping=stopping, response=options)
    events = stream(api, single(stopping=stopping, response=options))
    assert [event.tokens[0] for event in events[1:]] == list(answer.tokens)
    expected = reference(
        stub, stopping=stopping, output={"return_logprobs": True, "top_n_tokens": 3}
    )
    told = [token.logprob for token in answer.tokens]
    assert told == pytest.approx(expected.logprobs, abs=1e-4)
    names = "".join(token.text for token in answer.tokens)
    assert names.replace("Ġ", " ").replace("Ċ", "\n") == expected.text
    for token in answer.tokens:
        assert len(token.top_tokens) >= 3
        best = max(token.top_tokens, key=lambda top: top.logprob)
        assert best.text == token.text, "greedy takes the likeliest"
        assert best.logprob == pytest.approx(token.logprob, abs=1e-4)


def test_ranks_are_told_where_asked_for(api: Any) -> None:
    options = {"generated_tokens": True, "token_ranks": True}
    (greedy,) = whole(api, PROMPT, response=options)
    assert {token.rank for token in greedy.tokens} == {1}
    hot = {"temperature": 5.0, "seed": 1}
    events = stream(api, single(method=pb.SAMPLE, sampling=hot, response=options))
    ranks = [token.rank for event in events for token in event.tokens]
    assert len(ranks) == 20
    assert min(ranks) >= 1
    assert max(ranks) > 10
    (plain,) = whole(api, PROMPT, response={"generated_tokens": True})
    assert not any(token.rank for token in plain.tokens)


def test_the_prompts_tokens_are_told_where_asked_for(api: Any) -> None:
    options = {"input_tokens": True, "token_logprobs": True, "input_text": True}
    (answer,) = whole(api, PROMPT, response=options)
    first, *rest = stream(api, single(response=options))
    assert len(first.input_tokens) == len(answer.input_tokens) == first.input_token_count
    assert math.isnan(first.input_tokens[0].logprob)
    assert all(token.logprob < 0 for token in first.input_tokens[1:])
    assert first.text == PROMPT
    assert answer.text == PROMPT + "".join(event.text for event in rest)
    plain = whole(api, PROMPT, response={"input_tokens": True})[0]
    assert [t.text for t in plain.input_tokens] == [t.text for t in answer.input_tokens]


def test_ranks_and_top_tokens_of_the_prompt_are_told_where_asked_for(api: Any) -> None:
    options = {"input_tokens": True, "token_ranks": True, "top_n_tokens": 3}
    (answer,) = whole(api, PROMPT, response=options | {"token_logprobs": True})
    first, *rest = answer.input_tokens
    assert (first.rank, len(first.top_tokens)) == (0, 0), "nothing precedes it"
    for token in rest:
        assert len(token.top_tokens) == 3
        likelier = [top for top in token.top_tokens if top.logprob > token.logprob + 1e-5]
        assert len(likelier) == min(token.rank - 1, 3)
        if token.rank <= 3:
            assert token.text in {top.text for top in token.top_tokens}
    assert min(token.rank for token in rest) >= 1
    assert max(token.rank for token in rest) > 3
    opening, *_ = stream(api, single(response=options))
    assert [t.rank for t in opening.input_tokens] == [t.rank for t in answer.input_tokens]
    assert not any(top.logprob for t in opening.input_tokens for top in t.top_tokens)
    assert not any(token.rank for token in answer.tokens)


# -- how tokens are chosen ---------------------------------------------------------------------


def test_a_seed_is_drawn_and_makes_the_same_again(api: Any, stub: Any) -> None:
    (drawn,) = whole(api, PROMPT, method=pb.SAMPLE)
    assert 0 <= drawn.seed < 2**32
    again = whole(api, PROMPT, method=pb.SAMPLE, sampling={"seed": drawn.seed})[0]
    assert again == drawn
    fields = {"do_sample": True, "temperature": 1.0, "seed": drawn.seed}
    assert drawn.text == reference(stub, sampling=fields, stopping={"max_new_tokens": 20}).text


def test_nothing_is_drawn_unless_asked_for(api: Any) -> None:
    (greedy,) = whole(api, PROMPT)
    assert greedy.seed == 0
    sampling = {"temperature": 1.5, "top_k": 40, "seed": 3}
    assert whole(api, PROMPT, sampling=sampling) == [greedy], "the method is GREEDY"
    assert whole(api, PROMPT, method=pb.SAMPLE, sampling={"temperature": 0}) == [greedy]


# -- how a text ends ---------------------------------------------------------------------------


def test_a_length_penalty_ends_a_text_soon(api: Any) -> None:
    stopping = {"max_new_tokens": 60}
    (plain,) = whole(api, PROMPT, stopping=stopping)
    assert plain.generated_token_count > 10
    decoding = {"length_penalty": {"start_index": 8, "decay_factor": 10.0}}
    (short,) = whole(api, PROMPT, stopping=stopping, decoding=decoding)
    assert short.stop_reason == pb.EOS_TOKEN
    assert 8 < short.generated_token_count < plain.generated_token_count
    assert plain.text.startswith(short.text)


def test_a_stop_sequence_is_named_and_stays_in_the_text(api: Any) -> None:
    text = whole(api, PROMPT, stopping={"max_new_tokens": 40})[0].text
    stop = text[9:12]
    stopping: dict[str, Any] = {"max_new_tokens": 40, "stop_sequences": ["never there", stop]}
    (kept,) = whole(api, PROMPT, stopping=stopping)
    assert (kept.stop_reason, kept.stop_sequence) == (pb.STOP_SEQUENCE, stop)
    assert kept.text == text[: text.index(stop) + len(stop)]
    stopping["include_stop_sequence"] = False
    events = stream(api, single(stopping=stopping))
    assert (events[-1].stop_reason, events[-1].stop_sequence) == (pb.STOP_SEQUENCE, stop)
    assert "".join(event.text for event in events) == text[: text.index(stop)]


def test_what_does_not_fit_is_left_out_and_said(api: Any) -> None:
    room = api.ModelInfo(pb.ModelInfoRequest(), **CALL)
    tokens = api.Tokenize(
        pb.BatchedTokenizeRequest(requests=[{"text": "x = 1\n" * 2000}]), **CALL
    ).responses[0]
    keep = room.max_sequence_length - 3
    assert tokens.token_count > keep
    params = {"stopping": {"max_new_tokens": 50}, "truncate_input_tokens": keep}
    (answer,) = whole(api, "x = 1\n" * 2000, **params)
    assert (answer.input_token_count, answer.generated_token_count) == (keep, 3)
    assert answer.stop_reason == pb.TOKEN_LIMIT


def test_a_time_limit_ends_a_text(api: Any) -> None:
    stopping = {"max_new_tokens": 500, "time_limit_millis": 1}
    events = stream(api, single(stopping=stopping))
    assert events[-1].stop_reason == pb.TIME_LIMIT
    assert events[-1].generated_token_count < 500


# -- what is refused ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature must be >= 0.05": ("sampling.temperature", {"sampling": {"temperature": 0.01}}),
    "top_p must be > 0.0 and <= 1.0": ("sampling.top_p", {"sampling": {"top_p": 1.5}}),
    "typical_p must be <= 1.0": ("sampling.typical_p", {"sampling": {"typical_p": 1.5}}),
    "repetition_penalty must be > 0.0 and <= 2.0": (
        "decoding.repetition_penalty",
        {"decoding": {"repetition_penalty": 2.5}},
    ),
    "length_penalty must be >= 1.0 and <= 10.0": (
        "decoding.length_penalty",
        {"decoding": {"length_penalty": {"decay_factor": 11}}},
    ),
    "min_new_tokens must be <= max_new_tokens": (
        "stopping.min_new_tokens",
        {"stopping": {"min_new_tokens": 21}},
    ),
    "can specify at most 6 non-empty stop sequences, each not more than 240 UTF8 bytes": (
        "stopping.stop_sequences",
        {"stopping": {"stop_sequences": [*"abcdefg"]}},
    ),
    "top_n_tokens (11) must be <= 10": (
        "response.top_n_tokens",
        {"response": {"top_n_tokens": 11}},
    ),
    "must request input and/or generated tokens to request extra token detail": (
        "response",
        {"response": {"token_logprobs": True}},
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_refusal_has_tgis_words_and_names_the_field(api: Any, text: str) -> None:
    field, params = REFUSED[text]
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, single(**params))
    assert error.details() == text
    assert [*violations(error)] == [f"params.{field}"]


def test_lengths_are_refused_in_tgis_words(api: Any) -> None:
    room = api.ModelInfo(pb.ModelInfoRequest(), **CALL).max_sequence_length
    long, code = "x = 1\n" * 2000, grpc.StatusCode.INVALID_ARGUMENT
    request = pb.BatchedTokenizeRequest(requests=[{"text": long}])
    tokens = api.Tokenize(request, **CALL).responses[0].token_count
    error = refused(code, stream, api, single(long))
    assert error.details() == f"input tokens ({tokens}) plus prefix length (0) must be < {room}"
    assert [*violations(error)] == ["request.text"]
    params = {"stopping": {"min_new_tokens": 5}, "truncate_input_tokens": room - 2}
    error = refused(code, stream, api, single(long, **params))
    assert error.details() == (
        f"input tokens ({room - 2}) plus prefix length (0) plus min_new_tokens (5)"
        f" must be <= {room}"
    )
    error = refused(code, stream, api, single(stopping={"max_new_tokens": room}))
    assert error.details() == f"max_new_tokens must be <= {room - 1}"


def test_an_adapter_is_refused_and_a_model_is_not_looked_at(api: Any) -> None:
    request = single()
    request.model_id = "whatever"
    assert stream(api, request)
    request.adapter_id = "mine"
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, request)
    assert error.details() == "adapter_id supplied but no adapter store was configured"


# -- tokens, health, ports ---------------------------------------------------------------------


def test_tokens_have_names_and_places(api: Any) -> None:
    text = "def fé(n):\n    return '你好 😀'\n"
    request = pb.BatchedTokenizeRequest(
        requests=[{"text": text}, {"text": ""}], return_tokens=True, return_offsets=True
    )
    found, empty = api.Tokenize(request, **CALL).responses
    assert found.token_count == len(found.tokens) == len(found.offsets)
    assert empty.token_count == 1, "the beginning of text"
    assert found.tokens[0] == empty.tokens[0]
    # A character of several tokens is a part of each.
    covered = {at for place in found.offsets for at in range(place.start, place.end)}
    assert covered == set(range(len(text)))
    request.truncate_input_tokens = 4
    request.ClearField("return_tokens")
    cut, _ = api.Tokenize(request, **CALL).responses
    assert (cut.token_count, list(cut.tokens)) == (4, [])
    assert list(cut.offsets) == list(found.offsets)[-4:]


def test_its_health_is_told_by_its_name(server: ServerProcess) -> None:
    stub: Any = health_pb2_grpc.HealthStub(server.channel())
    asked = health_pb2.HealthCheckRequest(service="fmaas.GenerationService")
    assert stub.Check(asked, **CALL).status == SERVING


def test_a_call_is_named_by_its_correlation_id(api: Any) -> None:
    call = api.GenerateStream(single(), metadata=(("x-correlation-id", "one-7"),), **CALL)
    assert dict(call.initial_metadata())["x-correlation-id"] == "one-7"
    assert len(list(call)) == 21


# -- clients with other stubs ------------------------------------------------------------------


def ours(folder: Path) -> Path:
    """Stubs of our proto under the name that TGIS's clients give them."""
    from grpc_tools import protoc

    (folder / "generation.proto").write_text((ROOT / "protos/fmaas/generation.proto").read_text())
    arguments = ["protoc", f"-I{folder}", f"-I{files('grpc_tools') / '_proto'}"]
    arguments += [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert protoc.main([*arguments, str(folder / "generation.proto")]) == 0
    return folder


def published(folder: Path) -> Path:
    """`protobufs/` of the wheel caikit-tgis-backend, unpacked where TGIS_STUBS says."""
    if (found := os.environ.get("TGIS_STUBS")) is None:
        pytest.skip("TGIS_STUBS names no folder with TGIS's published stubs")
    return Path(found)


@pytest.mark.parametrize("stubs", [ours, published])
def test_a_client_with_its_own_stubs(
    server: ServerProcess, api: Any, tmp_path: Path, stubs: Any
) -> None:
    command = [sys.executable, "-P", tgis_client.__file__, str(stubs(tmp_path)), server.address]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300)
    told = json.loads(done.stdout)
    events = stream(api, single(tgis_client.PROMPT, stopping={"max_new_tokens": 10}))
    assert told["texts"] == [event.text for event in events]
    assert told["counts"] == [0, *range(1, 11)]
    assert told["reasons"] == ["NOT_FINISHED"] * 10 + ["MAX_TOKENS"]
    assert told["inputs"] == [events[0].input_token_count] + [0] * 10
    assert told["batch"][0] == tgis_client.PROMPT + "".join(told["texts"])
    assert told["batch_tokens"] == told["batch_logprobs"] == [10, 10]
    assert len(told["offsets"]) == len(told["tokens"]) == events[0].input_token_count
    info = api.ModelInfo(pb.ModelInfoRequest(), **CALL)
    assert told["info"] == [info.max_sequence_length, info.max_new_tokens]
    assert told["refusal"] == "INVALID_ARGUMENT: top_p must be > 0.0 and <= 1.0"
    assert MessageToDict(info)["maxSequenceLength"] == info.max_sequence_length
