"""Virtual tokens on a running server of two ranks, in every protocol, beside LoRA and the base."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.checkpoints.demo import DEMO
from support.checkpoints.lora_folders import write_lora
from support.checkpoints.virtual_folders import PREFIX, PROMPT, write_virtual
from support.clients.public_api import ask, once, refused
from support.engines.virtual_engine import Engine
from support.pods.groups import ENV, FLAGS
from support.pods.harness import ServerProcess, serve
from tokenpod_client.protos.fmaas import generation_pb2 as tgis
from tokenpod_client.protos.fmaas.generation_pb2_grpc import GenerationServiceStub as TgisStub
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import adapter_pb2
from tokenpod_client.protos.tokenpod.v1 import adapter_service_pb2 as service_pb
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.adapter_service_pb2_grpc import AdapterServiceStub
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

IDS = [5, 17, 301, 44, 90, 7]
NEW = 4
TOTAL = 48
TOKEN = {"metadata": (("authorization", "Bearer secret"),), "timeout": 60}
TEXT = "a, b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_virtual(folder / "prompt", DEMO, PROMPT, 20)
    write_virtual(folder / "prefix", DEMO, PREFIX, 12, seed=1)
    write_virtual(folder / "later", DEMO, PREFIX, 9, seed=2)
    write_virtual(folder / "long", DEMO, PROMPT, TOTAL, seed=3)
    write_lora(folder / "sql", DEMO, {"model.layers.0.mlp.up_proj": 4})
    (folder / "tokens").write_text("secret\n")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """What an engine of one rank says, which other tests compare with transformers."""
    names = ("prompt", "prefix", "later", "sql")
    engine = Engine(DEMO, [folder / name for name in names], lora=1)
    asked = [engine.ask(number, IDS, NEW) for number in range(5)]
    said = [answer.tokens for answer in engine.run(*asked)]
    return dict(zip(("", *names), said, strict=True))


@pytest.fixture(scope="module")
def pod(folder: Path) -> Iterator[ServerProcess]:
    named = ",".join(f"{name}={folder / name}" for name in ("prompt", "prefix", "sql"))
    flags = ["--lora-adapters", named, "--max-adapters", "1"]
    flags += ["--adapter-folder", str(folder), "--adapter-token-file", f"{folder}/tokens"]
    flags += ["--max-total-tokens", str(TOTAL), "--max-batch-prefill-tokens", "16"]
    with serve(*FLAGS, *flags, env=ENV) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def api(pod: ServerProcess) -> Any:
    return GenerationServiceStub(pod.channel())


def generate(api: Any, adapter: str, ids: list[int] = IDS, new: int = NEW) -> Any:
    asked = pb.GenerateRequest(
        token_ids={"ids": ids},
        adapter=adapter,
        stopping={"max_new_tokens": new, "ignore_eos": True},
        sampling={"do_sample": False},
    )
    return once(api, asked)


def tokens(api: Any, adapter: str) -> list[int]:
    return [*generate(api, adapter).results[0].tokens.token_ids]


def test_each_call_has_the_virtual_tokens_that_it_names(api: Any, expected: Any) -> None:
    """Side by side, twice: the second time all prefixes are cached."""
    names = ("", "prompt", "prefix", "sql")
    assert len({tuple(said) for said in expected.values()}) == 5
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda name: tokens(api, name), names))
        assert found == [expected[name] for name in names]


def test_usage_counts_the_clients_tokens_alone(api: Any) -> None:
    ids = [900 + i for i in range(24)]
    for cached in (0, 23):
        for name in ("prompt", "prefix"):
            answer = generate(api, name, ids)
            assert answer.started.prompt_token_count == 24
            assert answer.started.cached_token_count == cached


@pytest.mark.parametrize(
    ("name", "virtual"), [("prompt", 20), pytest.param("prefix", 12, marks=pytest.mark.slow)]
)
def test_virtual_tokens_count_for_the_longest_sequence(api: Any, name: str, virtual: int) -> None:
    most = TOTAL - virtual - len(IDS)
    assert len(generate(api, name, new=most).results[0].tokens.token_ids) == most
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    error = refused(invalid, lambda: generate(api, name, new=most + 1))
    assert error.details() == (
        f"request.stopping.max_new_tokens is {most + 1}; with 6 prompt tokens and {virtual}"
        f" virtual tokens of the adapter at most {most} are possible (--max-total-tokens {TOTAL})"
    )
    error = refused(invalid, lambda: generate(api, name, ids=[1] * (TOTAL - virtual)))
    assert f"{virtual} virtual tokens of the adapter leave no room for an answer" in str(error)


def test_the_model_names_their_kind_and_number(pod: ServerProcess, api: Any) -> None:
    listed = AdapterServiceStub(pod.channel()).ListAdapters(service_pb.ListAdaptersRequest())
    kinds = {each.name: (each.kind, each.virtual_token_count) for each in listed.adapters}
    assert kinds == {
        "prefix": (adapter_pb2.ADAPTER_KIND_PREFIX, 12),
        "prompt": (adapter_pb2.ADAPTER_KIND_PROMPT, 20),
        "sql": (adapter_pb2.ADAPTER_KIND_LORA, 0),
    }
    model = api.GetModel(service.GetModelRequest(), timeout=30).model
    assert (model.adapter_count, model.max_adapters) == (3, 1)


def test_they_come_and_go_while_serving(pod: ServerProcess, api: Any, expected: Any) -> None:
    admin = AdapterServiceStub(pod.channel())

    def load(path: str) -> Any:
        asked = service_pb.LoadAdapterRequest(name="new", path=path)
        return admin.LoadAdapter(asked, **TOKEN).adapter

    assert load("later").virtual_token_count == 9
    assert tokens(api, "new") == expected["later"]
    assert load("prompt").virtual_token_count == 20
    assert tokens(api, "new") == expected["prompt"]
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, load, "long")
    assert f"num_virtual_tokens is {TOTAL}; sequences of this server have {TOTAL} positions" in str(
        error
    )
    assert tokens(api, "new") == expected["prompt"]
    admin.UnloadAdapter(service_pb.UnloadAdapterRequest(name="new"), **TOKEN)
    refused(grpc.StatusCode.NOT_FOUND, tokens, api, "new")


@pytest.mark.parametrize("field", ["adapter_id", "prefix_id"])
def test_clients_of_tgis_name_them(pod: ServerProcess, api: Any, field: str) -> None:
    stub = TgisStub(pod.channel())
    for name in ("prompt", "prefix"):
        asked = tgis.SingleGenerationRequest(
            request={"text": TEXT}, params={"stopping": {"max_new_tokens": 6}}, **{field: name}
        )
        found = list(stub.GenerateStream(asked, timeout=60))
        wanted = once(api, ask(text=TEXT, adapter=name, stopping={"max_new_tokens": 6}))
        assert "".join(each.text for each in found) == wanted.results[0].text
        assert found[0].input_token_count == wanted.started.prompt_token_count


def test_routers_name_them_and_go_on_with_their_batches(pod: ServerProcess, api: Any) -> None:
    stub, names = pod.shard(), ("prompt", "prefix", None)
    asked = [
        v3.Request(
            id=number,
            inputs=TEXT,
            truncate=100,
            parameters=v3.NextTokenChooserParameters(temperature=1, repetition_penalty=1),
            stopping_parameters=v3.StoppingCriteriaParameters(max_new_tokens=NEW),
            adapter_id=name,
            add_special_tokens=True,
            prefill_logprobs=True,
        )
        for number, name in enumerate(names)
    ]
    batch = v3.Batch(id=1, requests=asked, size=3)
    reply = stub.Prefill(v3.PrefillRequest(batch=batch), timeout=60)
    said = {g.request_id: [*g.tokens.ids] for g in reply.generations}
    own = {g.request_id: [*g.prefill_tokens.ids] for g in reply.generations}
    scores = {g.request_id: [*g.prefill_tokens.logprobs] for g in reply.generations}
    assert own[0] == own[1] == own[2]
    assert {len(each) for each in scores.values()} == {len(own[0])}
    for _ in range(NEW - 1):
        reply = stub.Decode(v3.DecodeRequest(batches=[reply.batch]), timeout=60)
        for generation in reply.generations:
            said[generation.request_id] += generation.tokens.ids
    counts = {g.generated_text.generated_tokens for g in reply.generations}
    assert counts == {NEW}
    assert len({tuple(each) for each in said.values()}) == 3
    for number, name in enumerate(names):
        stopping = {"max_new_tokens": NEW, "ignore_eos": True}
        wanted = once(api, ask(text=TEXT, adapter=name or "", stopping=stopping))
        assert said[number] == [*wanted.results[0].tokens.token_ids]


def test_without_slots_there_are_adapters_of_virtual_tokens_alone(
    folder: Path, expected: Any
) -> None:
    """Of two ranks, side by side."""
    flags = ["--max-adapters", "0", "--lora-adapters"]
    names = ("", "prompt", "prefix")
    named = ",".join(f"{name}={folder / name}" for name in names[1:])
    with serve(*FLAGS, "--num-shard", "2", *flags, named, env=ENV) as pod:
        api = GenerationServiceStub(pod.channel())
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda name: tokens(api, name), names))
        assert found == [expected[name] for name in names]
        assert "adapter" in api.GetModel(service.GetModelRequest(), timeout=30).model.features
        assert pod.stop() == 0
    with serve(*FLAGS, *flags, f"sql={folder / 'sql'}", wait=False) as pod:
        assert pod.process.wait(60) == 1
        said = "adapter sql: adapter_config.json: there are no slots for LoRA (--max-adapters is 0)"
        assert said in pod.log.read_text()
