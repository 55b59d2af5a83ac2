"""Products of one token with weights of e4m3 by their own kernels: against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from support.kernels.quantised_weights import (
    BOUND,
    KINDS,
    MATRIX,
    error,
    exact_product,
    tiles,
)
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.products.quantised import products
from tokenpod.kernels.products.quantised.format_products import (
    prepare_add_linear,
    prepare_linear,
    prepare_norm_linear,
)
from tokenpod.kernels.products.quantised.quantised_tiles import TokenTile

BF16 = torch.bfloat16
#: With a launch that rounds before, and without; and three programs that walk over blocks of rows.
TOKENS = (TokenTile(16, 64, 1), TokenTile(16, 64, 1, rounds=True))
WALKS = TokenTile(4, 0, 1, rounds=True, programs=3)


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Fresh tensors hold NaN: what a kernel does not write shows."""


#: What the kernel of one token takes.
OF_ONE_TOKEN = {name: KINDS[name] for name in ("fp8", "fp8-static")}


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("tile", [*TOKENS, WALKS], ids=["rounded", "rounds", "walks"])
@pytest.mark.parametrize("name", OF_ONE_TOKEN)
def test_one_token(name, tile, draw, device, monkeypatch):
    def other(*which, **named):
        raise AssertionError("another kernel made the product")

    monkeypatch.setattr(products, "multiply", other)
    n, k = 9, 768
    if tile is WALKS:
        # A row of such a tile is a power of two.
        k = 512
        tile = replace(tile, words=k // 4)
    x, norm_weight = draw(1, k, dtype=BF16).to(device), draw(k, dtype=BF16).to(device)
    weight = OF_ONE_TOKEN[name](draw(2 * n, k).to(device) / 10)
    bias = draw(2 * n, dtype=BF16).to(device)
    table = tiles(weight, (1, tile))
    exact = exact_product(x, weight)
    assert error(prepare_linear(weight, None, table)(x), exact) < BOUND
    residual = draw(1, 2 * n, dtype=BF16).to(device)
    expected = residual.double() + exact + bias.double()
    prepare_add_linear(weight, bias, table)(x, residual)
    assert error(residual, expected) < 2 * BOUND
    normed = functional.rms_norm(x.float(), (k,), norm_weight.float(), 1e-5)
    gate, up = (exact_product(normed, weight) + bias.double()).chunk(2, 1)
    product = prepare_norm_linear(weight, bias, RowNorm(norm_weight, 1e-5), Activation.SILU, table)
    # Rounding follows a norm that is rounded, or is not: with a static scale, whatever the numbers
    # are, neighbours of e4m3 change more often.
    bound = (6 if name == "fp8-static" else 4) * BOUND
    assert error(product(x), functional.silu(gate) * up) < bound


@pytest.mark.parametrize("tile", TOKENS, ids=["rounded", "rounds"])
@pytest.mark.parametrize("name", ["fp8"])
def test_one_token_that_is_no_number_or_nothing(name, tile, draw, device):
    weight, bias = KINDS[name](draw(16, 256).to(device)), draw(16, dtype=BF16).to(device)
    product = prepare_linear(weight, bias, tiles(weight, (1, tile)))
    x = torch.zeros(1, 256, dtype=BF16, device=device)
    torch.testing.assert_close(product(x)[0], bias)
    for worst in (float("nan"), float("inf")):
        x[0, 7] = worst
        assert product(x).isnan().all()


@pytest.mark.parametrize("name", ["int8-rounded", "fp8-blocks"])
def test_another_kernel_takes_what_that_of_one_token_cannot(name, draw, device):
    """Whole numbers that are rounded, a scale for several columns: another's tile."""
    x, weight = draw(1, 192, dtype=BF16).to(device), KINDS[name](draw(32, 192).to(device) / 10)
    table = tiles(weight, (1, TOKENS[0]), (1, MATRIX))
    assert error(prepare_linear(weight, None, table)(x), exact_product(x, weight)) < BOUND
