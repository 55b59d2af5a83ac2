"""Products by our kernels: against float64, at odd sizes, outputs poisoned before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tokenpod.kernels.backends import reference
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise.triton_pointwise import act_mul
from tokenpod.kernels.products import triton_product as product
from tokenpod.kernels.products.product_tiles import Kind, Tile, Tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MULTIPLY_ADD = Tile(Kind.MULTIPLY_ADD, block_n=4, block_k=64, ahead=256)
MATRIX = Tile(Kind.MATRIX, block_n=16, block_k=32, warps=2, stages=3, ahead=256)
SHARED = replace(MATRIX, splits=3, bulk=True)
TILED = Tile(Kind.TILED, block_n=32, block_k=32, stages=2, block_t=16)
LIBRARY = Tile(Kind.LIBRARY)
TILES = {
    "multiply_add": MULTIPLY_ADD,
    "matrix": MATRIX,
    "shared": SHARED,
    "tiled": TILED,
    "library": LIBRARY,
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh tensors hold NaN: what a kernel does not write shows."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, torch.nan, **how))


@pytest.fixture(params=TILES)
def tiles(request):
    """A table that names one kernel for everything."""
    return Tiles({}, [(1 << 30, TILES[request.param])])


@pytest.fixture
def case(draw, device):
    """Input, weight, bias or None, all scaled so that results are near one."""

    def make(tokens, n, k, dtype, bias):
        x, weight = draw(tokens, k, dtype=dtype), draw(n, k) * k**-0.5
        offset = draw(n, dtype=dtype).to(device) if bias else None
        return x.to(device), weight.to(dtype).to(device), offset

    return make


def agree(got, truth):
    assert got.shape == truth.shape
    error = ((got.double() - truth).norm() / truth.norm()).item()
    assert error < 8 * torch.finfo(got.dtype).eps, error


def wide(tensor):
    return None if tensor is None else tensor.double()


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_product(tokens, bias, dtype, tiles, case):
    x, weight, offset = case(tokens, 21, 100, dtype, bias)
    got = product.prepare_linear(weight, offset, tiles)(x)
    assert got.dtype == dtype
    agree(got, functional.linear(wide(x), wide(weight), wide(offset)))


@pytest.mark.parametrize("shape", [(1, 1), (2, 128), (33, 64), (64, 200), (5, 7)], ids=str)
def test_every_shape_of_weight(shape, tiles, case):
    x, weight, _ = case(2, *shape, torch.float32, False)
    agree(product.prepare_linear(weight, None, tiles)(x), wide(x) @ wide(weight).T)


@pytest.mark.parametrize("tokens", [2, 8, 17, 40])
def test_more_tokens(tokens, tiles, case):
    x, weight, _ = case(tokens, 20, 96, torch.bfloat16, False)
    agree(product.prepare_linear(weight, None, tiles)(x), wide(x) @ wide(weight).T)


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_product_of_the_normed_residual(tokens, bias, dtype, tiles, case, draw, device):
    x, weight, offset = case(tokens, 21, 100, dtype, bias)
    norm = RowNorm(draw(100, dtype=dtype).to(device), 1e-5)
    x *= 30
    before = x.clone()
    got = product.prepare_norm_linear(weight, offset, norm, None, tiles)(x)
    normed = reference.rms_norm(wide(x), wide(norm.weight), 1e-5)
    agree(got, functional.linear(normed, wide(weight), wide(offset)))
    assert torch.equal(x, before)


@pytest.mark.sampled(7, "gpu")
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_gated_product(tokens, bias, activation, tiles, case, draw, device):
    x, weight, offset = case(tokens, 2 * 21, 100, torch.float32, bias)
    norm = RowNorm(draw(100).to(device), 1e-5)
    got = product.prepare_norm_linear(weight, offset, norm, activation, tiles)(x)
    normed = reference.rms_norm(wide(x), wide(norm.weight), 1e-5)
    truth = reference.act_mul(functional.linear(normed, wide(weight), wide(offset)), activation)
    agree(got, truth)


@pytest.mark.parametrize("kind", ["multiply_add", "matrix", "tiled"])
def test_gates_are_rounded_as_if_they_were_stored(kind, case, draw, device):
    tiles = Tiles({}, [(1 << 30, TILES[kind])])
    x, weight, offset = case(5, 96, 136, torch.bfloat16, bias=True)
    norm = RowNorm(draw(136, dtype=torch.bfloat16).to(device), 1e-6)
    stored = product.prepare_norm_linear(weight, offset, norm, None, tiles)(x)
    gated = product.prepare_norm_linear(weight, offset, norm, Activation.SILU, tiles)(x)
    assert torch.equal(gated, act_mul(stored, Activation.SILU))


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_product_added_in_place(tokens, bias, dtype, tiles, case, draw, device):
    x, weight, offset = case(tokens, 21, 100, dtype, bias)
    residual = draw(tokens, 21, dtype=dtype).to(device)
    truth = wide(residual) + functional.linear(wide(x), wide(weight), wide(offset))
    assert product.prepare_add_linear(weight, offset, tiles)(x, residual) is None
    agree(residual, truth)


def test_a_normed_product_of_values_whose_squares_pass_half_precision(tiles, case, draw, device):
    x, weight, _ = case(2, 8, 64, torch.float16, False)
    norm = RowNorm(draw(64, dtype=torch.float16).to(device), 1e-5)
    assert product.prepare_norm_linear(weight, None, norm, None, tiles)(x * 3000).isfinite().all()


def test_a_token_does_not_depend_on_its_neighbours(tiles, case):
    x, weight, _ = case(4, 24, 96, torch.float32, False)
    linear = product.prepare_linear(weight, None, tiles)
    expected = linear(x)
    x[2] = torch.nan
    got = linear(x)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3]], expected[[0, 1, 3]])


def test_shares_of_nothing_add_nothing(case):
    x, weight, offset = case(3, 21, 40, torch.float32, True)
    more_than_blocks = Tiles({}, [(64, replace(SHARED, splits=5))])
    got = product.prepare_linear(weight, offset, more_than_blocks)(x)
    agree(got, functional.linear(wide(x), wide(weight), wide(offset)))


def test_a_weight_whose_rows_are_not_one_after_another_is_refused(draw, device):
    weight = draw(8, 6).to(device).t()
    with pytest.raises(ValueError, match=r"\[6, 8\] is not contiguous"):
        product.prepare_linear(weight, None)


SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1000, 896), (37, 4864)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 16, 33, 64])
def test_models_shapes(tokens, shape, dtype, case, draw, device):
    """With the measured table, every composite."""
    x, weight, offset = case(tokens, *shape, dtype, True)
    residual = draw(tokens, shape[0], dtype=dtype).to(device)
    norm = RowNorm(draw(shape[1], dtype=dtype).to(device), 1e-5)
    truth = functional.linear(wide(x), wide(weight), wide(offset))
    agree(product.prepare_linear(weight, offset)(x), truth)
    total = wide(residual) + truth
    product.prepare_add_linear(weight, offset)(x, residual)
    agree(residual, total)
    normed = reference.rms_norm(wide(x), wide(norm.weight), 1e-5)
    truth = functional.linear(normed, wide(weight), wide(offset))
    agree(product.prepare_norm_linear(weight, offset, norm, None)(x), truth)
    if shape[0] % 2 == 0:
        gated = product.prepare_norm_linear(weight, offset, norm, Activation.SILU)(x)
        agree(gated, reference.act_mul(truth, Activation.SILU))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [MULTIPLY_ADD, MATRIX, SHARED], ids=["rows", "matrix", "shared"])
@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("block_n", [2, 16, 64])
def test_tiles_of_every_size(tile, stages, block_n, case):
    if tile.kind is Kind.MATRIX:
        block_n = max(16, block_n)
    table = Tiles({}, [(64, replace(tile, stages=stages, block_n=block_n))])
    x, weight, _ = case(4, 1030, 1000, torch.bfloat16, False)
    agree(product.prepare_linear(weight, None, table)(x), wide(x) @ wide(weight).T)
