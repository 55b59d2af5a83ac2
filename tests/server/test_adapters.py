"""Adapters on a running server: by name, in every protocol, beside each other and the base."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from groups import ENV, FLAGS
from hand_scheduler import HandScheduler
from harness import ServerProcess, serve
from lora_folders import merge, write_lora
from public_api import ask, once, refused

import tokenpod.models.demo
from tokenpod.models.load import load_model
from tokenpod_client.protos.fmaas import generation_pb2 as tgis
from tokenpod_client.protos.fmaas.generation_pb2_grpc import GenerationServiceStub as TgisStub
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

DEMO = Path(tokenpod.models.demo.__file__).parent
IDS = [5, 17, 301, 44, 90, 7]
NEW = 8
PARTS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    modules = {f"model.layers.{i}.{part}": 4 for i in range(2) for part in PARTS}
    names = ("sql", "chat", "law")
    return {n: write_lora(folder / n, DEMO, modules, seed=at) for at, n in enumerate(names)}


@pytest.fixture(scope="module")
def expected(adapters: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each adapter, merged into the base, says; "": the base."""
    folders = {"": DEMO}
    for name, lora in adapters.items():
        folders[name] = merge(DEMO, lora, tmp_path_factory.mktemp("merged") / name)
    return {name: greedy(folder) for name, folder in folders.items()}


def greedy(folder: Path) -> list[int]:
    model: Any = load_model(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=256,
    )
    scheduler, tokens = HandScheduler(model), list(IDS)
    row = scheduler.sequence(tokens)
    (scores,) = scheduler.step([(row, len(tokens))])
    for _ in range(NEW):
        row.tokens.append(int(scores[-1].argmax()))
        (scores,) = scheduler.step([(row, 1)])
    return row.tokens[len(IDS) :]


def named(adapters: dict[str, Any]) -> str:
    return ",".join(f"{name}={lora.folder}" for name, lora in adapters.items())


@pytest.fixture(scope="module")
def pod(adapters: dict[str, Any]) -> Iterator[ServerProcess]:
    """Two slots for three adapters, whose names TGI's variable has."""
    env = {**ENV, "LORA_ADAPTERS": named(adapters)}
    with serve(*FLAGS, "--max-adapters", "2", "--max-adapter-rank", "8", env=env) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def api(pod: ServerProcess) -> Any:
    return GenerationServiceStub(pod.channel())


def request(adapter: str = "", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids={"ids": IDS},
        adapter=adapter,
        stopping={"max_new_tokens": NEW, "ignore_eos": True},
        sampling={"do_sample": False},
        **fields,
    )


def tokens(api: Any, adapter: str) -> list[int]:
    events = list(api.Generate(request(adapter), timeout=120))
    assert events[0].started.adapter == adapter
    return [i for e in events if e.WhichOneof("event") == "tokens" for i in e.tokens.token_ids]


def test_each_call_has_the_adapter_that_it_names(api: Any, expected: dict[str, Any]) -> None:
    """More adapters than slots at once: they take turns. The second round has cached prefixes."""
    assert len({tuple(said) for said in expected.values()}) == 4
    asked = [*expected, *expected]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: tokens(api, name), asked))
    assert found == [expected[name] for name in asked]
    assert [tokens(api, name) for name in asked] == found


def test_prefixes_are_shared_with_the_same_adapter_alone(api: Any) -> None:
    ids = [900 + i for i in range(24)]

    def cached(adapter: str) -> int:
        asked = request(adapter)
        asked.token_ids.CopyFrom(pb.TokenIds(ids=ids))
        return once(api, asked).started.cached_token_count

    assert [cached(name) for name in ("sql", "chat", "", "sql", "")] == [0, 0, 0, 23, 23]


def test_an_unknown_adapter_is_not_found_and_the_answer_names_those_there_are(api: Any) -> None:
    error = refused(grpc.StatusCode.NOT_FOUND, list, api.Generate(ask(adapter="lax"), timeout=30))
    text = "there is no adapter 'lax'; this server has 'chat', 'law', 'sql'"
    assert error.details() == text


def test_the_model_names_its_adapters(api: Any, adapters: dict[str, Any]) -> None:
    model = api.GetModel(service.GetModelRequest(), timeout=30).model
    assert "adapter" in model.features
    assert (model.adapter_count, model.max_adapter_count, model.max_adapter_rank) == (3, 2, 8)
    assert [each.name for each in model.adapters] == sorted(adapters)
    assert {each.rank for each in model.adapters} == {4}
    assert len({each.digest for each in model.adapters}) == 3


def test_without_adapters_the_field_is_no_feature(server: ServerProcess) -> None:
    base = GenerationServiceStub(server.channel())
    model = base.GetModel(service.GetModelRequest(), timeout=30).model
    assert "adapter" not in model.features
    assert (model.adapter_count, model.max_adapter_count) == (0, 0)
    error = refused(grpc.StatusCode.NOT_FOUND, list, base.Generate(ask(adapter="x"), timeout=30))
    assert error.details() == "there is no adapter 'x'; this server has none"


@pytest.mark.parametrize("field", ["adapter_id", "prefix_id"])
def test_clients_of_tgis_name_adapters(pod: ServerProcess, api: Any, field: str) -> None:
    stub = TgisStub(pod.channel())

    def text(**named: str) -> str:
        asked = tgis.SingleGenerationRequest(
            request={"text": "import os\n"}, params={"stopping": {"max_new_tokens": 6}}, **named
        )
        return "".join(each.text for each in stub.GenerateStream(asked, timeout=60))

    wanted = once(api, ask(text="import os\n", adapter="law", stopping={"max_new_tokens": 6}))
    assert text(**{field: "law"}) == wanted.results[0].text != text()
    error = refused(grpc.StatusCode.NOT_FOUND, lambda: text(**{field: "lax"}))
    assert "there is no adapter 'lax'" in str(error.details())


def test_routers_name_adapters_and_other_models_are_the_base(pod: ServerProcess) -> None:
    stub = pod.stub()

    def first(batch: int, name: str | None) -> int:
        asked = v3.Request(
            id=1,
            inputs="import os\n",
            truncate=100,
            parameters=v3.NextTokenChooserParameters(temperature=1, repetition_penalty=1),
            stopping_parameters=v3.StoppingCriteriaParameters(max_new_tokens=1),
            adapter_id=name,
        )
        batch_of = v3.Batch(id=batch, requests=[asked], size=1)
        reply = stub.Prefill(v3.PrefillRequest(batch=batch_of), timeout=60)
        return int(reply.generations[0].tokens.ids[0])

    base = first(1, None)
    assert first(2, "gpt-4") == base
    assert {first(3, "sql"), first(4, "law"), first(5, "chat")} != {base}


def test_two_ranks_adapt_what_one_does(adapters: dict[str, Any], expected: dict[str, Any]) -> None:
    flags = ("--num-shard", "2", "--lora-adapters", named(adapters), "--max-adapters", "2")
    with serve(*FLAGS, *flags, env=ENV) as pod:
        stub = GenerationServiceStub(pod.channel())
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda name: tokens(stub, name), expected))
        assert found == list(expected.values())
        assert pod.stop() == 0


BROKEN = {
    "no folder": ("x=/no/such/folder", "--lora-adapters names x: there is no folder"),
    "no adapter": (f"x={DEMO}", "has no adapter_config.json"),
    "twice": ("x=/a,x=/b", "--lora-adapters is x=/a,x=/b: x is named twice"),
    "no name": ("=/a", "'=/a' is not NAME=PATH"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_adapter_ends_the_start_with_one_line(case: str) -> None:
    flag, said = BROKEN[case]
    with serve("--lora-adapters", flag, wait=False) as pod:
        assert pod.process.wait(60) in (1, 2)
        assert said in pod.log.read_text()


def test_an_adapter_of_another_base_ends_the_start(adapters: dict[str, Any]) -> None:
    flags = ("--lora-adapters", named({"sql": adapters["sql"]}), "--max-adapter-rank", "2")
    with serve(*FLAGS, *flags, wait=False) as pod:
        assert pod.process.wait(60) == 1
        text = pod.log.read_text()
        assert "adapter sql: adapter_model.safetensors: model.layers.0." in text
        assert "has rank 4; at most 2 is served (--max-adapter-rank)" in text
