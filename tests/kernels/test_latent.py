"""Attention over latent rows on a CPU: what is written, and what it says, against definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.latents import SHAPES, draw_latents, truth
from support.kernels.live_tensors import LiveTensors
from tokenpod.core import model_size
from tokenpod.kernels.attention import composed_latent as latent
from tokenpod.kernels.backends import cpu, reference
from tokenpod.kernels.operations.attention_ops import LatentShape
from tokenpod.kernels.operations.pointwise_ops import RowNorm

SLOTS, SCALE = 400, 0.2
OPERATIONS = {"reference": reference, "cpu": cpu}
STEPS = {
    "decode": [(1, (1,)), (1, (40,)), (1, (17, 30))],
    "prompts": [(37, (37,)), (5, (5,)), (16, (9, 20))],
    "mixed": [(1, (12,)), (33, (50, 5)), (12, (12,)), (3, (30,)), (60, (60,))],
}


#: Who reads runs instead of a table; and each shape costs a compiler its time.
CASES = [
    *(("reference", shape, False) for shape in SHAPES),
    *(("cpu", shape, True) for shape in SHAPES if shape != "wide-values"),
    pytest.param("cpu", "wide-values", True, marks=pytest.mark.slow),
    ("cpu", "large-latents", False),
]


@pytest.mark.parametrize(("name", "shape", "runs_only"), CASES)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_attention(rows, name, shape, runs_only, row, step_over):
    ops, shape = OPERATIONS[name].OPERATIONS, SHAPES[shape]
    batch = step_over([row(*one) for one in rows], SLOTS)
    latents = draw_latents(batch, SLOTS, 4, shape, torch.float32)
    if runs_only:
        batch = replace(batch, row_table=torch.empty((0, 0), dtype=torch.int32))
    plan = ops.plan_latent(batch, shape)
    got = ops.attend_latent(latents.q, latents.pool, latents.up, shape, plan, SCALE)
    expected = truth(latents, batch, shape, SCALE)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_half_precision(row, step_over):
    shape = SHAPES["narrow-values"]
    batch = step_over([row(*one) for one in STEPS["mixed"]], SLOTS)
    latents = draw_latents(batch, SLOTS, 4, shape, torch.bfloat16)
    plan = cpu.OPERATIONS.plan_latent(batch, shape)
    got = cpu.OPERATIONS.attend_latent(latents.q, latents.pool, latents.up, shape, plan, SCALE)
    assert got.dtype == torch.bfloat16
    expected = truth(latents, batch, shape, SCALE)
    assert (got.double() - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("longest", [400, 50])
def test_long_rows_take_no_more_memory_than_is_said(name, longest, row, step_over, monkeypatch):
    """Whatever their heads and their context; what is left over is the queries' and results'."""
    monkeypatch.setitem(latent.EXPANDED_AT_ONCE, "cpu", 400)
    for module in (latent, model_size):
        monkeypatch.setattr(module, "LONGEST_EXPANDED", longest)
    ops, shape, heads, item = OPERATIONS[name].OPERATIONS, SHAPES["narrow-values"], 6, 4
    for context in (60, 350):
        batch = step_over([row(20, (context,))], SLOTS)
        latents = draw_latents(batch, SLOTS, heads, shape, torch.float32)
        plan = ops.plan_latent(batch, shape)
        assert plan.expanded
        with LiveTensors() as live:
            got = ops.attend_latent(latents.q, latents.pool, latents.up, shape, plan, SCALE)
        torch.testing.assert_close(
            got.double(), truth(latents, batch, shape, SCALE), rtol=1e-4, atol=1e-5
        )
        said = latent.expansion_of(heads, shape).numbers(context, "cpu") * item
        assert live.most_bytes > said / 2
        if name != "reference":  # that has all scores of a row in memory, too
            assert live.most_bytes < said + 8 * latents.q.nbytes


@pytest.mark.parametrize("tokens", [20, 70, 100])
def test_parts_of_long_rows_are_one_softmax(tokens, row, step_over, monkeypatch):
    """Parts end within the row's own tokens, or these are several parts, or all that there is."""
    monkeypatch.setattr(latent, "LONGEST_EXPANDED", 30)
    shape = SHAPES["small-heads"]
    batch = step_over([row(1, (4,)), row(tokens, (40, 60))], SLOTS)
    latents = draw_latents(batch, SLOTS, 4, shape, torch.float32)
    plan = cpu.OPERATIONS.plan_latent(batch, shape)
    assert [one.plan for one in plan.expanded] == [None]
    got = cpu.OPERATIONS.attend_latent(latents.q, latents.pool, latents.up, shape, plan, SCALE)
    expected = truth(latents, batch, shape, SCALE)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_is_made_of_64k_latents_is_bounded():
    """DeepSeek-V2-Lite's 16 heads on a GPU: whole, it would be 1.4 GB of 16 bits."""
    made = latent.expansion_of(16, LatentShape(rank=512, rope=64, nope=128, value=128))
    assert 2 * made.numbers(65_536, "cuda") == 2 * made.numbers(16_384, "cuda") == 354_418_688
    assert 2 * 65_536 * (16 * made.head_numbers + made.token_numbers) == 1_417_674_752


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_and_queries_are_normed_turned_and_written(name, draw):
    ops, shape, slots = OPERATIONS[name].OPERATIONS, SHAPES["narrow-values"], [5, 2, 7]
    q, row = draw(3, 2, shape.nope + shape.rope), draw(3, shape.rank + shape.rope)
    norm = RowNorm(draw(shape.rank), 1e-3)
    pool = torch.zeros(9, 1, shape.rank + shape.rope)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.02])
    rotation = ops.rotate(torch.tensor([0, 3, 40]), frequencies, 1.2, torch.float32)
    got = ops.store_latent(q.clone(), row, rotation, norm, pool, torch.tensor(slots))
    angles = torch.tensor([[0.0], [3.0], [40.0]]) * frequencies
    turn = torch.polar(torch.full_like(angles, 1.2), angles)

    def turned(x, turn):
        pairs = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    torch.testing.assert_close(got[..., : shape.nope], q[..., : shape.nope])
    ends = turned(q[..., shape.nope :], turn[:, None])
    torch.testing.assert_close(got[..., shape.nope :], ends, rtol=1e-4, atol=1e-5)
    latent = row[:, : shape.rank]
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    expected = torch.zeros_like(pool)
    expected[slots, 0] = torch.cat((latent, turned(row[:, shape.rank :], turn)), dim=-1)
    torch.testing.assert_close(pool, expected, rtol=1e-4, atol=1e-5)
