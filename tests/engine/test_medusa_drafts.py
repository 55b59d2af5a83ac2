"""Medusa heads in executors: their drafts are the definition's, and change no token."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from support.checkpoints import medusa_heads
from support.checkpoints.demo import DEMO
from support.engines.demo_engine import CPU, SAMPLED, VOCABULARY, demo_model, pool
from support.engines.head_drafts import MOST, answer, check_that_devices_draft_alike
from support.pods.harness import free_port
from support.steps import step_scenes, stepping
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.drafts.draft import load_draft
from tokenpod.engine.run import _method
from tokenpod.engine.startup.assemble import assemble
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.models.footprint import footprint_of
from tokenpod.models.medusa import load_medusa

PROMPT = [random.Random(3).randrange(3, VOCABULARY) for _ in range(21)]
OPTIONS = EngineOptions(
    model_folder=str(DEMO),
    dtype="float32",
    device="cpu",
    threads=1,
    max_batch_size=2,
    max_batch_prefill_tokens=16,
    max_batch_total_tokens=64,
    speculate=MOST,
)


@pytest.fixture(scope="module")
def served():
    return demo_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return medusa_heads.save(tmp_path_factory.mktemp("medusa") / "heads")


@pytest.fixture(scope="module")
def heads(folder, served):
    return load_medusa(folder, served, heads=MOST, device=CPU)


def hidden_of(served, text):
    """[n, hidden] of a text computed at once."""
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
    return served.forward(batch, pool(n))


def test_what_an_engine_drafts_is_what_the_definition_says(heads, served):
    """In pieces of prompts, behind a prefix of the cache, and behind wrong drafts."""
    prompts = [PROMPT, [*PROMPT[:17], 7, 9, 11]]
    asked = [
        Request([1 + i], prompt, SamplingParams(), StoppingParams(9), drafts=MOST)
        for i, prompt in enumerate(prompts)
    ]
    link, drafted = answer(served, asked, heads)
    plain, _ = answer(served, asked)
    assert link.tokens == plain.tokens
    assert link.load.cached_tokens > 10
    for i, prompt in enumerate(prompts):
        hidden = hidden_of(served, [*prompt, *link.tokens[1 + i]])
        said = medusa_heads.defined(medusa_heads.tensors(), hidden).argmax(-1)
        assert len(drafted[i]) >= 6
        for (_, known), drafts in drafted[i].items():
            # The last known token is not computed yet: what guesses is the state before it.
            assert drafts == said[: len(drafts), known - 2].tolist()


def test_sampled_rows_say_the_same_with_heads(heads, served):
    asked = [
        Request([1, 2], PROMPT, SAMPLED, StoppingParams(8), logprobs=True, drafts=MOST),
        Request([3], [5], SAMPLED, StoppingParams(8), logprobs=True, drafts=MOST),
    ]
    got, _ = answer(served, asked, heads)
    plain, _ = answer(served, asked)
    assert got.tokens == plain.tokens
    assert got.drafted[0] > 10


def test_they_draw_with_the_noise_of_the_token_that_is_drawn(tmp_path, served):
    """Where scores are nearly alike noise decides, and it is the same for a draft and its token."""
    blocks = {
        name: torch.zeros_like(tensor)
        for name, tensor in medusa_heads.tensors(blocks=1).items()
        if ".linear." in name
    }
    folder = medusa_heads.save(tmp_path / "heads", blocks, medusa_heads.config(blocks=1))
    heads = load_medusa(folder, served, heads=MOST, device=CPU)
    eight = dict.fromkeys(range(9, 17), 1000.0)
    nearly = SamplingParams(do_sample=True, temperature=50.0, seed=7, logit_bias=eight)
    asked = [Request([1], PROMPT, nearly, StoppingParams(40), drafts=MOST)]
    got, _ = answer(served, asked, heads)
    assert len({*got.tokens[1]}) > 4
    drafted, accepted = got.drafted
    assert accepted > 0.7 * drafted, "of unlike noise one of eight would be right"


def test_heads_are_loaded_sized_and_assembled_as_a_draft_model_is(folder, served):
    options = msgspec.structs.replace(OPTIONS, draft_folder=str(folder))
    heads = load_draft(options, served, 64, CPU)
    assert _method(options) == "medusa"
    made = assemble(served, options, positions=64, device=CPU, draft=heads)
    assert made.slots == 64
    assert made.executor._draft.pool.slots == made.slots + PROBE_TOKENS
    size = footprint_of(folder, heads=MOST)
    assert (size.weight_bytes(1, 4), size.slot_bytes(1, "float32")) == (heads.weight_bytes, 0)
    many = msgspec.structs.replace(options, speculate=5)
    with pytest.raises(EngineError, match=r"draft_model is .*heads: it has 4 heads, .* is 5"):
        load_draft(many, served, 64, CPU)


# -- on a device -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(shared, tmp_path_factory):
    """A served model of three layers, and heads of it."""
    folder, heads = step_scenes.small_model(shared, layers=3), tmp_path_factory.mktemp("heads")
    made = medusa_heads.tensors(width=32, vocabulary=stepping.VOCABULARY, heads=3, blocks=1)
    fields = medusa_heads.config(heads=3, blocks=1)
    return folder, medusa_heads.save(heads, made, fields)


@pytest.mark.slow
def test_a_device_drafts_what_a_host_drafts(small):
    folder, heads = small
    check_that_devices_draft_alike(folder, heads, drafts=(2, 3, 0))


@pytest.mark.pod
def test_two_ranks_with_heads_come_to_the_tokens_of_one(small):
    folder, heads = small
    alone = step_scenes.Scene(
        step_scenes.make("fast", folder, CPU), [], step_scenes.table_of(folder)
    )
    plain = step_scenes.Told.by(step_scenes.plain(alone))
    ranks = step_scenes.run("cpu", folder, free_port(), [], ["found_drafts"], str(heads))
    for told in ranks:
        assert told["found_drafts"].tokens == plain.tokens
