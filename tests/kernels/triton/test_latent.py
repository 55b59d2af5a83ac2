"""Latent rows by Triton kernels: against the definition, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.attention_steps import Spec, lay_out
from support.kernels.latents import SHAPES, draw_latents, truth
from tokenpod.kernels.attention import composed_latent as composed
from tokenpod.kernels.attention.triton_latent import plan_tokens
from tokenpod.kernels.backends import reference, triton
from tokenpod.kernels.operations.attention_ops import LatentShape
from tokenpod.kernels.operations.pointwise_ops import RowNorm

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SCALE = 0.2
STEPS = {
    "decode": [Spec(1, 1), Spec(1, 70, piece=7), Spec(1, 40)],
    "mixed": [Spec(1, 33), Spec(12, 30), Spec(3, 50, piece=6), Spec(16, 16)],
}
#: Of the mixed step, so many rows.
EXPANDED = dict(zip(SHAPES.values(), (0, 2, 1, 3), strict=True))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


def agree(step, shape, heads, dtype):
    ops, batch = triton.OPERATIONS, step.batch
    latents = draw_latents(batch, step.slots, heads, shape, dtype)
    plan = ops.plan_latent(batch, shape)
    got = ops.attend_latent(latents.q, latents.pool, latents.up, shape, plan, SCALE)
    assert got.dtype == dtype
    expected = truth(latents, batch, shape, SCALE)
    assert (got.double().cpu() - expected).norm() / expected.norm() < TOLERANCE[dtype]
    return plan


@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", STEPS)
def test_every_shape(name, shape, device):
    plan = agree(lay_out(STEPS[name], device), shape, 4, torch.float32)
    assert len(plan.expanded) == (EXPANDED[shape] if name == "mixed" else 0)


@pytest.mark.sampled(4, "gpu")
@pytest.mark.parametrize("heads", [1, 20, 66])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_any_number_of_heads_and_type(heads, dtype, device):
    agree(lay_out(STEPS["decode"], device), SHAPES["wide-values"], heads, dtype)


def test_contexts_in_one_piece(device, monkeypatch):
    """Of so many tokens that nothing is split."""
    monkeypatch.setattr(composed, "_expands", lambda batch, row, shape: False)
    step = lay_out([Spec(1, 33), Spec(17, 30)], device)
    assert not agree(step, SHAPES["narrow-values"], 4, torch.float32).expanded


def test_a_long_row_is_expanded_for_some_heads_at_a_time(device, monkeypatch):
    monkeypatch.setitem(composed.EXPANDED_AT_ONCE, device.type, 100)
    step = lay_out([Spec(1, 33), Spec(16, 50)], device)
    assert agree(step, SHAPES["narrow-values"], 5, torch.float32).expanded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_longer_row_is_expanded_part_by_part(dtype, device, monkeypatch):
    """Its queries are more than a part, too; beside one that is short enough."""
    monkeypatch.setattr(composed, "LONGEST_EXPANDED", 20)
    step = lay_out([Spec(1, 33), Spec(16, 18), Spec(45, 95)], device)
    plan = agree(step, SHAPES["narrow-values"], 5, dtype)
    assert [row.plan is None for row in plan.expanded] == [False, True]


def test_a_captured_step_knows_neither_contexts_nor_runs(device):
    shape, step = SHAPES["small-heads"], lay_out([Spec(1, 33), Spec(12, 30)], device)
    latents = draw_latents(step.batch, step.slots, 4, shape, torch.float32)
    unknown = replace(step.batch, b_context=[0, 0], b_runs=[[], []], b_row=[0, 0])
    plan = triton.OPERATIONS.plan_latent(unknown, shape)
    args = (latents.q, latents.pool, latents.up, shape, plan, SCALE)
    got = triton.OPERATIONS.attend_latent(*args).double().cpu()
    expected = truth(latents, step.batch, shape, SCALE)
    assert (got - expected).norm() / expected.norm() < TOLERANCE[torch.float32]


def test_rows_longer_than_the_kernels_hold_are_refused(device):
    step = lay_out([Spec(1, 3)], device)
    shape = LatentShape(rank=600, rope=8, nope=8, value=8)
    with pytest.raises(ValueError, match=r"600 \+ 8 numbers: at most 512 \+ 128"):
        agree(step, shape, 2, torch.float32)


@pytest.mark.parametrize("tokens", [3, 70])
def test_rows_and_queries_are_normed_turned_and_written(tokens, draw, device):
    shape = SHAPES["wide-values"]
    q = draw(tokens, 18, shape.nope + shape.rope).to(device)
    # As products leave them: parts of wider rows.
    row = draw(tokens, 50 + shape.rank + shape.rope).to(device)[:, 50:]
    norm = RowNorm(draw(shape.rank).to(device), 1e-3)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.02], device=device)
    positions = torch.arange(tokens, device=device) * 7
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(device)
    results = []
    for ops in (reference.OPERATIONS, triton.OPERATIONS):
        pool = torch.zeros(tokens + 1, 1, shape.rank + shape.rope, device=device)
        rotation = ops.rotate(positions, frequencies, 1.2, torch.float32)
        results.append((ops.store_latent(q.clone(), row, rotation, norm, pool, slots), pool))
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_models_shapes(heads, dtype, device):
    """DeepSeek V2 Lite's, Kimi K2's and V3's rows, expanded and not, with long contexts."""
    shape = LatentShape(rank=512, rope=64, nope=128, value=128)
    specs = [Spec(1, 1), Spec(1, 3000), Spec(1, 700, piece=50), Spec(40, 900), Spec(300, 1000)]
    plan = agree(lay_out(specs, device), shape, heads, dtype)
    assert len(plan.expanded) == 1
    agree(lay_out([Spec(1, 100)] * 300, device), shape, heads, dtype)


def test_a_batch_without_rows_of_tokens_is_refused(device):
    step = lay_out([Spec(1, 3)], device)
    paged = replace(step.batch.paged, t_row=None)
    with pytest.raises(ValueError, match="has no rows of tokens"):
        plan_tokens(replace(step.batch, paged=paged))
