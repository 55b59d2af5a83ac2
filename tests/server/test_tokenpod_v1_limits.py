"""`tokenpod.v1`: what it refuses, how it counts tokens, and what it tells of the server."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from support.clients.public_api import PROMPT, SHORT, ask, once, refused, said, stream, violations
from support.pods.harness import ServerProcess
from support.waiting import wait_for
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Any:
    return GenerationServiceStub(server.channel())


# -- what is refused ---------------------------------------------------------------------------

BAD: dict[str, dict[str, Any]] = {
    "sampling.top_p": {"sampling": {"top_p": 0}},
    "sampling.typical_p": {"sampling": {"typical_p": 0}},
    "sampling.repetition_penalty": {"sampling": {"repetition_penalty": 0}},
    "sampling.n": {"sampling": {"n": 0}},
    "sampling.temperature": {"sampling": {"temperature": math.nan}},
    "truncate": {"truncate": 0},
    "stopping.max_new_tokens": {"stopping": {"max_new_tokens": 0}},
    "stopping.time_limit": {"stopping": {"time_limit": {}}},
    "labels": {"labels": {str(at): "x" for at in range(17)}},
    "labels[a]": {"labels": {"a": "ü"}},
    "cache_salt": {"cache_salt": "x" * 65},
    "request_id": {"request_id": "x" * 257},
    "stopping.eos_boost.factor": {"stopping": {"eos_boost": {"factor": 1.0}}},
    "stopping.eos_boost": {"stopping": {"eos_boost": {"factor": 1.1}, "ignore_eos": True}},
    "sampling.allowed_token_ids[1]": {"sampling": {"allowed_token_ids": [1, 4096]}},
    "sampling.allowed_token_ids": {
        "sampling": {"allowed_token_ids": [1]},
        "stopping": {"min_new_tokens": 2},
    },
    "sampling.bad_words[1]": {"sampling": {"bad_words": ["a", ""]}},
    "sampling.bad_words[0]": {"sampling": {"bad_words": ["x" * 241]}},
    "sampling.bad_words": {
        "sampling": {"bad_words": ["y z " * 60] * 16 + ["y z" * at for at in range(1, 60)]}
    },
    "output.prompt_top_n_tokens": {"output": {"prompt_top_n_tokens": 6}},
    "chat.messages": {"chat": {}},
    "chat.messages[0].content[0]": {"chat": {"messages": [{"role": "user", "content": [{}]}]}},
}


@pytest.mark.parametrize("field", BAD)
def test_a_wrong_field_is_named_by_its_path(api: Any, field: str) -> None:
    request = pb.GenerateRequest(**{"text": PROMPT} | BAD[field])
    if "chat" in BAD[field]:
        request = pb.GenerateRequest(**BAD[field])
    assert [*violations(refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, request))] == [field]
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, once, api, request)
    assert [*violations(error)] == [f"request.{field}"]


def test_a_model_for_text_refuses_images(api: Any) -> None:
    image = {"image": {"data": b"\x89PNG"}}
    request = pb.GenerateRequest(chat={"messages": [{"role": "user", "content": [image]}]})
    error = refused(grpc.StatusCode.UNIMPLEMENTED, stream, api, request)
    assert violations(error) == {
        "chat.messages[0].content[0].image": "is not supported: this server has no model that sees"
    }
    features = api.GetModel(service.GetModelRequest()).model.features
    assert not [each for each in features if "image" in each]


def test_an_unknown_field_is_refused_on_the_socket(server: ServerProcess) -> None:
    data = ask().SerializeToString() + b"\xf8\x7f\x01"
    call = server.channel().unary_stream("/tokenpod.v1.GenerationService/Generate")
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: list(call(data, timeout=60)))
    assert violations(error) == {
        "2047": "is not known to this server: the message has no field 2047"
    }


# -- tokens ------------------------------------------------------------------------------------

TEXTS = ["def fé(n):\n    return '你好 😀'\n", "", "x" * 5000 + " é" * 500]


@pytest.mark.parametrize("text", TEXTS, ids=["short", "empty", "in a worker"])
def test_tokens_have_the_places_of_their_text(api: Any, text: str) -> None:
    answer = api.Tokenize(
        service.TokenizeRequest(text=text, return_token_ids=True, return_offsets=True)
    )
    places = list(zip(answer.start_offsets, answer.end_offsets, strict=True))
    assert len(places) == answer.token_count == len(answer.token_ids)
    assert places[0] == (0, 0), "the beginning-of-text token has none"
    if text:
        assert places[1][0] == 0
        assert places[-1][1] == len(text)
    assert all(begin <= end for begin, end in places)
    assert all(a[1] >= b[0] for a, b in itertools.pairwise(places)), "no character is left out"
    assert api.Detokenize(service.DetokenizeRequest(token_ids=answer.token_ids)).text == text
    counted = api.Tokenize(service.TokenizeRequest(text=text, add_special_tokens=False))
    assert counted.token_count == answer.token_count - 1
    assert not counted.token_ids


def test_a_chat_is_counted_as_it_is_generated_from(api: Any) -> None:
    chat = said(("system", "Be brief."), ("user", "Sum a list."))
    counted = api.Tokenize(service.TokenizeRequest(chat=chat)).token_count
    request = pb.GenerateRequest(chat=chat, stopping=SHORT)
    assert counted == once(api, request).started.prompt_token_count
    for field in ("return_offsets", "add_special_tokens"):
        asked = service.TokenizeRequest(chat=chat, **{field: True})
        assert field in violations(refused(grpc.StatusCode.INVALID_ARGUMENT, api.Tokenize, asked))
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, api.Tokenize, service.TokenizeRequest())
    assert "input" in violations(error)


@pytest.mark.parametrize("field", ["return_token_ids", "return_offsets"])
def test_a_list_that_is_too_long_is_refused_by_who_asks_for_it(api: Any, field: str) -> None:
    many = service.TokenizeRequest(text="word " * 140_000, **{field: True})
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, api.Tokenize, many)
    assert "280001" in violations(error)[field]


def test_ids_of_no_token_have_no_text(api: Any) -> None:
    asked = service.DetokenizeRequest(token_ids=[5, 4096])
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, api.Detokenize, asked)
    assert "below 4096" in violations(error)["token_ids[1]"]


# -- what is served ----------------------------------------------------------------------------


def test_the_model_tells_its_limits_and_they_are_the_ones_in_force(api: Any) -> None:
    model = api.GetModel(service.GetModelRequest(name="demo")).model
    limits = model.limits
    assert (model.name, model.vocabulary_size, model.context_length) == ("demo", 4096, 2048)
    assert list(model.eos_token_ids) == [1]
    assert "add_generation_prompt" in model.chat_template.source
    assert "sampling.top_k" in model.features
    over = {
        "output.top_n_tokens": {"output": {"top_n_tokens": limits.max_top_n_tokens + 1}},
        "sampling.n": {"sampling": {"n": limits.max_samples + 1}},
        "stopping.stop_sequences": {
            "stopping": {"stop_sequences": ["x"] * (limits.max_stop_sequences + 1)}
        },
        "stopping.stop_sequences[0]": {
            "stopping": {"stop_sequences": ["x" * (limits.max_stop_sequence_bytes + 1)]}
        },
        "stopping.stop_token_ids": {
            "stopping": {"stop_token_ids": [1] * (limits.max_logit_biases + 1)}
        },
        "prompt": {"text": "", "token_ids": {"ids": [5] * (limits.max_input_tokens + 1)}},
    }
    for field, fields in over.items():
        assert field in violations(
            refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, ask(**fields))
        )
    request = pb.GenerateRequest(token_ids={"ids": [5] * 2040}, output={"return_final_text": False})
    assert once(api, request).started.max_new_tokens == limits.max_total_tokens - 2040


def test_features_are_fields_of_the_request(api: Any) -> None:
    for path in api.GetModel(service.GetModelRequest()).model.features:
        kind = pb.GenerateRequest.DESCRIPTOR
        for name in path.split("."):
            field = kind.fields_by_name[name]
            kind = field.message_type


def test_a_field_without_fields_of_its_own_is_a_feature(api: Any) -> None:
    features = api.GetModel(service.GetModelRequest()).model.features
    kinds = pb.Constraint.DESCRIPTOR.fields_by_name
    told = {path.split(".")[1] for path in features if path.startswith("constraint.")}
    assert told == set(kinds.keys())


@pytest.fixture
def long_call(api: Any) -> Iterator[Any]:
    running = api.Generate(ask(stopping={"max_new_tokens": 1900, "ignore_eos": True}), timeout=120)
    next(running)
    yield running
    running.cancel()


def test_the_load_counts_what_runs_and_what_has_been_asked(api: Any, long_call: Any) -> None:
    request = service.GetLoadRequest()
    before = api.GetLoad(request)
    assert before.request_count >= 1
    assert before.running_sequence_count >= 1
    assert before.used_token_count > 0
    assert before.total_token_count == 131_072
    assert before.start_time.seconds > 1_700_000_000
    usage = once(api, ask(text=PROMPT * 5, stopping=SHORT, sampling={"n": 2})).usage
    after = api.GetLoad(request)
    assert after.prompt_token_count - before.prompt_token_count == usage.prompt_token_count
    assert after.cached_token_count - before.cached_token_count == usage.cached_token_count
    assert MessageToDict(after)["startTime"] == MessageToDict(before)["startTime"]


def test_requests_are_counted_by_how_they_ended(api: Any, long_call: Any) -> None:
    def counts() -> tuple[int, ...]:
        load = api.GetLoad(service.GetLoadRequest())
        return (
            load.stopped_request_count,
            load.length_request_count,
            load.aborted_request_count,
            load.oversized_request_count,
        )

    before = counts()
    once(api, ask(stopping={"max_new_tokens": 2, "ignore_eos": True}))
    text = once(api, ask(stopping=SHORT, sampling={"seed": 1})).results[0].text
    once(api, ask(stopping={**SHORT, "stop_sequences": [text[:2]]}, sampling={"seed": 1}))
    too_long = ask(stopping={"max_new_tokens": 10**6})
    refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, too_long)
    long_call.cancel()
    wait_for(lambda: counts()[2] > before[2])
    ended = [now - then for now, then in zip(counts(), before, strict=True)]
    assert ended == [1, 2, 1, 1]
