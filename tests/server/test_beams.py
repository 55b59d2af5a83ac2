"""Beam search of `tokenpod.v1` over a real socket."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
import torch
import transformers

import tokenpod.models.demo
from support.clients.public_api import (
    SHORT,
    ask,
    finished_of,
    once,
    refused,
    stream,
    tokens_of,
    violations,
)
from support.pods.harness import ServerProcess
from tokenpod.core.requests import EarlyStop
from tokenpod.service.dialects.tokenpod_v1.codec import beam_of
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

BEAM = {"beam": {"width": 2, "n": 2, "length_penalty": 0.4}}


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Any:
    return GenerationServiceStub(server.channel())


def test_results_come_at_the_end_and_the_best_first(api: Any) -> None:
    events = stream(api, ask(sampling=BEAM, output={"return_logprobs": True}))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "tokens", "finished", "tokens", "finished", "completed"]
    assert not events[0].started.HasField("seed")
    best, second = finished_of(events)
    assert (best.sample_index, second.sample_index) == (0, 1)
    assert best.score >= second.score
    for finished in (best, second):
        (tokens,) = tokens_of(events, finished.sample_index)
        assert len(tokens.token_ids) == finished.generated_token_count == 8
        assert tokens.text == finished.text
        assert finished.cumulative_logprob == pytest.approx(sum(tokens.logprobs), abs=1e-4)
        assert finished.score == pytest.approx(finished.cumulative_logprob / 8**0.4)
    assert tokens_of(events, 0)[0].token_ids != tokens_of(events, 1)[0].token_ids
    answer = once(api, ask(sampling=BEAM, output={"return_logprobs": True}))
    assert [r.text for r in answer.results] == [best.text, second.text]
    # Now the prompt was cached, and is not computed in the same way.
    assert [r.score for r in answer.results] == pytest.approx([best.score, second.score], abs=1e-4)


def test_texts_are_those_of_transformers(api: Any) -> None:
    folder = tokenpod.models.demo.__path__[0]
    prompt = api.Tokenize(service.TokenizeRequest(text=ask().text, return_token_ids=True))
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).generate(
        torch.tensor([list(prompt.token_ids)]),
        attention_mask=torch.ones(1, prompt.token_count, dtype=torch.long),
        num_beams=2,
        num_return_sequences=2,
        max_new_tokens=8,
        do_sample=False,
        length_penalty=0.4,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer = once(api, ask(sampling=BEAM))
    ours = [list(result.tokens.token_ids) for result in answer.results]
    assert ours == found[:, prompt.token_count :].tolist()


def beam(**more: Any) -> dict[str, Any]:
    return {"sampling": {"beam": {"width": 2} | more}}


BAD: dict[str, dict[str, Any]] = {
    "sampling.beam.width": beam(width=1),
    "sampling.beam.n": beam(n=3),
    "sampling.beam.length_penalty": beam(length_penalty=math.nan),
    "sampling.beam.early_stopping": beam(early_stopping=9),
    "sampling.temperature": {"sampling": BEAM | {"temperature": 0.5}},
    "sampling.do_sample": {"sampling": BEAM | {"do_sample": True}},
    "sampling.seed": {"sampling": BEAM | {"seed": 1}},
    "sampling.n": {"sampling": BEAM | {"n": 2}},
    "output.stream": {"sampling": BEAM, "output": {"stream": True}},
}
NOT_YET: dict[str, dict[str, Any]] = {
    "sampling.repetition_penalty": {"sampling": BEAM | {"repetition_penalty": 1.1}},
    "stopping.stop_sequences": {"sampling": BEAM, "stopping": {"stop_sequences": ["x"]}},
    "constraint.regex": {
        "sampling": BEAM,
        "constraint": {"regex": "a+"},
        "stopping": {"max_new_tokens": 4},
    },
    "output.return_ranks": {"sampling": BEAM, "output": {"return_ranks": True}},
}


@pytest.mark.parametrize("field", BAD)
def test_what_contradicts_a_search_is_refused(api: Any, field: str) -> None:
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, ask(**BAD[field]))
    assert [*violations(error)] == [field]


@pytest.mark.parametrize("field", NOT_YET)
def test_what_a_search_can_not_have_yet_is_refused(api: Any, field: str) -> None:
    error = refused(grpc.StatusCode.UNIMPLEMENTED, stream, api, ask(**NOT_YET[field]))
    assert [*violations(error)] == [field]


def test_a_width_above_the_limit_is_refused_and_names_both(api: Any) -> None:
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, ask(**beam(width=3)))
    assert violations(error) == {
        "sampling.beam.width": "is 3; this server allows at most 2 (--max-best-of)"
    }


def test_a_request_that_draws_nothing_may_say_so(api: Any) -> None:
    sampling = BEAM | {"do_sample": False, "temperature": 0}
    answer = once(api, ask(sampling=sampling, stopping=SHORT))
    assert [each.sample_index for each in answer.results] == [0, 1]


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (pb.EARLY_STOPPING_UNSPECIFIED, EarlyStop.FALSE),
        (pb.EARLY_STOPPING_HEURISTIC, EarlyStop.FALSE),
        (pb.EARLY_STOPPING_ALWAYS, EarlyStop.TRUE),
        (pb.EARLY_STOPPING_NEVER, EarlyStop.NEVER),
    ],
)
def test_a_search_ends_as_the_client_says(value: pb.EarlyStopping, meant: EarlyStop) -> None:
    found = beam_of(ask(**beam(early_stopping=value)))
    assert found is not None
    assert found.early_stopping is meant


def test_features_have_the_fields_of_a_search(api: Any) -> None:
    features = {*api.GetModel(service.GetModelRequest()).model.features}
    names = [field.name for field in pb.BeamSearch.DESCRIPTOR.fields]
    assert {f"sampling.beam.{name}" for name in names} <= features
    assert "output.stream" in features


def test_samples_that_are_not_streamed_come_whole(api: Any) -> None:
    sampling = {"n": 1, "best_of": 2, "temperature": 1.0, "seed": 3}
    events = stream(api, ask(sampling=sampling, output={"stream": False}))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "tokens", "finished", "completed"]
    answer = once(api, ask(sampling=sampling))
    assert finished_of(events)[0].text == answer.results[0].text
