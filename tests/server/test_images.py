"""Images in chats on a running server: its tokens are those of transformers; hostile ones harm
nobody.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_rpc

from support.clients.public_api import refused, stream, violations
from support.images.calls import NEW, asked, chat, said, server_files, truth
from support.images.files import file_of, hostile, moving, picture, png
from support.images.seeing import Seeing
from support.pods.harness import ServerProcess, serve
from support.waiting import wait_for
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing("qwen2.5-vl", tmp_path_factory.mktemp("seeing") / "qwen2.5-vl")


@pytest.fixture(scope="module")
def server(seeing: Seeing) -> Iterator[ServerProcess]:
    flags = ("--model-id", str(seeing.folder), "--max-images", "3", "--max-total-tokens", "200")
    with serve(*flags, "--image-url-hosts", "localhost:80, 192.0.2.1") as running:
        yield running


@pytest.fixture(scope="module")
def stub(server: ServerProcess) -> Iterator[Any]:
    with server.channel() as channel:
        yield GenerationServiceStub(channel)


RED, WIDE = picture(20, 20, 1), picture(60, 20, 2)


def test_tokens_are_those_of_transformers(seeing: Seeing, stub: Any) -> None:
    """One image, two, and the same again beside texts, in every format."""
    texts: list[tuple[str | Image.Image, ...]] = [
        ("What is ", RED, "?"),
        (RED, "and", WIDE),
        ("no image",),
        (WIDE, WIDE, RED),
    ]
    expected = [truth(seeing, *parts) for parts in texts]
    with ThreadPoolExecutor(4) as pool:
        for kind in ("PNG", "WEBP"):
            sent = [
                [p if isinstance(p, str) else file_of(p, kind, **LOSSLESS[kind]) for p in parts]
                for parts in texts
            ]
            answers = list(pool.map(lambda parts: said(stub, *parts), sent))
            assert answers == expected


LOSSLESS: dict[str, dict[str, Any]] = {"PNG": {}, "WEBP": {"lossless": True}}


def test_tokenize_tells_what_an_image_costs(seeing: Seeing, stub: Any) -> None:
    def count(*parts: str | bytes) -> Any:
        return stub.Tokenize(service.TokenizeRequest(chat=chat(*parts), return_token_ids=True))

    with_one = count("What is ", file_of(RED), "?")
    assert with_one.token_count == len(with_one.token_ids)
    assert list(with_one.token_ids).count(seeing.token_id) == seeing.rows(RED)
    assert list(count("no image").token_ids).count(seeing.token_id) == 0


def test_the_model_says_that_it_sees(stub: Any) -> None:
    features = stub.GetModel(service.GetModelRequest()).model.features
    assert "chat.messages.content.image.data" in features
    assert "chat.messages.content.image.uri" in features


AT = "chat.messages[0].content[1].image.data"


@pytest.mark.parametrize(
    ("parts", "field", "problem"),
    [
        (["x", b""], AT, "is empty"),
        (["x", moving("GIF")], AT, "is GIF; PNG, JPEG and WebP are taken"),
        (["x", png(30_000, 30_000, b"")], AT, "30000 x 30000 pixels; this server allows 33554432"),
        (["x", file_of(RED)[:-40]], AT, "is a PNG by its header, and "),
        (["x", *[file_of(RED)] * 4], "chat.messages[0].content[4].image.data", "is image 4 of 4"),
        (["a <|image_pad|>", file_of(RED)], "chat.messages[0].content", "which stands for an"),
        (["<|image_pad|>"], "chat.messages[0].content", "has '<|image_pad|>', which stands"),
    ],
)  # fmt: skip
def test_what_cant_be_read_is_refused_by_its_place(
    stub: Any, parts: list[str | bytes], field: str, problem: str
) -> None:
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, stream, stub, asked(*parts))
    ((named, description),) = violations(error).items()
    assert named == field
    assert problem in description


def test_a_prompt_that_is_cut_within_its_images_is_refused(seeing: Seeing, stub: Any) -> None:
    parts = file_of(RED), "and a text"
    tokens = service.TokenizeRequest(chat=chat(*parts), return_token_ids=True)
    ids = [*stub.Tokenize(tokens).token_ids]
    request = asked(*parts, truncate=len(ids) - ids.index(seeing.token_id) - 2)
    found = violations(refused(grpc.StatusCode.INVALID_ARGUMENT, stream, stub, request))
    assert "tokens that stand for images" in found["truncate"]


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("http://169.254.169.254/latest/meta-data", "which is not allowed (--image-url-hosts)"),
        ("https://localhost:80/x", "names a host whose address is not public"),
        ("http://192.0.2.1/x", "names a host whose address is not public"),
    ],
)
def test_urls_lead_to_allowed_hosts_and_never_inside(stub: Any, uri: str, problem: str) -> None:
    request = asked("x")
    request.chat.messages[0].content.add().image.uri = uri
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, stream, stub, request)
    ((field, description),) = violations(error).items()
    assert field == "chat.messages[0].content[1].image.uri"
    assert problem in description


def test_hostile_images_disturb_nobody(seeing: Seeing, server: ServerProcess, stub: Any) -> None:
    before = {*server.children()}
    right, plain = truth(seeing, "what? ", RED), truth(seeing, "only text")

    codes = set[grpc.StatusCode]()

    def send(data: bytes) -> bool:
        try:
            return len(said(stub, "what? ", data)) == NEW
        except grpc.RpcError as error:
            codes.add(error.code())
            return False

    with ThreadPoolExecutor(4) as pool:
        answered = pool.map(send, hostile(60, 4))
        for _ in range(5):
            assert said(stub, "only text") == plain
            assert said(stub, "what? ", file_of(RED)) == right
        assert {*answered} == {True, False}
    assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
    assert {*server.children()} == before


def test_calls_that_are_given_up_leave_nothing(server: ServerProcess, stub: Any) -> None:
    """No file of an image stays open, and the next call is answered."""
    said(stub, "x ", file_of(RED))
    for seed in range(8):
        call = stub.Generate(asked("x ", file_of(picture(200, 200, 100 + seed))))
        time.sleep(0.004 * seed)
        call.cancel()
    server.wait_until_idle()
    assert said(stub, "x ", file_of(WIDE))
    wait_for(lambda: not [*server_files(server)])


def test_an_image_that_is_there_twice_leaves_nothing(server: ServerProcess, stub: Any) -> None:
    """The second has no file of its own: its rows are those of the first."""
    twice = file_of(picture(40, 20, 77))
    assert said(stub, twice, " and ", twice)
    wait_for(lambda: not [*server_files(server)])


def _prefill(server: ServerProcess, *requests: v3.Request) -> list[list[int]]:
    """The tokens of each request of a router's batch, to its end."""
    shard = server.shard()
    batch = v3.Batch(id=1, requests=requests, size=len(requests))
    answer = shard.Prefill(v3.PrefillRequest(batch=batch))
    said: dict[int, list[int]] = {request.id: [] for request in requests}
    while True:
        for generation in answer.generations:
            said[generation.request_id] += generation.tokens.ids
        left = [g.request_id for g in answer.generations if not g.HasField("generated_text")]
        if not left:
            return [said[request.id] for request in requests]
        kept = shard.FilterBatch(v3.FilterBatchRequest(batch_id=1, request_ids=left))
        answer = shard.Decode(v3.DecodeRequest(batches=[kept.batch]))


def routed(number: int, inputs: str, *chunks: v3.InputChunk) -> v3.Request:
    return v3.Request(
        id=number,
        inputs=inputs,
        input_chunks=v3.Input(chunks=chunks) if chunks else None,
        truncate=100,
        parameters=v3.NextTokenChooserParameters(temperature=1.0, repetition_penalty=1.0),
        stopping_parameters=v3.StoppingCriteriaParameters(
            max_new_tokens=NEW, ignore_eos_token=True
        ),
        add_special_tokens=False,
    )


def test_routers_send_images_as_chunks_and_inline(seeing: Seeing, server: ServerProcess) -> None:
    data = file_of(RED)
    inline = f"![](data:image/png;base64,{base64.b64encode(data).decode()})"
    image = v3.InputChunk(image=v3.Image(data=data, mimetype="image/jpeg;base64"))
    texts = [v3.InputChunk(text="What is "), image, v3.InputChunk(text="?")]
    answers = _prefill(
        server,
        routed(1, f"What is {inline}?", *texts),
        routed(2, f"What is {inline}?"),
        routed(3, "only text"),
        # Refused, and so ended alone: with one end-of-text token.
        routed(4, "x", v3.InputChunk(image=v3.Image(data=data[:60]))),
        routed(5, f"typed {seeing.token} {inline}"),
    )
    shown = f"What is {seeing.shown(RED)}?"
    ids = seeing.tokenizer.encode(shown, add_special_tokens=False).ids
    said = seeing.greedy(ids, [RED], NEW)
    text = seeing.tokenizer.encode("only text", add_special_tokens=False).ids
    assert answers[:3] == [said, said, seeing.greedy(text, [], NEW)]
    assert [len(answer) for answer in answers[3:]] == [1, 1]


def prepared(seeing: Seeing, *parts: str | Image.Image) -> vllm.GenerateRequest:
    """As vLLM's gateways send it: tokens, and what they have made of the images."""
    text = "".join(part if isinstance(part, str) else seeing.shown(part) for part in parts)
    ids = seeing.tokenizer.encode(text, add_special_tokens=False).ids
    images = [seeing.prepared(part) for part in parts if not isinstance(part, str)]
    rows = [seeing.rows(part) for part in parts if not isinstance(part, str)]
    runs = seeing.tokens.runs(ids, rows)
    whole = {name: np.concatenate([each[name] for each in images]) for name in images[0]}
    tensors = {
        name: vllm.TensorData(shape=x.shape, dtype=x.dtype.name, inline=x.tobytes())
        for name, x in whole.items()
    }
    return vllm.GenerateRequest(
        tokenized={"input_ids": ids},
        sampling_params={"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True},
        mm_inputs=vllm.MultimodalInputs(
            pixel_values=tensors.pop("pixel_values"),
            model_specific_tensors=tensors,
            mm_placeholders=[{"offset": run.start, "length": run.count} for run in runs],
            mm_hashes=["00" * 32] * len(runs),
            batched_keys=["image_grid_thw"],
        ),
    )


def test_gateways_send_images_as_tensors(seeing: Seeing, server: ServerProcess) -> None:
    engine = vllm_rpc.VllmEngineStub(server.channel())
    # The same hash for another image: it is no key.
    for parts in (("A: ", RED, " say"), (WIDE, "and", RED), ("A: ", WIDE, " say")):
        request = prepared(seeing, *parts)
        (answer,) = engine.Generate(request, timeout=60)
        ids = [*request.tokenized.input_ids]
        images = [part for part in parts if not isinstance(part, str)]
        assert list(answer.complete.output_ids) == seeing.greedy(ids, images, NEW)
    lying = prepared(seeing, "A: ", RED)
    lying.mm_inputs.pixel_values.shape[0] += 4
    field = "mm_inputs.pixel_values"
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, list, engine.Generate(lying, timeout=60))
    assert [*violations(error)] == [field]
    wait_for(lambda: not [*server_files(server)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("qwen2.5-vl", "--num-shard=2"),
        # Rows that see each other, on all ranks.
        ("gemma3-images", "--num-shard=2"),
        ("paligemma2", "--num-shard=2"),
        ("lfm2-vl", "--num-shard=2"),
        ("qwen2.5-vl", "--front-ends=2"),
        ("qwen2.5-vl", "--image-cache-bytes=0"),
    ],
)
def test_ranks_and_front_ends_say_the_same(kind: str, flag: str, tmp_path: Path) -> None:
    """Rank 0 alone has the tower; answers find the front end that asked; what is forgotten is
    decoded again.
    """
    seeing = Seeing(kind, tmp_path / kind)
    texts: list[tuple[str | Image.Image, ...]] = [("a ", RED), (WIDE, "and", RED), ("text",)] * 3
    truths = [truth(seeing, *parts) for parts in texts]
    with serve("--model-id", str(seeing.folder), "--max-total-tokens", "200", flag) as server:
        channels = [server.channel() for _ in texts]
        stubs = [GenerationServiceStub(channel) for channel in channels]
        sent = [[p if isinstance(p, str) else file_of(p) for p in parts] for parts in texts]
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda stub, parts: said(stub, *parts), stubs, sent)
            assert [*answers] == truths


_GPU = ("llava", "qwen2.5-vl", "qwen3-vl", "glm4v", "internvl", "gemma3-images")
_CPU = ("gemma3-images", "idefics3", "kimi-k2.5-published", "lfm2-vl", "llava-next", "mistral3")


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        *(pytest.param(kind, "cuda", marks=pytest.mark.gpu) for kind in _GPU),
        *(pytest.param(kind, "cpu", marks=pytest.mark.slow) for kind in _CPU),
    ],
)
def test_servers_of_other_models_say_what_transformers_says(
    kind: str, device: str, tmp_path: Path
) -> None:
    seeing = Seeing(kind, tmp_path / kind)
    texts: list[tuple[str | Image.Image, ...]] = [("a ", RED), (WIDE, "and", RED), ("text",)]
    flags = ("--model-id", str(seeing.folder), "--max-total-tokens", "200", "--device", device)
    with serve(*flags, "--dtype", "float32", "--max-batch-size", "8") as server:
        stub = GenerationServiceStub(server.channel())
        for parts in texts:
            sent = [p if isinstance(p, str) else file_of(p) for p in parts]
            assert said(stub, *sent) == truth(seeing, *parts)
