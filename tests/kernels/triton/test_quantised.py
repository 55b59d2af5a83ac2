"""Products with weights of 8 and 4 bits by the kernels: against float64, at odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tokenpod.kernels.formats.fp8 import Fp8Weight
from tokenpod.kernels.formats.grouped import GroupedWeight, packed_pairs
from tokenpod.kernels.formats.int4 import Int4Weight
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.formats.rounding import Number, Rounding
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.triton.quantised import (
    laned,
    prepare_add_linear,
    prepare_linear,
    prepare_norm_linear,
    products,
)
from tokenpod.kernels.triton.quantised.laned import kind_of_lanes
from tokenpod.kernels.triton.quantised.lanes import lanes_of
from tokenpod.kernels.triton.quantised.products import kind_of
from tokenpod.kernels.triton.quantised.rounding import round_inputs
from tokenpod.kernels.triton.quantised.tiles import (
    AddTile,
    LaneTile,
    MatrixTile,
    Tiles,
    TokenTile,
)
from tokenpod.kernels.triton.quantised.widen import widen_lanes
from tokenpod.models.mxfp4 import VALUES

BF16 = torch.bfloat16
FP8, INT8 = Rounding(Number.FP8), Rounding(Number.INT8)
#: (most tokens that each takes, tile)
ADD = AddTile(block_n=4, block_k=64, warps=2)
MATRIX = MatrixTile(block_n=32, block_k=64, block_t=16, warps=2, stages=2, panel=2)
LANES = LaneTile(block_n=32, parts=4, warps=2, stages=2)
#: With a launch that rounds before, and without.
TOKENS = (TokenTile(16, 64, 1), TokenTile(16, 64, 1, rounds=True))


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Fresh tensors hold NaN: what a kernel does not write shows."""


def int4(dense, group, *, zeros=False, index=None):
    n, k = dense.shape
    groups = -(-k // group)
    generator = torch.Generator(dense.device).manual_seed(3)
    numbers = torch.randint(
        0, 16, (n, k), generator=generator, dtype=torch.uint8, device=dense.device
    )
    zero = torch.randint(
        5, 11, (n, groups), generator=generator, dtype=torch.uint8, device=dense.device
    )
    scale = (dense[:, :groups].abs() / 20 + 0.01).bfloat16()
    return Int4Weight.of(numbers, scale, zero if zeros else None, group, index)


def blocks(dense, rounding):
    n, k = dense.shape
    scale = dense[: -(-n // 32), : -(-k // 64)].abs() + 0.1
    return Fp8Weight(dense.to(torch.float8_e4m3fn), scale, 32, 64, rounding)


def shuffled(dense):
    k = dense.shape[1]
    index = torch.randperm(k, generator=torch.Generator().manual_seed(2)).to(dense.device) // 64
    return int4(dense, 64, zeros=True, index=index)


def grouped(dense, *, zeros=False, table=None, exponents=False):
    generator = torch.Generator().manual_seed(4)
    size, most = (64, 256) if table is None else (32, 16)

    def drawn(*shape, first=0, most=most):
        numbers = torch.randint(first, most, shape, generator=generator, dtype=torch.uint8)
        return numbers.to(dense.device)

    n, k = dense.shape
    index = (torch.arange(k, device=dense.device) // size).to(torch.int32)
    groups = -(-k // size)
    scale = drawn(n, groups, first=118, most=124)
    if not exponents:
        scale = scale.bfloat16() / 1000
    codes = drawn(n, k)
    return GroupedWeight(
        codes if table is None else packed_pairs(codes),
        scale,
        index,
        drawn(n, groups, first=100, most=140) if zeros else None,
        None if table is None else table.to(dense.device),
    )


#: By name: of a dense weight [n, k], k a multiple of 64.
KINDS = {
    "int8": Int8Weight.made_of,
    "int8-rounded": lambda dense: replace(Int8Weight.made_of(dense), rounding=INT8),
    "fp8": Fp8Weight.made_of,
    "fp8-static": lambda dense: replace(
        Fp8Weight.made_of(dense),
        rounding=Rounding(Number.FP8, static=torch.tensor(0.01, device=dense.device)),
    ),
    "fp8-blocks": lambda dense: blocks(dense, Rounding(Number.FP8, 64)),
    "fp8-blocks-wide-inputs": lambda dense: blocks(dense, None),
    "int4-128": Int4Weight.made_of,
    "int4-64": lambda dense: int4(dense, 64, zeros=True),
    "int4-32": lambda dense: int4(dense, 32),
    "int4-256": lambda dense: int4(dense, 256),
    "int4-shuffled": shuffled,
    "groups8": GroupedWeight.made_of,
    "groups8-zeros": lambda dense: grouped(dense, zeros=True),
    "nf4": lambda dense: grouped(dense, table=torch.linspace(-1, 1, 16)),
    "mxfp4": lambda dense: grouped(dense, table=VALUES, exponents=True),
}


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def exact_product(x, weight):
    rounded = weight.rounded_inputs(x.float()).double()
    return rounded @ weight.dequantised(torch.float64).t()


#: Those that are put into lanes.
IN_LANES = [name for name in KINDS if name.startswith(("int4", "groups8", "nf4", "mxfp4"))]
IN_BYTES = [name for name in KINDS if name not in IN_LANES]
#: What makes products of each kind.
WAYS = {
    **{f"{name}-add": (name, ADD) for name in IN_BYTES},
    **{f"{name}-matrix": (name, MATRIX) for name in IN_BYTES},
    **{f"{name}-splits": (name, replace(MATRIX, splits=2)) for name in IN_BYTES},
    **{f"{name}-parts": (name, replace(MATRIX, block_n=16, parts=4)) for name in IN_BYTES},
    **{f"{name}-lanes": (name, LANES) for name in IN_LANES},
    **{f"{name}-splits": (name, replace(LANES, parts=1, splits=2, lanes=16)) for name in IN_LANES},
}
each_way = pytest.mark.parametrize(("name", "tile"), WAYS.values(), ids=WAYS)


def tiles(weight, *entries):
    """A table for a weight."""
    if not isinstance(weight, (Int4Weight, GroupedWeight)):
        return Tiles({kind_of(weight): list(entries)}, {})
    made = lanes_of(weight)
    return Tiles({} if made is None else {kind_of_lanes(made): list(entries)}, {})


#: Of a result: bfloat16's own, and what digits of a token's largest number or an input that rounds
#: to the other neighbour make of it.
BOUND = 2 * torch.finfo(BF16).eps


@pytest.mark.sampled(13, "gpu")
@each_way
@pytest.mark.parametrize(("n", "k"), [(48, 192), (50, 320)])
@pytest.mark.parametrize("tokens", [1, 3, 18])
def test_products(name, tile, n, k, tokens, draw, device):
    if tile is ADD and tokens > 4:
        tile = replace(MATRIX, block_t=32)
    x = draw(tokens, k, dtype=BF16).to(device)
    weight = KINDS[name](draw(n, k).to(device) / 10)
    bias, delta = draw(n, dtype=BF16).to(device), draw(tokens, n, dtype=BF16).to(device)
    table = tiles(weight, (100, tile))
    exact = exact_product(x, weight)
    plain = prepare_linear(weight, None, table)(x)
    assert plain.dtype == BF16
    assert error(plain, exact) < BOUND
    more = prepare_linear(weight, bias, table)(x, delta)
    assert error(more, exact + bias.double() + delta.double()) < BOUND
    residual = draw(tokens, n, dtype=BF16).to(device)
    expected = residual.double() + exact + bias.double()
    prepare_add_linear(weight, bias, table)(x, residual)
    assert error(residual, expected) < BOUND
    expected += delta.double() + exact + bias.double()
    prepare_add_linear(weight, bias, table)(x, residual, delta)
    assert error(residual, expected) < 2 * BOUND


@pytest.mark.sampled(9, "gpu")
@each_way
@pytest.mark.parametrize("activation", [None, Activation.SILU])
@pytest.mark.parametrize("tokens", [1, 3])
def test_normed_and_gated(name, tile, activation, tokens, draw, device):
    n, k = 64, 192
    x, norm_weight = 3 * draw(tokens, k, dtype=BF16).to(device), draw(k, dtype=BF16).to(device)
    weight = KINDS[name](draw(2 * n, k).to(device) / 10)
    bias, delta = draw(2 * n, dtype=BF16).to(device), draw(tokens, 2 * n, dtype=BF16).to(device)
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
    assert error(product(x, delta), gated(exact + delta.double())) < 4 * BOUND


#: What the kernel of one token takes; the last one has inputs in another order.
OF_ONE_TOKEN = {
    **{name: KINDS[name] for name in ("int8", "fp8", "fp8-static", "int4-128", "int4-32")},
    "int4-64": lambda dense: int4(dense, 64),
    "int4-192": lambda dense: int4(dense, 192),
    "int4-ordered": lambda dense: replace(
        int4(dense, 128),
        order=torch.randperm(dense.shape[1], generator=torch.Generator().manual_seed(2)),
    ),
}


@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize("tile", TOKENS, ids=["rounded", "rounds"])
@pytest.mark.parametrize("name", OF_ONE_TOKEN)
def test_one_token(name, tile, draw, device, monkeypatch):
    def other(*which, **named):
        raise AssertionError("another kernel made the product")

    for module, kernel in ((products, "multiply"), (laned, "multiply_lanes")):
        monkeypatch.setattr(module, kernel, other)
    n, k = 9, 768
    x, norm_weight = draw(1, k, dtype=BF16).to(device), draw(k, dtype=BF16).to(device)
    weight = OF_ONE_TOKEN[name](draw(2 * n, k).to(device) / 10)
    bias, delta = draw(2 * n, dtype=BF16).to(device), draw(1, 2 * n, dtype=BF16).to(device)
    table = tiles(weight, (1, tile))
    exact = exact_product(x, weight)
    assert error(prepare_linear(weight, None, table)(x), exact) < BOUND
    residual = draw(1, 2 * n, dtype=BF16).to(device)
    expected = residual.double() + exact + bias.double() + delta.double()
    prepare_add_linear(weight, bias, table)(x, residual, delta)
    assert error(residual, expected) < 2 * BOUND
    normed = functional.rms_norm(x.float(), (k,), norm_weight.float(), 1e-5)
    gate, up = (exact_product(normed, weight) + bias.double()).chunk(2, 1)
    product = prepare_norm_linear(weight, bias, RowNorm(norm_weight, 1e-5), Activation.SILU, table)
    assert error(product(x), functional.silu(gate) * up) < 4 * BOUND


@pytest.mark.parametrize("tile", TOKENS, ids=["rounded", "rounds"])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4-128"])
def test_one_token_that_is_no_number_or_nothing(name, tile, draw, device):
    weight, bias = KINDS[name](draw(16, 256).to(device)), draw(16, dtype=BF16).to(device)
    product = prepare_linear(weight, bias, tiles(weight, (1, tile)))
    x = torch.zeros(1, 256, dtype=BF16, device=device)
    torch.testing.assert_close(product(x)[0], bias)
    for worst in (float("nan"), float("inf")):
        x[0, 7] = worst
        assert product(x).isnan().all()


@pytest.mark.parametrize("name", ["int4-shuffled", "int4-128", "int8-rounded", "fp8-blocks"])
def test_another_kernel_takes_what_that_of_one_token_cannot(name, draw, device):
    """Zeros, blocks of lanes that are not full, a scale for several columns: another's tile."""
    x, weight = draw(1, 192, dtype=BF16).to(device), KINDS[name](draw(32, 192).to(device) / 10)
    behind = LANES if name in IN_LANES else MATRIX
    table = tiles(weight, (1, TOKENS[0]), (1, behind))
    assert error(prepare_linear(weight, None, table)(x), exact_product(x, weight)) < BOUND


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


@pytest.mark.parametrize("rounding", [None, FP8, INT8, Rounding(Number.FP8, 64)], ids=str)
def test_inputs_are_rounded_as_the_format_says(rounding, draw, device):
    x = draw(5, 192, dtype=BF16).to(device)
    made = round_inputs(x, rounding)
    if rounding is None:
        whole = 128 * made.numbers[:5].float() + made.numbers[5:].float()
        applied = whole * made.scale
        assert (applied - x.float()).abs().max() < x.float().abs().max() / 2**14
        return
    numbers, scale = rounding.rounded(x)
    torch.testing.assert_close(made.scale, scale)
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
    assert error(widen_lanes(made, torch.float16), dense) < BOUND
    assert error(widen_lanes(made, BF16), dense) < BOUND


def test_each_count_of_tokens_has_its_kernel(draw, device, monkeypatch):
    asked = []
    monkeypatch.setattr(products, "_multiply_add", lambda x, *rest: asked.append("add"))
    monkeypatch.setattr(products, "multiply", lambda x, *rest: asked.append("matrix"))
    weight = Int8Weight.made_of(draw(64, 64).to(device))
    dense = weight.dequantised(BF16)
    monkeypatch.setattr(products, "widen_bytes", lambda *which: asked.append("many") or dense)
    for tokens in (1, 2, 64, 65):
        prepare_linear(weight, None)(draw(tokens, 64, dtype=BF16).to(device))
    assert asked == ["add", "matrix", "matrix", "many"]


def test_rows_that_are_not_contiguous_are_refused(draw, device):
    weight = Int8Weight.made_of(draw(16, 32).to(device))
    with pytest.raises(ValueError, match=r"a weight \[16, 16\] of 8 bits is not contiguous"):
        prepare_linear(replace(weight, numbers=weight.numbers[:, ::2]), None)
