"""A pod whose weights are made in fewer bits while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.checkpoints.demo import DEMO
from support.clients.public_api import ask, once
from support.pods.harness import ServerProcess, serve
from support.steps.hand_scheduler import HandScheduler
from tokenpod.models.load import load_model
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

IDS = [5, 17, 301, 44, 90, 7]
NEW = 12


@pytest.fixture(scope="module")
def pod() -> Iterator[ServerProcess]:
    flags = ("--quantize", "int4", "--quantize-head", "--max-total-tokens", "64")
    with serve(*flags, "--max-batch-size", "2") as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def api(pod: ServerProcess) -> Any:
    return GenerationServiceStub(pod.channel())


def scores_of(ids: list[int], **quantised: Any) -> list[float]:
    """Log probabilities of tokens behind IDS, by a model of this process."""
    model: Any = load_model(
        DEMO,
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=64,
        **quantised,
    )
    scheduler = HandScheduler(model)
    row = scheduler.sequence([*IDS, *ids])
    (scores,) = scheduler.step([(row, len(IDS) + len(ids))])
    behind = scores[len(IDS) - 1 : -1].log_softmax(-1)
    return [float(each[token]) for each, token in zip(behind, ids, strict=True)]


def test_it_says_what_those_weights_say(api: Any) -> None:
    asked = ask(
        token_ids={"ids": IDS},
        stopping={"max_new_tokens": NEW, "ignore_eos": True},
        output={"return_logprobs": True},
    )
    tokens = once(api, asked).results[0].tokens
    ids, said = list(tokens.token_ids), list(tokens.logprobs)
    assert said == pytest.approx(scores_of(ids, quantize="int4", quantize_head=True), abs=1e-3)
    assert said != pytest.approx(scores_of(ids, quantize="int4"), abs=1e-3)


def test_the_model_names_the_format(api: Any) -> None:
    model = api.GetModel(service.GetModelRequest(), timeout=30).model
    assert model.quantization == "int4"
