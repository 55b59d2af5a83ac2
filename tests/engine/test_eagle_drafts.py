"""EAGLE-3 heads in executors: their drafts are the definition's, and change no token."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file

from support.checkpoints import eagle_heads
from support.checkpoints.demo import DEMO
from support.engines.demo_engine import CPU, SAMPLED, VOCABULARY, demo_model, pool
from support.engines.head_drafts import MOST, answer, check_that_devices_draft_alike, drafts_behind
from support.pods.harness import free_port
from support.steps import step_scenes, stepping
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.models.eagle import load_eagle

PROMPT = [random.Random(3).randrange(3, VOCABULARY) for _ in range(21)]


@pytest.fixture(scope="module")
def served():
    return demo_model()


def test_what_an_engine_drafts_is_what_the_definition_says(tmp_path, served):
    """In pieces of prompts, behind a prefix of the cache, behind wrong drafts."""
    head = load_eagle(eagle_heads.save(tmp_path / "head"), served, positions=64, device=CPU)
    prompts = [PROMPT, [*PROMPT[:17], 7, 9, 11]]
    asked = [
        Request([1 + i], prompt, SamplingParams(), StoppingParams(9), drafts=MOST)
        for i, prompt in enumerate(prompts)
    ]
    link, drafted = answer(served, asked, head)
    plain, _ = answer(served, asked)
    assert link.tokens == plain.tokens
    assert link.load.cached_tokens > 10
    w, table = eagle_heads.tensors(), load_file(DEMO / "model.safetensors")
    table = table["model.embed_tokens.weight"].float()
    for i, prompt in enumerate(prompts):
        text = [*prompt, *link.tokens[1 + i]]
        streams = streams_of(served, text, head.taps)
        assert len(drafted[i]) >= 6
        for (_, known), drafts in drafted[i].items():
            part = w, table, torch.tensor(text[:known]), streams[:known]
            one, _ = eagle_heads.defined(*part)

            def two(token, part=part):
                return eagle_heads.defined(*part, then=token)[1]

            assert drafts == drafts_behind(one[-1], two, len(drafts))


def streams_of(served, text, taps):
    """[n, 3 * hidden] of a text computed at once."""
    n = len(text)
    at = torch.arange(n)
    batch = ForwardBatch(
        t_token=torch.tensor(text),
        t_place=at,
        t_slot=at,
        b_start=[0, n],
        b_context=[n],
        b_runs=[[(0, n)]],
        b_row=[0],
        row_table=torch.zeros((0, 0), dtype=torch.int32),
        single_rows=0,
        logit_index=None,
    )
    return torch.cat(served.forward_tapped(batch, pool(n), taps)[1], dim=1)


def test_sampled_rows_say_the_same_with_a_head(tmp_path, served):
    head = load_eagle(eagle_heads.save(tmp_path / "head"), served, positions=64, device=CPU)
    # One of a single token, which has no entry.
    asked = [
        Request([1, 2], PROMPT, SAMPLED, StoppingParams(8), logprobs=True, drafts=MOST),
        Request([3], [5], SAMPLED, StoppingParams(8), logprobs=True, drafts=MOST),
    ]
    got, _ = answer(served, asked, head)
    plain, _ = answer(served, asked)
    assert got.tokens == plain.tokens
    assert got.drafted[0] > 10


# -- on a device -------------------------------------------------------------------------------

SMALL = eagle_heads.Sizes(32, 4, 2, 24, 20, stepping.VOCABULARY, 64)


@pytest.mark.slow
def test_a_device_drafts_what_a_host_drafts(shared, tmp_path):
    folder = step_scenes.small_model(shared, layers=3)
    head = eagle_heads.save(tmp_path / "head", sizes=SMALL)
    check_that_devices_draft_alike(folder, head, drafts=(2, 1, 0))


@pytest.mark.pod
def test_two_ranks_with_a_head_come_to_the_tokens_of_one(shared, tmp_path):
    """The served model's embedding, which the head reads, is divided among them."""
    folder = step_scenes.small_model(shared, layers=3)
    head = eagle_heads.save(tmp_path / "head", sizes=SMALL)
    alone = step_scenes.Scene(
        step_scenes.make("fast", folder, CPU), [], step_scenes.table_of(folder)
    )
    plain = step_scenes.Told.by(step_scenes.plain(alone))
    ranks = step_scenes.run("cpu", folder, free_port(), [], ["found_drafts"], str(head))
    for told in ranks:
        assert told["found_drafts"].tokens == plain.tokens
