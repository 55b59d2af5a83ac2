"""Weights of 8 bits: how they are made, and products with them."""

from __future__ import annotations

import pytest
import torch

from tokenpod.kernels.backends import cpu, reference
from tokenpod.kernels.operations.compose import linear_of
from tokenpod.kernels.products.formats.int8 import Int8Weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_each_row_has_the_scale_of_its_largest_number(draw):
    weight = draw(7, 40) * torch.arange(7)[:, None]  # the first row is zero
    made = Int8Weight.made_of(weight)
    assert made.numbers.dtype == torch.int8
    torch.testing.assert_close(made.scale, weight.abs().amax(1) / 127)
    assert made.numbers.abs().amax(1).tolist() == [0] + [127] * 6
    error = (made.dequantised(torch.float32) - weight).abs()
    assert (error <= made.scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_shows_in_every_product_with_its_row(bad, draw):
    weight = draw(3, 8)
    weight[1, 2] = bad
    y = Int8Weight.made_of(weight).multiply(draw(2, 8), None)
    assert y.isfinite().tolist() == [[True, False, True]] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 33])
def test_products(tokens, bias, dtype, draw):
    x, weight = draw(tokens, 100, dtype=dtype), Int8Weight.made_of(draw(70, 100) / 10)
    offset = draw(70, dtype=dtype) if bias else None
    exact = x.double() @ weight.dequantised(torch.float64).t() + (offset if bias else 0)
    for ops in (reference, cpu):
        got = linear_of(ops.OPERATIONS, weight, offset)(x)
        assert got.dtype == dtype
        assert (got.double() - exact).norm() < 4 * torch.finfo(dtype).eps * exact.norm()


def test_a_row_of_zeros_yields_its_bias(draw):
    weight = Int8Weight(torch.zeros(5, 8, dtype=torch.int8), torch.zeros(5))
    bias = draw(5)
    for ops in (reference, cpu):
        got = linear_of(ops.OPERATIONS, weight, bias)(draw(1, 8))
        torch.testing.assert_close(got[0], bias)
