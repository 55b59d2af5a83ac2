"""Flags that no other test starts a pod with, together: what they say can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from support.clients.public_api import ask, once, refused, stream
from support.pods.harness import ServerProcess, serve
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

FLAGS = {
    "tool-parser": "hermes",
    "reasoning-parser": "think",
    "generation-config": "none",
    "unknown-fields": "ignore",
    "text-workers": "2",
    "max-stop-sequences": "2",
    "max-stop-sequence-bytes": "10",
    "max-logit-bias": "3",
    "constraint-compile-timeout": "4",
    "constraint-mask-timeout": "0.4",
    "constraint-workers": "1",
    "constraint-cache-bytes": "1000000",
    "admission": "optimistic",
    "batching": "alternate",
    "prefix-eviction": "lfu",
    "host-kv-bytes": "100000000",
    "host-kv-least-tokens": "16",
    "log-level": "warning",
    "max-total-tokens": "256",
    "max-batch-size": "4",
}


@pytest.fixture(scope="module")
def pod() -> Iterator[ServerProcess]:
    with serve(
        *(part for name, value in FLAGS.items() for part in (f"--{name}", value))
    ) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def api(pod: ServerProcess) -> Any:
    return GenerationServiceStub(pod.channel())


def test_the_model_tells_of_them(api: Any) -> None:
    model = api.GetModel(service.GetModelRequest(), timeout=30).model
    limits = model.limits
    assert (limits.max_stop_sequences, limits.max_stop_sequence_bytes) == (2, 10)
    assert (limits.max_logit_biases, limits.max_batch_size) == (3, 4)
    parsers = model.chat_template.tool_parser, model.chat_template.reasoning_parser
    assert parsers == ("hermes", "think")
    assert model.host_token_count > 1000
    assert not model.no_prefix_cache


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stopping": {"stop_sequences": ["a", "b", "c"]}}, "this server allows 2"),
        ({"stopping": {"stop_sequences": ["a" * 11]}}, "this server allows 10"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(5, 9), 1.0)}}, "--max-logit-bias"),
    ],
)
def test_limits_are_kept_and_named(api: Any, fields: dict[str, Any], said: str) -> None:
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, stream, api, ask(text="x", **fields))
    assert said in error.details()


def test_unknown_fields_are_ignored(api: Any) -> None:
    request = ask(text="import ", stopping={"max_new_tokens": 4})
    newer = pb.GenerateRequest.FromString(request.SerializeToString() + b"\xfa\x7f\x02\x08\x01")
    assert once(api, newer).results[0].text == once(api, request).results[0].text != ""


def test_samples_are_constrained_by_the_one_worker(api: Any) -> None:
    fields: dict[str, Any] = {"sampling": {"n": 2, "temperature": 2.0, "seed": 1}}
    fields["stopping"] = {"max_new_tokens": 9}
    found = once(api, ask(text="x", constraint={"regex": "[0-9]{6}"}, **fields)).results
    assert [len(result.text) for result in found if result.text.isdigit()] == [6, 6]


def test_the_log_has_warnings_alone(pod: ServerProcess) -> None:
    assert " INFO " not in pod.log.read_text()
