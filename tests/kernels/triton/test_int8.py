"""Products with weights of 8 bits by the kernel: against float64, at odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.triton import int8
from tokenpod.kernels.triton.int8 import Int8Tile, prepare_int8_linear

TILES = [Int8Tile(block_k=64), Int8Tile(block_n=32, block_k=32, warps=2, stages=2)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh tensors hold NaN: what a kernel does not write shows."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, torch.nan, **how))


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=["narrow", "wide"])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (50, 100)])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_few_tokens(tokens, n, k, tile, dtype, draw, device):
    x = draw(tokens, k, dtype=dtype).to(device)
    weight = Int8Weight.made_of(draw(n, k).to(device) / 10)
    bias, delta = draw(n, dtype=dtype).to(device), draw(tokens, n, dtype=dtype).to(device)
    exact = x.double() @ weight.dequantised(torch.float64).t()
    bound = torch.finfo(dtype).eps
    plain = prepare_int8_linear(weight, None, tile)(x)
    assert plain.dtype == dtype
    assert error(plain, exact) < bound
    exact += bias.double() + delta.double()
    assert error(prepare_int8_linear(weight, bias, tile)(x, delta), exact) < bound


@pytest.mark.parametrize("tokens", [int8.MOST_TOKENS, int8.MOST_TOKENS + 1])
def test_many_tokens_are_the_librarys(tokens, draw, device, monkeypatch):
    asked = []
    monkeypatch.setattr(int8, "multiply_int8", lambda x, *rest: asked.append(len(x)))
    weight = Int8Weight.made_of(draw(16, 32).to(device))
    prepare_int8_linear(weight, None)(draw(tokens, 32, dtype=torch.bfloat16).to(device))
    assert asked == ([tokens] if tokens <= int8.MOST_TOKENS else [])


def test_float32_is_not_rounded(draw, device):
    x, weight = draw(3, 32).to(device), Int8Weight.made_of(draw(16, 32).to(device))
    exact = x.double() @ weight.dequantised(torch.float64).t()
    assert error(prepare_int8_linear(weight, None)(x), exact) < 1e-6


def test_what_is_no_number_stays_in_its_token(draw, device):
    x = draw(3, 32, dtype=torch.bfloat16).to(device)
    x[1, 4] = float("nan")
    got = prepare_int8_linear(Int8Weight.made_of(draw(16, 32).to(device)), None)(x)
    assert got.isnan().all(dim=1).tolist() == [False, True, False]
    assert not got[[0, 2]].isnan().any()


def test_rows_that_are_not_contiguous_are_refused(draw, device):
    weight = Int8Weight.made_of(draw(16, 32).to(device))
    with pytest.raises(ValueError, match=r"a weight \[16, 16\] of 8 bits is not contiguous"):
        prepare_int8_linear(replace(weight, numbers=weight.numbers[:, ::2]), None)
