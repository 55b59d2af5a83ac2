"""Adapters on a running server: by name, in every protocol, beside each other and the base."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.demo import DEMO
from support.checkpoints.lora_folders import merge, write_lora
from support.clients.public_api import ask, once, refused
from support.pods.groups import ENV, FLAGS
from support.pods.harness import ServerProcess, serve
from support.steps.hand_scheduler import HandScheduler
from tokenpod.models.load import load_model
from tokenpod_client.protos.fmaas import generation_pb2 as tgis
from tokenpod_client.protos.fmaas.generation_pb2_grpc import GenerationServiceStub as TgisStub
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import adapter_service_pb2 as service_pb
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.adapter_service_pb2_grpc import AdapterServiceStub
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

IDS = [5, 17, 301, 44, 90, 7]
NEW = 8
UP = "model.layers.0.mlp.up_proj"
PARTS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    modules = {f"model.layers.{i}.{part}": 4 for i in range(2) for part in PARTS}
    tables = "model.embed_tokens", "lm_head"
    kinds: dict[str, dict[str, Any]] = {
        "sql": {"modules": modules, "use_dora": True},
        "chat": {"modules": modules | dict.fromkeys(tables, 4), "embedding": tables[0]},
        "law": {"modules": modules, "whole": tables},
    }
    return {
        name: write_lora(folder / name, DEMO, **kind, seed=at)
        for at, (name, kind) in enumerate(kinds.items())
    }


@pytest.fixture(scope="module")
def merged(adapters: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base with each adapter; "": without one."""
    folder = tmp_path_factory.mktemp("merged")
    return {"": DEMO} | {name: merge(DEMO, own, folder / name) for name, own in adapters.items()}


@pytest.fixture(scope="module")
def expected(merged: dict[str, Path]) -> dict[str, Any]:
    """What each adapter, merged into the base, says."""
    return {name: greedy(folder)[0] for name, folder in merged.items()}


def greedy(folder: Path) -> tuple[list[int], torch.Tensor]:
    """What follows the prompt, and the scores of its tokens from the second one on."""
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
    prompt = scores[range(len(IDS) - 1), IDS[1:]]
    for _ in range(NEW):
        row.tokens.append(int(scores[-1].argmax()))
        (scores,) = scheduler.step([(row, 1)])
    return row.tokens[len(IDS) :], prompt


def named(adapters: dict[str, Any]) -> str:
    return ",".join(f"{name}={lora.folder}" for name, lora in adapters.items())


def changing(folder: Path) -> list[str]:
    """Flags of a server whose adapters below `folder` can come and go."""
    (folder / "tokens").write_text("secret\n")
    flags = ["--max-adapters", "2", "--max-adapter-heads", "1", "--max-loaded-adapters", "4"]
    flags += ["--lora-vocabulary"]
    return [*flags, "--adapter-folder", str(folder), "--adapter-token-file", f"{folder}/tokens"]


@pytest.fixture(scope="module")
def pod(adapters: dict[str, Any]) -> Iterator[ServerProcess]:
    """Two slots for three adapters, whose names TGI's variable has."""
    env, folder = {**ENV, "LORA_ADAPTERS": named(adapters)}, adapters["sql"].folder.parent
    with serve(*FLAGS, "--max-adapter-rank", "8", *changing(folder), env=env) as running:
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


def test_scores_of_prompts_are_those_of_the_adapters_head(
    api: Any, merged: dict[str, Path]
) -> None:
    _, plain = greedy(DEMO)
    for name in ("chat", "law"):
        asked = request(name, output={"return_prompt_logprobs": True})
        started = next(iter(api.Generate(asked, timeout=60))).started
        _, wanted = greedy(merged[name])
        # Merged weights are rounded to the base's 16 bits.
        found = torch.tensor(started.prompt_tokens.logprobs)
        assert (found - wanted).abs().max() < 0.05
        assert (plain - wanted).abs().median() > 1


def cached(api: Any, adapter: str, ids: list[int] = IDS) -> int:
    """Tokens of a prompt that are cached for an adapter."""
    asked = request(adapter)
    asked.token_ids.CopyFrom(pb.TokenIds(ids=ids))
    return int(once(api, asked).started.cached_token_count)


def test_prefixes_are_shared_with_the_same_adapter_alone(api: Any) -> None:
    ids, names = [900 + i for i in range(24)], ("sql", "chat", "", "sql", "")
    assert [cached(api, name, ids) for name in names] == [0, 0, 0, 23, 23]


def test_an_unknown_adapter_is_not_found_and_the_answer_names_those_there_are(api: Any) -> None:
    error = refused(grpc.StatusCode.NOT_FOUND, list, api.Generate(ask(adapter="lax"), timeout=30))
    text = "there is no adapter 'lax'; this server has 'chat', 'law', 'sql'"
    assert error.details() == text


def test_the_model_says_how_many_adapters_there_are(api: Any) -> None:
    model = api.GetModel(service.GetModelRequest(), timeout=30).model
    assert "adapter" in model.features
    assert (model.adapter_count, model.max_adapters, model.max_adapter_rank) == (3, 2, 8)
    assert model.lora_vocabulary


def test_all_who_may_generate_list_adapters(pod: ServerProcess, adapters: dict[str, Any]) -> None:
    listed = all_adapters(pod)
    assert [each.name for each in listed] == sorted(adapters)
    assert {each.lora_rank for each in listed} == {4}
    assert len({each.digest for each in listed}) == 3


def all_adapters(pod: ServerProcess) -> list[Any]:
    asked = service_pb.ListAdaptersRequest()
    return [*AdapterServiceStub(pod.channel()).ListAdapters(asked, timeout=30).adapters]


def test_the_command_line_shows_them(pod: ServerProcess) -> None:
    command = [sys.executable, "-P", "-m", "tokenpod", "info", "--address", pod.address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "adapters chat (rank 4), law (rank 4), sql (rank 4)" in lines, shown


def test_without_adapters_the_field_is_no_feature(server: ServerProcess) -> None:
    base = GenerationServiceStub(server.channel())
    model = base.GetModel(service.GetModelRequest(), timeout=30).model
    assert "adapter" not in model.features
    assert (model.adapter_count, model.max_adapters) == (0, 0)
    error = refused(grpc.StatusCode.NOT_FOUND, list, base.Generate(ask(adapter="x"), timeout=30))
    assert error.details() == "there is no adapter 'x'; this server has none"


# -- coming and going --------------------------------------------------------------------------

TOKEN = {"metadata": (("authorization", "Bearer secret"),), "timeout": 60}


@pytest.fixture(scope="module")
def admin(pod: ServerProcess) -> Any:
    return AdapterServiceStub(pod.channel())


def load(admin: Any, name: str, path: str, digest: str = "") -> Any:
    asked = service_pb.LoadAdapterRequest(name=name, path=path, digest=digest)
    return admin.LoadAdapter(asked, **TOKEN).adapter


def unload(admin: Any, name: str) -> None:
    admin.UnloadAdapter(service_pb.UnloadAdapterRequest(name=name), **TOKEN)


def test_an_adapter_comes_is_replaced_and_goes(
    pod: ServerProcess, admin: Any, api: Any, expected: dict[str, Any]
) -> None:
    first = load(admin, "new", "sql")
    assert (first.name, first.lora_rank) == ("new", 4)
    assert tokens(api, "new") == expected["sql"]
    # Keys and values are those of the digest: another name of the files finds them, and the same
    # name of other files does not.
    assert cached(api, "new") == cached(api, "sql") > 0
    second = load(admin, "new", "law", digest=digest_of(pod, "law"))
    assert second.digest != first.digest
    assert tokens(api, "new") == expected["law"]
    unload(admin, "new")
    error = refused(grpc.StatusCode.NOT_FOUND, tokens, api, "new")
    assert "'chat', 'law', 'sql'" in str(error.details())
    error = refused(grpc.StatusCode.NOT_FOUND, unload, admin, "new")
    assert "there is no adapter 'new'" in str(error.details())
    assert tokens(api, "law") == expected["law"]


def digest_of(pod: ServerProcess, name: str) -> str:
    return next(each.digest for each in all_adapters(pod) if each.name == name)


def test_what_runs_keeps_its_version_and_unloading_waits_for_it(admin: Any, api: Any) -> None:
    load(admin, "long", "sql")
    asked = request("long")
    asked.stopping.max_new_tokens = 100

    def ids(events: Any) -> list[int]:
        return [i for e in events if e.WhichOneof("event") == "tokens" for i in e.tokens.token_ids]

    alone = ids(api.Generate(asked, timeout=120))
    stream = api.Generate(asked, timeout=120)
    assert next(stream).WhichOneof("event") == "started"
    load(admin, "long", "law")
    with ThreadPoolExecutor(1) as pool:
        unloading = pool.submit(unload, admin, "long")
        assert ids(stream) == alone
        unloading.result(60)
    assert len(alone) == 100


BAD_LOADS = {
    "no such folder": ({"path": "nowhere"}, "path is 'nowhere': below --adapter-folder there is"),
    "outside": ({"path": f"../../../../../..{DEMO}"}, "below --adapter-folder there is no adapter"),
    "the folder itself": ({"path": "."}, "below --adapter-folder there is no adapter"),
    "no path": ({}, "path is empty"),
    "no name": ({"name": "", "path": "law"}, "name is not 1 to 256"),
    "a list": ({"name": "a,b", "path": "law"}, "name is not 1 to 256"),
    "a digest of another kind": ({"path": "law", "digest": "md5:1"}, "digest is not `sha256:`"),
    "another digest": ({"path": "law", "digest": f"sha256:{'0' * 64}"}, "was asked for"),
    "another base's": ({"path": "narrow"}, "up_proj has lora_A [4, 128] and lora_B [768, 4]"),
    "a rank too large": ({"path": "wide"}, "has rank 9; at most 8 is served (--max-adapter-rank)"),
}


@pytest.mark.parametrize("case", BAD_LOADS)
def test_a_load_that_fails_leaves_the_version_that_serves(
    case: str, admin: Any, api: Any, adapters: dict[str, Any], expected: dict[str, Any]
) -> None:
    fields, said = BAD_LOADS[case]
    if fields.get("path") == "wide":
        folder = adapters["sql"].folder.parent / "wide"
        write_lora(folder, DEMO, {UP: 9}, r=9)
    if fields.get("path") == "narrow":
        lora = write_lora(folder := adapters["sql"].folder.parent / "narrow", DEMO, {UP: 4})
        path = lora.folder / "adapter_model.safetensors"
        narrow = {key: t[:, :128].contiguous() for key, t in load_file(path).items()}
        save_file(narrow, folder / path.name)
    asked = service_pb.LoadAdapterRequest(**{"name": "sql"} | fields)
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: admin.LoadAdapter(asked, **TOKEN))
    assert said in str(error.details())
    assert tokens(api, "sql") == expected["sql"]


def test_more_adapters_than_the_host_may_keep_are_refused(admin: Any) -> None:
    load(admin, "four", "sql")
    error = refused(grpc.StatusCode.RESOURCE_EXHAUSTED, load, admin, "five", "sql")
    assert error.details() == ("4 adapters are loaded; at most 4 are kept (--max-loaded-adapters)")
    unload(admin, "four")


def test_adapters_are_listed_in_pages(admin: Any, adapters: dict[str, Any]) -> None:
    def page(**fields: Any) -> Any:
        return admin.ListAdapters(service_pb.ListAdaptersRequest(**fields), timeout=30)

    first = page(page_size=2)
    rest = page(page_size=2, page_token=first.next_page_token)
    assert [each.name for each in [*first.adapters, *rest.adapters]] == sorted(adapters)
    assert rest.next_page_token == ""
    refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: page(page_token="?"))
    refused(grpc.StatusCode.INVALID_ARGUMENT, lambda: page(page_size=1001))


@pytest.mark.parametrize("place", ["port", "unix socket"])
def test_changes_need_a_token_of_their_own_everywhere(pod: ServerProcess, place: str) -> None:
    channel = pod.channel(None if place == "port" else f"unix:{pod.uds}")
    stub, asked = AdapterServiceStub(channel), service_pb.UnloadAdapterRequest(name="none")
    refused(grpc.StatusCode.UNAUTHENTICATED, lambda: stub.UnloadAdapter(asked, timeout=30))
    wrong = (("authorization", "Bearer another"),)
    refused(
        grpc.StatusCode.UNAUTHENTICATED,
        lambda: stub.UnloadAdapter(asked, metadata=wrong, timeout=30),
    )
    refused(grpc.StatusCode.NOT_FOUND, lambda: stub.UnloadAdapter(asked, **TOKEN))


def test_they_are_off_unless_switched_on(server: ServerProcess) -> None:
    stub = AdapterServiceStub(server.channel())
    error = refused(
        grpc.StatusCode.FAILED_PRECONDITION,
        lambda: stub.LoadAdapter(service_pb.LoadAdapterRequest(name="a", path="b"), timeout=30),
    )
    assert "--adapter-token-file switches that on" in str(error.details())


# -- other protocols, ranks, start -------------------------------------------------------------


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
    stub = pod.shard()

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
    """Those of the start, and one that comes later; a load that fails changes nothing.

    There are two slots: under load three adapters leave them for each other, and one that is
    loaded anew meanwhile is another yet. Drafts are checked with each adapter's own head.
    """
    given = {name: lora for name, lora in adapters.items() if name != "law"}
    flags = ("--num-shard", "2", "--speculate", "2", "--lora-adapters", named(given))
    folder = adapters["sql"].folder.parent
    with serve(*FLAGS, *flags, *changing(folder), env=ENV) as pod:
        stub, admin = GenerationServiceStub(pod.channel()), AdapterServiceStub(pod.channel())
        load(admin, "law", "law")
        broken = folder / "broken"
        write_lora(broken, DEMO, {"model.layers.0.mlp.up_proj": 4}, lora_bias=True)
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda name: tokens(stub, name), [*expected] * 2)
            error = refused(grpc.StatusCode.INVALID_ARGUMENT, load, admin, "sql", "broken")
            load(admin, "law", "law")
            assert list(found) == [*expected.values()] * 2
        assert "lora_bias is True, which is not supported" in str(error.details())
        assert pod.stop() == 0


def test_one_that_is_fused_is_every_requests(
    adapters: dict[str, Any], expected: dict[str, Any]
) -> None:
    """On two ranks; naming it is as good as naming none."""
    folder = adapters["sql"].folder.parent
    flags = ("--num-shard", "2", "--lora-fuse", "--lora-adapters", named({"sql": adapters["sql"]}))
    with serve(*FLAGS, *flags, *changing(folder), env=ENV) as pod:
        stub, admin = GenerationServiceStub(pod.channel()), AdapterServiceStub(pod.channel())
        assert tokens(stub, "") == tokens(stub, "sql") == expected["sql"]
        refused(grpc.StatusCode.NOT_FOUND, tokens, stub, "law")
        assert [(each.name, each.lora_rank) for each in all_adapters(pod)] == [("sql", 4)]
        for change in (partial(load, admin, "law", "law"), partial(unload, admin, "sql")):
            error = refused(grpc.StatusCode.FAILED_PRECONDITION, change)
            assert "an adapter is fused into the model: none comes or goes" in str(error.details())
        assert tokens(stub, "sql") == expected["sql"]
        assert pod.stop() == 0


BROKEN = {
    "two to fuse": ("a=/a,b=/b --lora-fuse", "--lora-adapters must name one adapter, and names 2"),
    "no folder": ("x=/no/such/folder", "--lora-adapters names x: there is no folder"),
    "no adapter": (f"x={DEMO}", "has no adapter_config.json"),
    "twice": ("x=/a,x=/b", "--lora-adapters is x=/a,x=/b: x is named twice"),
    "no name": ("=/a", "'=/a' is not NAME=PATH"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_adapter_ends_the_start_with_one_line(case: str) -> None:
    flag, said = BROKEN[case]
    with serve("--lora-adapters", *flag.split(" "), wait=False) as pod:
        assert pod.process.wait(60) in (1, 2)
        assert said in pod.log.read_text()


def test_an_adapter_of_another_base_ends_the_start(adapters: dict[str, Any]) -> None:
    flags = ("--lora-adapters", named({"sql": adapters["sql"]}), "--max-adapter-rank", "2")
    with serve(*FLAGS, *flags, wait=False) as pod:
        assert pod.process.wait(60) == 1
        text = pod.log.read_text()
        assert "adapter sql: adapter_model.safetensors: model.layers.0." in text
        assert "has rank 4; at most 2 is served (--max-adapter-rank)" in text
