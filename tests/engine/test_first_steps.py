"""What is found out before any request comes."""

from __future__ import annotations

import gc
import json

import msgspec
import pytest
import torch

from support.checkpoints.demo import DEMO
from support.engines.demo_engine import CPU, demo_model
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.run import load
from tokenpod.engine.startup import assemble as parts
from tokenpod.engine.startup.assemble import assemble
from tokenpod.engine.startup.kept import Kept
from tokenpod.engine.steps.first_steps import run_worst_steps, timed_steps

OPTIONS = EngineOptions(str(DEMO), "float32", "cpu", 1, 2, 64, max_batch_total_tokens=64)


def test_a_model_that_computes_no_numbers_does_not_start(monkeypatch):
    model = demo_model()
    computed = model.logits
    monkeypatch.setattr(model, "logits", lambda *inputs: computed(*inputs) * torch.nan)
    with pytest.raises(EngineError, match=r"computes NaN or Inf of a prompt of 62 tokens.*--dtype"):
        assemble(model, OPTIONS, positions=64, device=CPU)


@pytest.mark.parametrize("stateless", [True, False])
@pytest.mark.parametrize(("prompt", "slots"), [(64, 64), (40, 30), (3, 7)])
def test_plain_steps_of_prompts_and_rows_are_timed(stateless, prompt, slots):
    executor = assemble(demo_model(), OPTIONS, positions=64, device=CPU).executor
    asked = {"rows": 2, "prompt": prompt, "positions": 32, "slots": slots}
    for _ in range(2):  # rows were given back
        found = timed_steps(executor, stateless=stateless, **asked)
        assert all(seconds > 0 for _, seconds in found)
        sizes = [size for size, _ in found]
        assert max(size.prompt_tokens for size in sizes) == min(prompt, slots, 2 * 31)
        assert {size.rows for size in sizes} == ({0, 1, 2} if stateless else {0})
        assert max(size.context for size in sizes) <= 2 * slots
        if stateless and prompt > 8:
            # One of them is behind a text.
            assert any(size.pairs > size.prompt_tokens**2 for size in sizes if size.prompt_tokens)


def test_the_largest_step_is_run_twice_and_smaller_ones_score_no_prompts():
    executor = assemble(demo_model(), OPTIONS, positions=64, device=CPU).executor
    plans = []

    class Noted:
        release = executor.release

        def launch(self, plan):
            plans.append(plan)
            return executor.launch(plan)

    run_worst_steps(Noted(), 2, 32, 64, smaller=False)
    assert [(len(plan.t_token), len(plan.scored_token) > 0) for plan in plans] == [(33, True)] * 2
    plans.clear()
    run_worst_steps(Noted(), 2, 32, 64)
    sizes = [(len(plan.t_token), len(plan.scored_token) > 0) for plan in plans]
    assert sizes == [(33, True)] * 2 + [(n + 1, False) for n in (24, 16, 8, 4)]


class Nobody:
    def send(self, message):
        del message


@pytest.mark.gpu
def test_a_second_start_measures_nothing_and_steps_of_all_sizes_find_their_memory(
    golden, tmp_path, monkeypatch
):
    monkeypatch.setattr(parts, "kept_of", lambda options, device: Kept(options, (), tmp_path))
    folder = str(golden("llama", max_position_embeddings=2048).folder)
    options = EngineOptions(folder, "bfloat16", "cuda", 1, 64, 1024, max_gap_seconds=0.1)
    options = msgspec.structs.replace(options, max_batch_total_tokens=20_000)
    assembled = load(options, Nobody(), None)[0]
    first = assembled.slots, assembled.measured
    (kept,) = tmp_path.glob("*.steps")
    library = json.loads(kept.read_text())["library"]
    assert any(library.values())
    del assembled
    gc.collect()
    torch.cuda.empty_cache()
    assembled = load(options, Nobody(), None)[0]
    assert (assembled.slots, assembled.measured) == first
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for prompt in (1024, 1000, 333, 90, 7):
        for rows in (64, 40, 3):
            run_worst_steps(assembled.executor, rows, prompt, 2048)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


@pytest.mark.gpu
def test_a_gpus_start_chooses_rows_times_steps_and_leaves_captures_for_later(golden):
    options = EngineOptions(
        str(golden("llama", max_position_embeddings=2048).folder),
        "bfloat16",
        "cuda",
        1,
        1024,
        4096,
        fewer_rows=True,
        max_gap_seconds=0.1,
        max_batch_total_tokens=100_000,
    )

    assembled, ready, limits, _ = load(options, Nobody(), None)
    assert ready.rows == limits.max_rows == assembled.room.rows == 384
    sizes = [size for size, _ in assembled.measured]
    assert all(seconds > 0 for _, seconds in assembled.measured)
    assert {size.rows for size in sizes} == {0, 1, 96, 384}
    assert max(size.prompt_tokens for size in sizes) == 4096
    before, captured = torch.cuda.memory_reserved(), 0
    while assembled.captures.capture_next():
        captured += 1
    assert captured > 20
    # Logits of all sizes lie in one place.
    assert torch.cuda.memory_reserved() - before < 64 << 20
    again = timed_steps(
        assembled.executor, rows=384, prompt=4096, positions=2048, slots=100_000, stateless=True
    )
    assert [size for size, _ in again] == sizes
