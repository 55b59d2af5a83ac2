"""Images through a whole engine: greedy tokens are those of transformers."""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from PIL import Image
from safetensors.torch import load_file, save_file

from support.checkpoints.golden import golden_config
from support.engines.engine_link import Client
from support.engines.planner_probe import preempt_sequence
from support.engines.small_engines import Engine
from support.images.files import picture
from support.images.seeing import PUBLISHED, Seeing
from support.kernels.live_tensors import LiveTensors
from tokenpod.core.images import (
    SIGHTS,
    DropImages,
    EncodeImages,
    PreparedImage,
    RowCount,
    TensorPlace,
)
from tokenpod.core.outputs import FailureCode
from tokenpod.core.requests import ImageRows, ImageRun, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.images.captured_layers import CapturedLayers
from tokenpod.engine.images.image_encoder import ImageEncoder
from tokenpod.engine.loop import EngineLoop
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.footprint import footprint_of
from tokenpod.models.towers.tower import (
    _layers,
    _of_grid,
    largest_image,
    load_tower,
    tower_size,
)
from tokenpod.scheduler.scheduler import Scheduler

#: Their towers or texts differ, and what comes before and behind does not.
RARER = (
    *("llava", "qwen2-vl", "qwen2.5-vl", "qwen3-vl-moe", "qwen3.5", "qwen3.5-moe"),
    *("glm4v", "glm4.6v", "glm4v-moe", "aya-vision", "idefics3", "internvl", "llava-next"),
    *("llava-onevision", "mistral3", "smolvlm", "gemma4-images", "cohere2-vision"),
    *("kimi-k2.5", "kimi-k2.5-published", "lfm2-vl", "lighton-ocr", "paligemma2"),
)
KINDS = [
    "qwen3-vl",
    "gemma3-images",
    "paligemma",
    *(pytest.param(x, marks=pytest.mark.slow) for x in RARER),
]
NEW_TOKENS = 10
CPU = torch.device("cpu")


class Eyes:
    """An engine with a tower, and whoever asks it."""

    def __init__(self, seeing: Seeing, cache_bytes: int = 1 << 20) -> None:
        self.seeing = seeing
        # Gemma 4 makes 70 tokens of an image at least, which see each other.
        more = {"prefill": 80} if seeing.sight.rows is RowCount.SAID or seeing.sees_prompts else {}
        self.engine = Engine(seeing.folder, **more)
        tower = load_tower(seeing.folder, dtype=torch.float32, device=CPU)
        self.client = Client()
        self.calls = 0

        def counted(tensors, between):
            self.calls += 1
            return tower(tensors, between)

        counted.width, counted.dtype, counted.tower = tower.width, tower.dtype, tower
        self.encoder = ImageEncoder(
            *(counted, CPU, cache_bytes, self.client.send),
            mutual=self.engine.limits.mutual > 0,
        )
        self.scheduler = Scheduler(self.engine.limits)
        self.loop = EngineLoop(
            self.client, self.scheduler, self.engine.executor, images=self.encoder
        )
        self.ids = iter(range(1 << 20))

    def image(self, image: Image.Image, *, sent: bool = True) -> PreparedImage:
        """As a front end sends it."""
        tensors = self.seeing.prepared(image)
        key = hashlib.sha256(image.tobytes() + repr(image.size).encode()).digest()
        rows = self.seeing.rows(image)
        if not sent:
            return PreparedImage(key, rows, self.grid(image))
        descriptor, places, at = os.memfd_create("test"), [], 0
        for name, tensor in tensors.items():
            places.append(TensorPlace(name, tensor.dtype.name, [*tensor.shape], at))
            at += os.pwrite(descriptor, tensor.tobytes(), at)
        return PreparedImage(key, rows, self.grid(image), descriptor, tuple(places))

    def grid(self, image: Image.Image) -> tuple[int, ...]:
        if not self.seeing.sight.axes:
            return ()
        return tuple((self.seeing.prepared(image)["image_grid_thw"][0, 1:] // 2).tolist())

    def encode(self, *images: PreparedImage) -> int:
        """The op, once it has been answered."""
        op = next(self.ids)
        self.client.inbox.append(EncodeImages(op, os.getpid(), [*images]))
        while op not in self.client.encoded:
            self.loop.turn()
        for image in images:
            if image.descriptor >= 0:
                os.close(image.descriptor)
        return op

    def prompt(self, *parts: str | Image.Image) -> tuple[list[int], list[ImageRun]]:
        """Tokens, and where the images are."""
        texts = [part if isinstance(part, str) else self.seeing.shown(part) for part in parts]
        ids = self.seeing.tokenizer.encode("".join(texts), add_special_tokens=False).ids
        rows = [self.seeing.rows(part) for part in parts if not isinstance(part, str)]
        return ids, self.seeing.tokens.runs(ids, rows)

    def request(self, *parts: str | Image.Image) -> Request:
        """A request whose images have been computed."""
        ids, runs = self.prompt(*parts)
        images = [part for part in parts if not isinstance(part, str)]
        found = None
        if images:
            found = ImageRows(self.encode(*map(self.image, images)), runs)
        return Request(
            [next(self.ids)],
            ids,
            SamplingParams(),
            StoppingParams(max_new_tokens=NEW_TOKENS),
            images=found,
        )

    def answer(self, *requests: Request, preempt: float = 0.0) -> list[list[int]]:
        """The tokens of each."""
        chance, self.preempted = random.Random(5), 0
        self.client.inbox += requests
        ids = [request.sequence_ids[0] for request in requests]
        self.client.left |= {*ids}
        while self.client.left:
            self.loop.turn()
            for sequence in sorted(self.client.left):
                if chance.random() < preempt:
                    self.preempted += preempt_sequence(self.scheduler, sequence)
        return [self.client.tokens[i] for i in ids]

    def truth(self, *parts: str | Image.Image) -> list[int]:
        """The same by transformers."""
        images = [part for part in parts if not isinstance(part, str)]
        return self.seeing.greedy(self.prompt(*parts)[0], images, NEW_TOKENS)


@pytest.fixture(scope="module", params=KINDS)
def eyes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eyes:
    return Eyes(Seeing(request.param, tmp_path_factory.mktemp("seeing") / request.param))


RED, WIDE = picture(20, 20, 1), picture(60, 20, 2)
#: Longer than a step's prompt tokens, with an image across its pieces.
LONG = ("def f(x):\n    return x\n" * 2, RED, " and ", WIDE, "what?")


def test_tokens_are_those_of_transformers(eyes: Eyes) -> None:
    """Two images, one in the middle of pieces of a prompt, and a text beside them."""
    texts = [("A: ", RED, " say"), LONG, ("only text here",), (WIDE, RED, "x")]
    if not eyes.seeing.sees_prompts:
        assert len(eyes.prompt(*LONG)[0]) > eyes.engine.options.max_batch_prefill_tokens
    assert eyes.answer(*(eyes.request(*parts) for parts in texts)) == [
        eyes.truth(*parts) for parts in texts
    ]


def test_what_an_image_shows_decides_the_tokens(eyes: Eyes) -> None:
    said = {
        tuple(eyes.answer(eyes.request("A: ", picture(20, 20, seed), " say"))[0])
        for seed in range(6)
    }
    assert len(said) > 1


def test_two_images_behind_the_same_tokens_share_no_prefix(eyes: Eyes) -> None:
    begin = "x = 1\n" * 4
    one, other = (begin, picture(20, 20, 31), " say"), (begin, picture(20, 20, 32), " say")
    assert eyes.prompt(*one)[0] == eyes.prompt(*other)[0]
    first, second, third = (eyes.request(*parts) for parts in (one, other, one))
    assert eyes.answer(first, second) == [eyes.truth(*one), eyes.truth(*other)]
    # The same again is found in the cache, beyond the image; it is computed no second time.
    assert eyes.answer(third) == [eyes.truth(*one)]
    cached = eyes.client.cached
    before = len(eyes.prompt(begin)[0])
    if not eyes.engine.model.config.state_layouts:  # else a prefix ends where states were kept
        assert cached[third.sequence_ids[0]] > before + eyes.seeing.rows(one[1])
    assert cached.get(second.sequence_ids[0], 0) <= before


def test_a_preempted_prompt_has_its_images_again(eyes: Eyes) -> None:
    requests = [eyes.request(*LONG), eyes.request("B: ", WIDE, "y")]
    assert eyes.answer(*requests, preempt=0.3) == [eyes.truth(*LONG), eyes.truth("B: ", WIDE, "y")]
    assert eyes.preempted > 3


def test_rows_are_computed_once_and_kept_for_a_while(tmp_path: Path) -> None:
    width = 64
    eyes = Eyes(Seeing("llava", tmp_path / "llava"), cache_bytes=2 * 4 * 4 * width)
    one, other, third = (picture(20, 20, seed) for seed in (1, 2, 3))
    eyes.encode(eyes.image(one), eyes.image(other), eyes.image(one))
    assert eyes.calls == 2
    op = eyes.encode(eyes.image(one, sent=False))
    assert eyes.client.encoded[op].missing == ()
    # Two fit: the one that was used longest ago goes.
    eyes.encode(eyes.image(third))
    assert (eyes.calls, len(eyes.encoder._cache)) == (3, 2)
    for op in [*eyes.encoder._ops]:
        eyes.encoder.drop(DropImages(op))
    op = eyes.encode(eyes.image(one, sent=False), eyes.image(other, sent=False))
    assert eyes.client.encoded[op].missing == (eyes.image(other, sent=False).key,)
    assert op not in eyes.encoder._ops


@pytest.mark.parametrize("sent", [(True, False), (False, True)])
def test_one_file_is_enough_for_an_image_that_is_there_twice(
    eyes: Eyes, sent: tuple[bool, bool]
) -> None:
    image = picture(20, 20, 700 + sent[0])
    before = eyes.calls
    op = eyes.encode(*(eyes.image(image, sent=each) for each in sent))
    assert eyes.client.encoded[op].missing == ()
    assert eyes.calls == before + 1
    eyes.encoder.drop(DropImages(op))


def test_a_tower_cuts_attention_where_it_is_told(eyes: Eyes, monkeypatch: Any) -> None:
    """On a GPU it would otherwise ask the device for it in each layer."""
    seeing = eyes.seeing
    tower = load_tower(seeing.folder, dtype=torch.float32, device=CPU)
    image = {name: torch.from_numpy(x) for name, x in seeing.prepared(WIDE).items()}
    told = _of_grid(tower._model, image)
    assert bool(told) == ("qwen" in seeing.folder.name or "kimi" in seeing.folder.name)
    if not told:
        return
    right, end = tower(image), int(told["cu_seqlens"][-1])
    monkeypatch.setattr(
        "tokenpod.models.towers.tower._of_grid",
        lambda *_: told | {"cu_seqlens": torch.tensor([0, 4, end], dtype=torch.int32)},
    )
    other = load_tower(seeing.folder, dtype=torch.float32, device=CPU)
    assert not torch.allclose(other(image), right)


def test_what_follows_from_a_grid_is_kept_for_that_grid_alone(eyes: Eyes) -> None:
    """Images of other grids come between, one of them of as many patches."""
    tower = eyes.encoder._tower.tower
    images = [
        {name: torch.from_numpy(x) for name, x in eyes.seeing.prepared(picture(*size, at)).items()}
        for at, size in enumerate([(60, 20), (20, 60), (20, 20), (20, 60), (60, 20)], 990)
    ]
    expected = []
    for image in images:
        tower._grids.clear()
        expected.append(tower(image))
    tower._grids.clear()
    assert all(torch.equal(tower(x), y) for x, y in zip(images, expected, strict=True))
    grids = {tuple(x["image_grid_thw"].flatten().tolist()) for x in images if "image_grid_thw" in x}
    assert tower._grids.keys() == grids


def test_captured_layers_make_the_same_rows(eyes: Eyes) -> None:
    """Of images of two shapes by turns, whose layers are captured when they come again."""
    tower = eyes.encoder._tower.tower
    shapes = [(20, 20), (60, 20)]
    images = [picture(*shapes[turn % 2], 970 + turn) for turn in range(8)]
    tensors = [
        {name: torch.from_numpy(x) for name, x in eyes.seeing.prepared(image).items()}
        for image in images
    ]
    expected = [tower(each) for each in tensors]
    tower.calls = calls = CapturedLayers(CPU)
    try:
        found = [tower(each) for each in tensors]
    finally:
        tower.calls = None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert calls.shapes
    assert all(len(shape.layers) == len(_layers(tower._model)) for shape in calls.shapes)
    # A layer reads what the one before has left where that is.
    for shape in calls.shapes:
        _, *behind = shape.layers.values()
        assert all(any(hasattr(read, "address") for read in layer.reads) for layer in behind)


def test_what_an_image_leaves_uncaptured_is_called_as_it_is() -> None:
    """One fails between layers; a layer's second result must not take its first one's place."""
    calls, layers = CapturedLayers(CPU), [torch.nn.Linear(4, 4) for _ in range(3)]

    def image(x: torch.Tensor, last: int) -> list[torch.Tensor]:
        calls.begin()
        found = [x]
        for at in (*range(last), 0):
            found.append(calls.call(at, layers[at], (found[-1],), {}))
        return found

    with torch.inference_mode():
        for turn, last in enumerate((3, 2, 3, 3)):
            found = image(torch.full((2, 4), float(turn)), last)
            for at, (before, behind) in zip((*range(last), 0), pairwise(found), strict=True):
                assert torch.equal(behind, layers[at](before))
    assert [*calls.shapes[0].layers] == [0, 1]


def test_a_tower_that_fails_fails_who_asked(eyes: Eyes) -> None:
    wrong = eyes.image(RED)
    wrong = structs.replace(wrong, key=b"another" * 5, rows=wrong.rows + 1)
    op = eyes.encode(wrong)
    assert eyes.client.encoded[op].failure is FailureCode.INTERNAL
    assert not eyes.encoder.busy
    assert eyes.answer(eyes.request("A: ", RED)) == [eyes.truth("A: ", RED)]


def test_streams_have_steps_between_the_layers_of_an_image(eyes: Eyes) -> None:
    """A bound of gaps that nothing keeps: the tower computes a layer at a time, and every turn has
    a step of the stream.
    """
    text, image = "only text here", picture(60, 20, 950)
    stream = eyes.request(text)
    limits = replace(eyes.engine.limits, max_gap=1)
    eyes.loop = EngineLoop(
        eyes.client, Scheduler(limits), eyes.engine.executor, images=eyes.encoder
    )
    sequence = stream.sequence_ids[0]
    longer = structs.replace(stream.stopping, max_new_tokens=200 - len(stream.prompt))
    eyes.client.inbox.append(structs.replace(stream, stopping=longer))
    eyes.client.left.add(sequence)
    while not eyes.client.tokens[sequence]:
        eyes.loop.turn()
    steps = []
    compute = eyes.encoder._turns.grant
    eyes.encoder._turns.grant = lambda most: (
        steps.append(len(eyes.client.tokens[sequence])),
        compute(most),
    )
    try:
        requests = [eyes.request("A: ", image, " say")]
        assert eyes.client.left == {sequence}, "the stream ended before the image did"
        assert eyes.answer(*requests) == [eyes.truth("A: ", image, " say")]
    finally:
        eyes.encoder._turns.grant = compute
    layers = len(_layers(eyes.encoder._tower.tower._model))
    assert len(steps) == layers + 1
    assert len({*steps}) == len(steps), "two parts without a step between them"
    assert eyes.client.tokens[sequence][:NEW_TOKENS] == eyes.truth(text)


def test_what_nobody_wants_any_more_is_not_computed(eyes: Eyes) -> None:
    """The thread ends what it has, and begins nothing else of it."""
    images = [eyes.image(picture(24, 24, 900 + seed)) for seed in range(8)]
    before = eyes.calls
    eyes.client.inbox += [EncodeImages(70_000, os.getpid(), images), DropImages(70_000)]
    eyes.loop.turn()
    while eyes.encoder.busy:
        eyes.loop.turn()
    assert eyes.calls - before <= 2
    assert eyes.client.encoded[70_000].failure is FailureCode.UNAVAILABLE


def test_every_architecture_is_tried() -> None:
    tried = {
        golden_config(kind)["architectures"][0]
        for kind in ("qwen3-vl", "gemma3-images", "paligemma", *RARER)
        if not kind.endswith(PUBLISHED)
    }
    assert tried == {*SIGHTS} - {"KimiK25ForConditionalGeneration"}


def test_the_tower_of_a_quantised_checkpoint_is_read_as_it_is(tmp_path: Path) -> None:
    """Of the text model alone it says how it is held; a tower that is quantised is refused."""
    seeing = Seeing("llava", tmp_path / "llava")
    plain = load_tower(seeing.folder, dtype=torch.float32, device=CPU)
    config = seeing.config | {"quantization_config": {"quant_method": "fp8"}}
    (seeing.folder / "config.json").write_text(json.dumps(config))
    tower = load_tower(seeing.folder, dtype=torch.float32, device=CPU)
    image = {"pixel_values": torch.from_numpy(seeing.prepared(RED)["pixel_values"])}
    assert torch.equal(tower(image), plain(image))
    tensors = load_file(seeing.folder / "model.safetensors")
    name = next(x for x in tensors if "vision_tower" in x and x.endswith("q_proj.weight"))
    tensors[f"{name}_scale_inv"] = torch.ones(1)
    save_file(tensors, seeing.folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"_scale_inv is none of those .* --max-images 0"):
        load_tower(seeing.folder, dtype=torch.float32, device=CPU)


def _of_text(seeing: Seeing) -> int:
    """Numbers of a text model and its head."""
    text, head = seeing.model.model.language_model, seeing.model.lm_head
    tied = head.weight is text.embed_tokens.weight
    return sum(p.numel() for p in text.parameters()) + (0 if tied else head.weight.numel())


LARGEST = ["llava", "qwen3-vl", "gemma3-images"]


@pytest.mark.parametrize(
    "kind", [*LARGEST, *(pytest.param(x, marks=pytest.mark.slow) for x in RARER if x != "llava")]
)
def test_the_largest_image_is_one_that_the_tower_takes(kind: str, tmp_path: Path) -> None:
    """A GPU is given it first, so that later ones need no more memory."""
    seeing = Seeing(kind, tmp_path / kind)
    tower = load_tower(seeing.folder, dtype=torch.float32, device=CPU)
    with LiveTensors() as live:
        rows = len(tower(largest_image(seeing.folder, 64)))
    size = tower_size(seeing.folder, 64)
    assert size.weights * 4 == tower.weight_bytes
    assert live.most_bytes <= size.working * 4
    found = footprint_of(seeing.folder)
    assert found.tower_numbers == size.weights
    if kind in LARGEST:
        assert found.parameters == _of_text(seeing)
    assert rows >= seeing.rows(picture(400, 400)) // 2
    if kind == "qwen3-vl":
        assert len(tower(largest_image(seeing.folder, 2))) == 1


@pytest.fixture(
    scope="module", params=["paligemma", pytest.param("paligemma2", marks=pytest.mark.slow)]
)
def prefixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eyes:
    """Of a model whose prompts see themselves."""
    return Eyes(Seeing(request.param, tmp_path_factory.mktemp("prefixed") / request.param))


def test_a_prompt_that_sees_itself_is_known_again_as_a_whole_alone(prefixed: Eyes) -> None:
    """Keys of what comes first depend on what follows."""
    image = picture(20, 20, 960)
    one, other = (image, "describe this now"), (image, "describe this")
    plain = ("only text", " and more")
    requests = [prefixed.request(*parts) for parts in (one, other, plain)]
    assert prefixed.answer(*requests) == [prefixed.truth(*parts) for parts in (one, other, plain)]
    assert not any(prefixed.client.cached[each.sequence_ids[0]] for each in requests)
    again = [prefixed.request(*parts) for parts in (one, other, plain)]
    assert prefixed.answer(*again) == [prefixed.truth(*parts) for parts in (one, other, plain)]
    for request in again:
        assert prefixed.client.cached[request.sequence_ids[0]] == len(request.prompt) - 1
    tree = prefixed.scheduler.kv.tree
    assert len(tree._roots) == len(tree._salts) + ("" in tree._roots)
    prefixed.scheduler.flush_cache()
    assert not tree._salts, "roots outlive what was below them"


def test_a_prompt_that_sees_itself_is_refused_if_a_step_is_too_short(prefixed: Eyes) -> None:
    """The whole of it is in one step, and within a window."""
    longest = min(prefixed.engine.limits.prefill_tokens, prefixed.engine.limits.mutual)
    fits, long = ("x " * (longest // 2))[:longest], "x " * longest
    request = prefixed.request(long)
    prefixed.client.inbox.append(request)
    prefixed.client.left.add(request.sequence_ids[0])
    while prefixed.client.left:
        prefixed.loop.turn()
    why = prefixed.client.failures[request.sequence_ids[0]]
    count = len(request.prompt)
    assert (
        why.startswith(f"a prompt has {count} tokens; a step reads {longest}, ")
        or why == f"{count} tokens of a prompt see each other; those of this model: {longest}"
    )
    assert prefixed.answer(prefixed.request(fits)) == [prefixed.truth(fits)]
