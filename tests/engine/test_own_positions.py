"""Positions of three axes: an engine says what transformers says of vectors that bring theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from support.checkpoints.golden import Golden
from support.engines.engine_link import Client
from support.engines.small_engines import Engine, load
from support.pods.harness import free_port
from support.steps import ranks
from support.steps.ranks import Job
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import GivenVectors, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.assemble import assemble
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layers.rope import rope_of
from tokenpod.scheduler.scheduler import Limits, Scheduler

#: Rotation in sections, by turns, and of pairs that are neighbours in half of a head.
KINDS = ("qwen2.5-vl", "qwen3-vl", "glm4v")
NEW = 7
#: Text, an image of 3 x 4 vectors, text, one of 5 x 2, text: pieces of 16 tokens end within both.
GRIDS = ((3, 4), (5, 2))
TEXTS = (6, 3, 12)
WIDTH = 64


class Prompt(NamedTuple):
    ids: list[int]
    #: What is an image's: 1; others are 0.
    types: list[int]
    given: list[GivenVectors]
    vectors: torch.Tensor


def prompt_of(seed: int, texts: tuple[int, ...] = TEXTS) -> Prompt:
    chance = np.random.default_rng(seed)
    ids, types, given, vectors = [], [], [], []
    for at, length in enumerate(texts):
        if at:
            rows, columns = GRIDS[at - 1]
            numbers = chance.normal(size=(rows * columns, WIDTH)).astype("<f4")
            axes = np.stack([g.ravel() for g in np.indices((1, rows, columns))]).astype("<i4")
            span = max(rows, columns)
            given.append(GivenVectors(len(ids), numbers, axes.tobytes(), span))
            vectors.append(torch.from_numpy(numbers))
            ids += [0] * len(numbers)
            types += [1] * len(numbers)
        ids += chance.integers(1, 90, length).tolist()
        types += [0] * length
    return Prompt(ids, types, given, torch.cat(vectors) if vectors else torch.empty(0, WIDTH))


def said_by_transformers(
    golden: Golden, prompt: Prompt, new: int = NEW, tokens: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Greedy tokens, or these, and their log probabilities: each by a pass over the whole text."""
    whole = golden.model
    grids = torch.tensor(
        [(1, 2 * rows, 2 * columns) for rows, columns in GRIDS[: len(prompt.given)]]
    )
    ids, types = torch.tensor([prompt.ids]), torch.tensor([prompt.types])
    positions, delta = whole.model.get_rope_index(ids, types, image_grid_thw=grids)
    embeddings = whole.get_input_embeddings()(ids)[0]
    embeddings[types[0] == 1] = prompt.vectors
    said, logprobs = list[int](), list[float]()
    with torch.no_grad():
        for at in range(new):
            hidden = whole.model.language_model(
                inputs_embeds=embeddings[None], position_ids=positions, use_cache=False
            ).last_hidden_state
            scores = whole.lm_head(hidden[0, -1]).log_softmax(-1)
            token = tokens[at] if tokens else int(scores.argmax())
            said.append(token)
            logprobs.append(float(scores[token]))
            row = whole.get_input_embeddings()(torch.tensor([token]))
            position = len(embeddings) + delta.view(1, 1, 1).expand(3, 1, 1)
            embeddings = torch.cat([embeddings, row])
            positions = torch.cat([positions, position], dim=2)
    return said, logprobs


def request(number: int, prompt: Prompt, new: int = NEW) -> Request:
    stopping = StoppingParams(max_new_tokens=new)
    return Request(
        [number], prompt.ids, SamplingParams(), stopping, logprobs=True, given=prompt.given
    )


@pytest.mark.parametrize("kind", KINDS)
def test_images_turn_by_three_axes_and_text_goes_on_behind_them(kind, golden):
    """Beside rows of text alone, preempted now and then; later from cached prefixes."""
    checkpoint = golden(kind)
    engine = Engine(checkpoint.folder)
    prompts = [prompt_of(seed) for seed in (1, 2)]
    text = prompt_of(3, TEXTS[:1])
    asked = [request(i, prompt) for i, prompt in enumerate([*prompts, text, prompts[0]])]
    client = engine.answer(asked, preempt=0.1)
    assert engine.preempted
    plain = checkpoint.logprobs([*text.ids, *client.tokens[2][:-1]])[len(text.ids) - 1 :]
    assert client.tokens[2] == plain.argmax(-1).tolist()
    for number, prompt in ((0, prompts[0]), (1, prompts[1]), (3, prompts[0])):
        tokens, logprobs = said_by_transformers(checkpoint, prompt)
        assert client.tokens[number] == tokens
        assert client.logprobs[number] == pytest.approx(logprobs, abs=1e-4)


def test_a_prefix_is_found_again_where_positions_are_the_same(golden):
    engine = Engine(golden(KINDS[0]).folder)
    prompt = prompt_of(1)
    first, second = prompt.given
    other = GivenVectors(second.start, second.rows, second.axes, second.span + 1)
    plain = GivenVectors(first.start, first.rows)
    asked = [
        request(0, prompt),
        request(1, prompt),
        request(2, prompt._replace(given=[first, other])),
        request(3, prompt._replace(given=[plain, second])),
    ]
    client = engine.answer(asked, one_by_one=True)
    assert client.tokens[0] == client.tokens[1]
    cached = [client.cached[number] for number in range(4)]
    # The vectors are the same: what differs is where they are, and where the text behind them is.
    assert cached == [0, len(prompt.ids) - 1, second.start, first.start]


def test_a_model_of_one_axis_refuses_positions(golden):
    engine = Engine(golden("qwen3").folder)
    client = engine.answer([request(0, prompt_of(1))])
    assert client.failures == {
        0: "vectors bring positions of three axes; the model's rotation has one"
    }


@pytest.mark.pod
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_of_a_gpus_executor_say_the_same(world, golden):
    """Steps are padded to captured sizes, whose positions the device works out."""
    checkpoint, port = golden(KINDS[1]), free_port()
    prompt = prompt_of(1, TEXTS[:2])
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device="cpu",
        threads=1,
        max_batch_size=2,
        max_batch_prefill_tokens=14,
        max_total_tokens=32,
        max_batch_total_tokens=64,
    )
    groups = [(world, port, [str(checkpoint.folder)])]
    asked = [request(1, prompt, new=3)]
    jobs = [Job(rank, groups, asked, options, interpreted=True) for rank in range(world)]
    tokens, logprobs = said_by_transformers(checkpoint, prompt, new=3)
    (((leader,),), *others) = ranks.run(jobs)
    assert leader.tokens[1] == tokens
    assert leader.logprobs[1] == pytest.approx(logprobs, abs=1e-4)
    assert all(said.tokens[1] == tokens for ((said,),) in others)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_of_a_gpu_turn_by_rows_shifts(kind, golden):
    checkpoint, device = golden(kind), torch.device("cuda")
    model = load(checkpoint.folder, device)
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device="cuda",
        threads=1,
        max_batch_size=4,
        max_batch_prefill_tokens=16,
        max_total_tokens=64,
        max_batch_total_tokens=256,
    )
    made = assemble(model, options, positions=64, device=device)
    limits = Limits(made.slots, made.room.rows, 64, 16, own_positions=True)
    prompts = [prompt_of(seed) for seed in (1, 2)]
    client = Client(request(i, prompt) for i, prompt in enumerate(prompts))
    loop = EngineLoop(client, Scheduler(limits), made.executor, overlap=True)
    while client.left:
        loop.turn()
    for number, prompt in enumerate(prompts):
        _, logprobs = said_by_transformers(checkpoint, prompt, tokens=client.tokens[number])
        assert client.logprobs[number] == pytest.approx(logprobs, abs=0.02)


@pytest.mark.parametrize(
    ("sections", "by_turns", "axes"),
    [
        ([2, 1, 1], False, (0, 0, 1, 2)),
        ([2, 1, 1], True, (0, 1, 2, 0)),
        ([3, 1, 0], True, (0, 1, 0, 0)),
    ],
)
def test_each_pair_is_turned_by_the_axis_of_its_section(sections, by_turns, axes):
    config = {"rope_parameters": {"mrope_section": sections, "mrope_interleaved": by_turns}}
    assert rope_of(Fields(config, "config.json"), 8, 64).axes == axes
