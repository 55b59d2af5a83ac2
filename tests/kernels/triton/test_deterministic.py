"""Operations that are deterministic: a token's results are the same, bit by bit, in any step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernels.attention_steps import Inputs, Spec, assert_close, lay_out, truth
from tokenpod.kernels.attention.triton_attention import plan_attention
from tokenpod.kernels.backends.triton import DETERMINISTIC, OPERATIONS
from tokenpod.kernels.gpu.launch import (
    LEAST_SHARED_BYTES,
    SHARED_BYTES,
    capability,
    shared_bytes,
)
from tokenpod.kernels.operations.attention_ops import AttentionOptions
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.products.agreement import agreeing
from tokenpod.kernels.products.product_tiles import LIBRARY, Kind, deterministic, measured

#: Numbers of tokens to either side of what tiles hold.
ROWS = [1, 2, 17, 65, 300]

#: One sequence's last tokens in steps of all kinds: rows beside each other, cut anywhere, as
#: (tokens, context, slots that follow each other).
STEPS = {
    "a whole prompt": [Spec(200, 200)],
    "its last token": [Spec(1, 200)],
    "each of some tokens": [Spec(1, n) for n in (7, 64, 65, 128, 199, 200)],
    "a piece behind a cached prefix": [Spec(3, 200)],
    "pieces": [Spec(40, 200), Spec(33, 160), Spec(127, 127)],
    "scattered slots": [Spec(70, 200, piece=7)],
    "company": [Spec(1, 200, piece=64), Spec(1, 31), Spec(2, 200), Spec(65, 130)],
}


def product(what, x, weight, norm, operations):
    if what == "gated":
        return operations.prepare_norm_linear(weight, None, norm, Activation.SILU)(x)
    if what == "added":
        residual = torch.ones(len(x), len(weight), dtype=x.dtype, device=x.device)
        operations.prepare_add_linear(weight, None)(x, residual)
        return residual
    return operations.prepare_linear(weight, None)(x)


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize("what", ["plain", "gated", "added"])
def test_a_product_of_a_token_does_not_depend_on_the_others(what, draw, device):
    n, k, dtype = 96, 136, torch.bfloat16
    x, weight = draw(300, k, dtype=dtype).to(device), (draw(n, k) * k**-0.5).to(dtype).to(device)
    norm = RowNorm(draw(k, dtype=dtype).to(device), 1e-6)
    whole = product(what, x, weight, norm, DETERMINISTIC)
    for rows in ROWS:
        some = product(what, x[-rows:].contiguous(), weight, norm, DETERMINISTIC)
        assert torch.equal(some, whole[-rows:]), rows
    plain = product(what, x, weight, norm, OPERATIONS)
    torch.testing.assert_close(whole, plain, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("capability", [None, (9, 0)])
@pytest.mark.parametrize("gated", [False, True])
def test_all_products_are_made_in_one_sum_that_fits(capability, gated):
    held = SHARED_BYTES.get(capability, LEAST_SHARED_BYTES)
    tiles = deterministic(capability, held, gated=gated)
    shapes = [*measured(capability).by_shape, (100, 100), (1 << 17, 1 << 13)]
    found = {
        (tiles.choose(n, k, rows), min(rows, 64))
        for n, k in shapes
        for rows in (1, 2, 16, 33, 64, 65, 200, 1000, 1 << 16)
    }
    assert {tile.kind for tile, _ in found} == {Kind.MATRIX, Kind.TILED}
    for tile, rows in found:
        assert tile.splits == 1
        sides = (tile.block_t or max(rows, 16)) + tile.block_n
        assert sides * tile.block_k * 2 * tile.stages <= held


def test_the_library_multiplies_where_it_agrees():
    tiles = replace(deterministic((9, 0), SHARED_BYTES[9, 0], gated=False), library={40, 64, 100})
    weights = {"few rows": (4096, 4096), "many rows": (28672, 4096)}
    chosen = {
        (name, rows)
        for name, shape in weights.items()
        for rows in (39, 40, 64, 65, 100, 101)
        if tiles.choose(*shape, rows) is LIBRARY
    }
    # Of few tokens and many rows ours take as long.
    assert chosen == {("few rows", 40), ("few rows", 64), *((name, 100) for name in weights)}
    gated = replace(tiles, gated=True, library={40, 128, 129})
    assert [gated.choose(4096, 4096, rows) is LIBRARY for rows in (40, 128, 129)] == [0, 0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4096, 14336])
@pytest.mark.parametrize("what", ["plain", "gated", "added"])
def test_a_product_that_the_library_may_make_does_not_depend_on_the_others(what, k, draw, device):
    n, dtype = 4096, torch.bfloat16
    x, weight = draw(700, k, dtype=dtype).to(device), (draw(n, k) * k**-0.5).to(dtype).to(device)
    norm = RowNorm(draw(k, dtype=dtype).to(device), 1e-6)
    tiles = deterministic(capability(device), shared_bytes(device), gated=what == "gated")
    agree = agreeing(weight, None, tiles, add=what == "added")
    assert len(agree) > 300
    whole = product(what, x, weight, norm, DETERMINISTIC)
    for rows in (*range(1, 700, 23), 32, 33, 48, 64, 65, 128, 129, 208, 209, 256, 257, 576):
        some = product(what, x[-rows:].contiguous(), weight, norm, DETERMINISTIC)
        assert torch.equal(some, whole[-rows:]), rows


def attend(specs, drawn, window, dtype, device, options, operations):
    """(position, what it yields) of a step's tokens, all rows of which are one text."""
    step = lay_out(sorted(specs, key=lambda spec: spec.tokens != 1), device)
    batch = step.batch
    q, k, v = (each.to(device) for each in drawn)
    keys, values = (
        torch.full((step.slots, *k.shape[1:]), torch.nan, dtype=dtype, device=device)
        for _ in range(2)
    )
    for runs in batch.b_runs:
        position = 0
        for start, end in runs:
            length = end - start
            keys[start:end] = k[position : position + length]
            values[start:end] = v[position : position + length]
            position += length
    asked = q[batch.t_place]
    plan = plan_attention(batch, window)
    got = operations.attention(asked, keys, values, plan, options)
    assert_close(got, truth(Inputs(asked, keys, values), batch, window, options), dtype)
    return list(zip(batch.t_place.tolist(), got, strict=True))


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_of_a_token_does_not_depend_on_how_its_text_is_cut(
    window, dtype, heads, draw, device
):
    drawn = [draw(200, n, 64, dtype=dtype) for n in (heads[0], heads[1], heads[1])]
    options = AttentionOptions(sinks=draw(heads[0]).to(device))
    how = (drawn, window, dtype, device, options, DETERMINISTIC)
    whole = dict(attend(STEPS["a whole prompt"], *how))
    for name, specs in STEPS.items():
        for position, got in attend(specs, *how):
            assert torch.equal(got, whole[position]), (name, position)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_of_many_single_rows_does_not_depend_on_their_number(
    head_dim, dtype, draw, device
):
    heads, kv_heads = 32, 8
    drawn = [draw(200, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    how = (drawn, None, dtype, device, AttentionOptions(), DETERMINISTIC)
    whole = dict(attend([Spec(200, 200)], *how))
    for rows in (1, 2, 3, 63, 64, 200):
        for position, got in attend([Spec(1, 200 - n) for n in range(rows)], *how):
            assert torch.equal(got, whole[position]), (rows, position)
