"""A draft model at start: what it must have in common with the served one, and what it takes."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest
import torch

from support.checkpoints import eagle_heads
from support.checkpoints.demo import DEMO
from support.engines.demo_engine import CPU, demo_model
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.plan import LAST
from tokenpod.engine.drafts.draft import load_draft
from tokenpod.engine.startup.assemble import assemble
from tokenpod.engine.startup.memory import FreeMemory
from tokenpod.engine.startup.room import room_for
from tokenpod.engine.steps.first_steps import run_worst_steps, worst_step
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.models.footprint import footprint_of

OPTIONS = EngineOptions(
    model_folder=str(DEMO),
    dtype="float32",
    device="cpu",
    threads=1,
    max_batch_size=2,
    max_batch_prefill_tokens=16,
    max_batch_total_tokens=64,
    speculate=3,
    draft_folder=str(DEMO),
)


@pytest.fixture(scope="module")
def served():
    return demo_model()


def altered(folder, **fields):
    """The embedded model's folder with other fields in its config.json."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return msgspec.structs.replace(OPTIONS, draft_folder=str(folder))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"max_position_embeddings": 100},
            r"its context has 100 tokens, and sequences may have 200 \(--max-total-tokens\)",
        ),
        (
            {"vocab_size": 6000},
            "its vocabulary has 6000 tokens, and that of the served model 4096",
        ),
        ({"num_hidden_layers": 9}, "model.layers.8"),
    ],
)
def test_what_cannot_draft_is_refused_in_one_line(tmp_path, served, fields, problem):
    options = altered(tmp_path / "draft", **fields)
    with pytest.raises(EngineError, match=problem) as refused:
        load_draft(options, served, 200, CPU)
    text = str(refused.value)
    assert text.startswith(f"draft_model is {options.draft_folder}: ")
    assert "\n" not in text


def test_a_head_is_loaded_sized_and_assembled_as_a_draft_model_is(tmp_path, served):
    folder = eagle_heads.save(tmp_path / "head")
    options = msgspec.structs.replace(OPTIONS, draft_folder=str(folder))
    head = load_draft(options, served, 64, CPU)
    made = assemble(served, options, positions=64, device=CPU, draft=head)
    assert made.executor._draft.pool.slots == made.slots + PROBE_TOKENS
    size = footprint_of(folder)
    assert size.weight_bytes(1, 4) == head.weight_bytes
    own, both = (
        room_for(served, options, 64, FreeMemory(1 << 30, ""), torch.float32, None, each).slots
        for each in (None, head)
    )
    assert own == both == 64, "as many as were asked for"
    assert size.slot_bytes(1, "float32") == KVPool.bytes_per_slot(
        layouts=head.config.kv_layouts, dtype=torch.float32
    )
    broken = msgspec.structs.replace(
        options, draft_folder=str(eagle_heads.save(tmp_path / "other", vocab_size=5000))
    )
    with pytest.raises(EngineError, match=r"draft_model is .*other: its vocabulary has 5000 tok"):
        load_draft(broken, served, 64, CPU)


def test_its_keys_and_values_count_when_slots_are_chosen(served):
    options = msgspec.structs.replace(OPTIONS, max_batch_total_tokens=None, max_batch_size=512)
    draft = load_draft(options, served, 2048, CPU)
    free = FreeMemory(100 << 20, "for a test")
    alone, both = (
        room_for(served, options, 2048, free, torch.float32, None, each).slots
        for each in (None, draft)
    )
    assert 0 < both < 512 * 2048
    # What a probe's tokens take is taken off before.
    assert both + PROBE_TOKENS == pytest.approx((alone + PROBE_TOKENS) / 2, abs=1)


def test_it_is_assembled_with_a_pool_of_as_many_slots_and_takes_the_worst_step(served):
    draft = load_draft(OPTIONS, served, 64, CPU)
    made = assemble(served, OPTIONS, positions=64, device=CPU, draft=draft)
    assert made.executor._draft.pool.slots == made.slots + PROBE_TOKENS
    plan = worst_step(3, 16, 64, scattered=True, drafts=(6, 3), unknown=True)
    drafted = plan.r_samples > 1
    assert drafted.sum() == 2
    run_worst_steps(made.executor, 3, 16, 64, (6, 3), unknown=True)
    result = made.executor.launch(plan).wait()
    assert len(result.tokens) == 3 + 6
    assert 0 < result.drafting_ns < result.forward_ns
    assert len(result.drafts) == (plan.t_token == LAST).sum() == 6
    assert LAST not in result.drafts
