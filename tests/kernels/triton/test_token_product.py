"""Products of one token with weights of 8 and 4 bits by their own kernels: against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantised_weights import (
    BOUND,
    IN_LANES,
    KINDS,
    LANES,
    MATRIX,
    error,
    exact_product,
    int4,
    tiles,
)
from torch.nn import functional

from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.products.quantised import laned, products
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


#: What the kernel of one token takes; the last one has inputs in another order.
OF_ONE_TOKEN = {
    **{name: KINDS[name] for name in ("int8", "fp8", "fp8-static", "int4-128", "int4-32")},
    "int4-64": lambda dense: int4(dense, 64),
    "int4-192": lambda dense: int4(dense, 192),
    "int4-ordered": lambda dense: replace(
        int4(dense, 128),
        order=torch.randperm(dense.shape[1], generator=torch.Generator().manual_seed(2)).to(
            dense.device
        ),
    ),
}


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("tile", [*TOKENS, WALKS], ids=["rounded", "rounds", "walks"])
@pytest.mark.parametrize("name", OF_ONE_TOKEN)
def test_one_token(name, tile, draw, device, monkeypatch):
    def other(*which, **named):
        raise AssertionError("another kernel made the product")

    for module, kernel in ((products, "multiply"), (laned, "multiply_lanes")):
        monkeypatch.setattr(module, kernel, other)
    n, k = 9, 768
    if tile is WALKS:
        # A row of such a tile is a power of two.
        k = 512
        tile = replace(tile, words=k // (8 if name.startswith("int4") else 4))
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
