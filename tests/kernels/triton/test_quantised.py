"""Products with weights of 8 and 4 bits by the kernels: against float64, at odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from support.kernels.quantised_weights import (
    BOUND,
    FP8,
    IN_LANES,
    INT8,
    KINDS,
    LANES,
    MATRIX,
    error,
    exact_product,
    tiles,
)
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Number, Rounding
from tokenpod.kernels.products.quantised.format_products import (
    prepare_add_linear,
    prepare_linear,
    prepare_norm_linear,
)
from tokenpod.kernels.products.quantised.input_rounding import round_inputs
from tokenpod.kernels.products.quantised.lanes import lanes_of
from tokenpod.kernels.products.quantised.quantised_tiles import MatrixTile, Tiles

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Fresh tensors hold NaN: what a kernel does not write shows."""


IN_BYTES = [name for name in KINDS if name not in IN_LANES]
SPLIT_LANES = replace(LANES, parts=1, splits=2, inputs=256)
DESCRIBED_LANES = replace(LANES, parts=1, block_t=16, inputs=128, splits=2, described=True)
HALF_LANES = replace(LANES, parts=2, block_t=8, inputs=64)
#: What makes products of each kind.
WAYS = {
    **{f"{name}-matrix": (name, MATRIX) for name in IN_BYTES},
    **{f"{name}-splits": (name, replace(MATRIX, splits=2)) for name in IN_BYTES},
    **{f"{name}-parts": (name, replace(MATRIX, block_n=16, parts=4)) for name in IN_BYTES},
    **{f"{name}-lanes": (name, LANES) for name in IN_LANES},
    **{f"{name}-splits": (name, SPLIT_LANES) for name in IN_LANES},
    **{f"{name}-halves": (name, HALF_LANES) for name in IN_LANES},
    **{f"{name}-described": (name, DESCRIBED_LANES) for name in IN_LANES},
}
each_way = pytest.mark.parametrize(("name", "tile"), WAYS.values(), ids=WAYS)


@pytest.mark.sampled(13, "gpu")
@each_way
@pytest.mark.parametrize(("n", "k"), [(48, 192), (50, 320)])
@pytest.mark.parametrize("tokens", [1, 3, 18])
def test_products(name, tile, n, k, tokens, draw, device):
    x = draw(tokens, k, dtype=BF16).to(device)
    weight = KINDS[name](draw(n, k).to(device) / 10)
    bias = draw(n, dtype=BF16).to(device)
    table = tiles(weight, (100, tile))
    exact = exact_product(x, weight)
    plain = prepare_linear(weight, None, table)(x)
    assert plain.dtype == BF16
    assert error(plain, exact) < BOUND
    assert error(prepare_linear(weight, bias, table)(x), exact + bias.double()) < BOUND
    residual = draw(tokens, n, dtype=BF16).to(device)
    expected = residual.double() + exact + bias.double()
    prepare_add_linear(weight, bias, table)(x, residual)
    assert error(residual, expected) < BOUND


@pytest.mark.sampled(9, "gpu")
@each_way
@pytest.mark.parametrize("activation", [None, Activation.SILU])
@pytest.mark.parametrize("tokens", [1, 3])
def test_normed_and_gated(name, tile, activation, tokens, draw, device):
    n, k = 64, 192
    x, norm_weight = 3 * draw(tokens, k, dtype=BF16).to(device), draw(k, dtype=BF16).to(device)
    weight = KINDS[name](draw(2 * n, k).to(device) / 10)
    bias = draw(2 * n, dtype=BF16).to(device)
    normed = functional.rms_norm(x.float(), (k,), norm_weight.float(), 1e-5)
    exact = exact_product(normed, weight) + bias.double()
    product = prepare_norm_linear(
        weight, bias, RowNorm(norm_weight, 1e-5), activation, tiles(weight, (100, tile))
    )

    def gated(y):
        gate, up = y.chunk(2, 1)
        return functional.silu(gate) * up if activation else y

    # Rounding follows a norm that is rounded, or is not: neighbours of the format may change.
    assert error(product(x), gated(exact)) < 4 * BOUND


TALL = MatrixTile(block_n=32, block_k=64, block_t=64, warps=4, stages=2)


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize("tile", [TALL, replace(TALL, described=True), replace(TALL, splits=2)])
@pytest.mark.parametrize("n", [64, 96])
def test_blocks_as_high_as_a_tile_with_many_tokens(tile, n, draw, device):
    """Tokens are rows of the sums then; 96 rows end within a block."""
    k, tokens = 192, 70
    dense = draw(2 * n, k).to(device)
    scale = dense[: -(-2 * n // 64), : k // 64].abs() + 0.1
    rounding = Rounding(Number.FP8, 64)
    weight = Fp8Weight(dense.to(torch.float8_e4m3fn), scale, 64, 64, rounding)
    x = draw(tokens, k, dtype=BF16).to(device)
    table = tiles(weight, (100, tile))
    exact = exact_product(x, weight)
    assert error(prepare_linear(weight, None, table)(x), exact) < BOUND
    residual = draw(tokens, 2 * n, dtype=BF16).to(device)
    expected = residual.double() + exact
    prepare_add_linear(weight, None, table)(x, residual)
    assert error(residual, expected) < BOUND
    one = torch.ones(k, dtype=BF16, device=device)
    gated = prepare_norm_linear(weight, None, RowNorm(one, 1e-5), Activation.SILU, table)(x)
    normed = functional.rms_norm(x.float(), (k,), eps=1e-5).to(BF16)
    gate, up = exact_product(normed, weight).chunk(2, 1)
    assert error(gated, functional.silu(gate) * up) < 4 * BOUND


@pytest.mark.parametrize(
    "name", ["int8", "fp8", "int4-64", "int4-shuffled", "groups8-zeros", "nf4", "mxfp4"]
)
def test_many_tokens_take_no_tile(name, draw, device):
    x, weight = draw(9, 192, dtype=BF16).to(device), KINDS[name](draw(32, 192).to(device) / 10)
    got = prepare_linear(weight, None, Tiles({}, {}))(x)
    assert error(got, exact_product(x, weight)) < BOUND


def test_float32_is_not_rounded(draw, device):
    x, weight = draw(3, 64).to(device), Int8Weight.made_of(draw(16, 64).to(device))
    assert error(prepare_linear(weight, None)(x), exact_product(x, weight)) < 1e-6


@each_way
def test_what_is_no_number_stays_in_its_token(name, tile, draw, device):
    x = draw(3, 128, dtype=BF16).to(device)
    x[1, 4] = float("nan")
    weight = KINDS[name](draw(32, 128).to(device))
    got = prepare_linear(weight, None, tiles(weight, (100, tile)))(x)
    assert got.isnan().all(dim=1).tolist() == [False, True, False]
    assert not got[[0, 2]].isnan().any()


@pytest.mark.parametrize("rounding", [FP8, INT8, Rounding(Number.FP8, 64)], ids=str)
def test_inputs_are_rounded_as_the_format_says(rounding, draw, device):
    x = draw(5, 192, dtype=BF16).to(device)
    made = round_inputs(x, rounding)
    numbers, scale = rounding.rounded(x)
    torch.testing.assert_close(made.scale.t(), scale)
    differ = (made.numbers.float() != numbers.float()).float().mean()
    assert differ < 0.01  # the reciprocal of a scale is rounded


def test_a_token_of_zeros_yields_its_bias(draw, device):
    bias = draw(32, dtype=BF16).to(device)
    x = torch.zeros(1, 128, dtype=BF16, device=device)
    for name, tile in WAYS.values():
        weight = KINDS[name](draw(32, 128).to(device))
        got = prepare_linear(weight, bias, tiles(weight, (100, tile)))(x)
        torch.testing.assert_close(got[0], bias)


@pytest.mark.parametrize("name", IN_LANES)
@pytest.mark.parametrize(("n", "k"), [(48, 192), (50, 320)])
def test_lanes_hold_the_same_numbers(name, n, k, draw, device):
    weight = KINDS[name](draw(n, k).to(device) / 10)
    made = lanes_of(weight)
    dense = weight.dequantised(torch.float64)
    if made.order is not None:
        dense = dense[:, made.order]
    assert error(made.dequantised(torch.float16), dense) < BOUND
    assert error(made.dequantised(BF16), dense) < BOUND


def test_rows_that_are_not_contiguous_are_refused(draw, device):
    weight = KINDS["int8-rounded"](draw(16, 32).to(device))
    with pytest.raises(ValueError, match=r"a weight \[16, 16\] of 8 bits is not contiguous"):
        prepare_linear(replace(weight, numbers=weight.numbers[:, ::2]), None)
