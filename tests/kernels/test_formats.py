"""Formats of fewer bits: what their numbers stand for, whole, cut and joined."""

from __future__ import annotations

import pytest
import torch

from tokenpod.kernels.backends import cpu, reference
from tokenpod.kernels.operations.compose import linear_of
from tokenpod.kernels.products import compiled_whole as whole
from tokenpod.kernels.products.formats import MADE_AT_LOAD
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Number, Rounding

E4M3 = torch.float8_e4m3fn


def int4(draw, outputs=10, inputs=200, group=64, *, zeros=True, index=None):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    groups = -(-inputs // group)
    zero = torch.randint(0, 16, (outputs, groups), generator=generator, dtype=torch.uint8)
    scale = draw(outputs, groups).abs() / 10
    made = Int4Weight.of(numbers, scale, zero if zeros else None, group, index)
    groups_of = torch.arange(inputs) // group if index is None else index
    offset = zero[:, groups_of].float() if zeros else 8
    return made, (numbers.float() - offset) * scale[:, groups_of]


def blocked(draw, outputs=10, inputs=200, rows=4, columns=64, rounding=None):
    numbers = draw(outputs, inputs).to(E4M3)
    scale = draw(-(-outputs // rows), -(-inputs // columns)).abs()
    wide = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    return Fp8Weight(numbers, scale, rows, columns, rounding), numbers.float() * wide


@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "fp8"])
@pytest.mark.parametrize("part", [range(0, 200), range(96, 200), range(50, 101), range(199, 200)])
def test_a_cut_inside_a_group_keeps_the_numbers(bits, part, draw):
    weight, exact = int4(draw) if bits == 4 else blocked(draw)
    assert weight.shape == exact.shape
    assert torch.equal(weight.dequantised(torch.float32), exact)
    cut = weight.inputs(part)
    assert cut.shape == (10, len(part))
    assert torch.equal(cut.dequantised(torch.float32), exact[:, part.start : part.stop])
    again = cut.inputs(range(len(part) // 3, len(part)))
    assert torch.equal(
        again.dequantised(torch.float32), exact[:, part.start + len(part) // 3 : part.stop]
    )


@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "fp8"])
@pytest.mark.parametrize("rows", [slice(3, 9), torch.tensor([9, 0, 5])], ids=["slice", "picked"])
def test_outputs_are_kept_with_their_scales(bits, rows, draw):
    weight, exact = int4(draw) if bits == 4 else blocked(draw)
    assert torch.equal(weight.outputs(rows).dequantised(torch.float32), exact[rows])


@pytest.mark.parametrize("split", [4, 5])
def test_parts_are_joined_again(split, draw):
    for weight, exact in (int4(draw), blocked(draw)):
        parts = weight.outputs(slice(0, split)), weight.outputs(slice(split, 10))
        whole = type(weight).joined(parts)
        assert torch.equal(whole.dequantised(torch.float32), exact)


def test_parts_that_differ_in_groups_stay_apart(draw):
    assert Int4Weight.joined([int4(draw)[0], int4(draw, group=32)[0]]) is None
    assert Fp8Weight.joined([blocked(draw)[0], blocked(draw, columns=32)[0]]) is None
    rounded = blocked(draw, rounding=Rounding(Number.FP8))[0]
    assert Fp8Weight.joined([blocked(draw)[0], rounded]) is None


def test_of_zeros_some_parts_may_have_none(draw):
    (plain, exact), (zeros, more) = int4(draw, zeros=False), int4(draw)
    whole = Int4Weight.joined([plain, zeros])
    assert torch.equal(whole.dequantised(torch.float32), torch.cat([exact, more]))


@pytest.mark.parametrize("part", [range(0, 192), range(96, 192)])
def test_inputs_out_of_order_are_sorted_by_group(part, draw):
    shuffled = torch.randperm(192, generator=torch.Generator().manual_seed(2)) // 64
    weight, exact = int4(draw, inputs=192, index=shuffled)
    assert weight.index is None  # each group has 64 inputs again
    cut = weight.inputs(part)
    assert torch.equal(cut.dequantised(torch.float32), exact[:, part.start : part.stop])
    assert cut.scale.shape == weight.scale.shape
    x = draw(3, len(part))
    torch.testing.assert_close(cut.multiply(x, None), x @ exact[:, part.start : part.stop].t())


@pytest.mark.parametrize("name", MADE_AT_LOAD)
def test_made_weights_are_near_and_no_larger_than_told(name, draw):
    dense = draw(12, 300) * torch.arange(12)[:, None]  # the first row is zero
    made = MADE_AT_LOAD[name].made_of(dense)
    error = (made.dequantised(torch.float32) - dense).norm() / dense.norm()
    assert error < {"int8": 0.01, "fp8": 0.04, "int4": 0.12}[name]
    assert made.nbytes == made.bytes_of(range(12), range(300))
    part = range(72, 300)
    assert made.inputs(part).nbytes <= made.bytes_of(range(12), part)


@pytest.mark.parametrize("name", MADE_AT_LOAD)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_shows_in_every_product_with_its_row(name, bad, draw):
    weight = draw(3, 8)
    weight[1, 2] = bad
    y = MADE_AT_LOAD[name].made_of(weight).multiply(draw(2, 8), None)
    assert y.isfinite().tolist() == [[True, False, True]] * 2


@pytest.mark.parametrize("number", Number)
@pytest.mark.parametrize("group", [None, 16])
def test_inputs_are_rounded_token_by_token(number, group, draw):
    x = draw(5, 40)
    x[1] = 0
    rounding = Rounding(number, group)
    numbers, scale = rounding.rounded(x)
    assert (numbers.dtype, numbers.shape, scale.shape) == (
        number.dtype,
        (5, 40),
        (5, 1 if group is None else 3),
    )
    applied = rounding.applied(x)
    assert (applied - x).norm() / x.norm() < (0.04 if number is Number.FP8 else 0.01)
    alone = torch.cat([rounding.applied(row[None]) for row in x])
    assert torch.equal(applied, alone)


@pytest.mark.parametrize("number", Number)
@pytest.mark.parametrize("static", [None, torch.tensor(0.01)])
def test_an_input_that_is_no_number_is_lost_with_its_token_alone(number, static, draw):
    x = draw(3, 8)
    x[1, 4] = float("nan")
    applied = Rounding(number, static=static).applied(x)
    assert applied.isnan().all(1).tolist() == [False, True, False]
    assert not applied[[0, 2]].isnan().any()


def test_joined_products_take_the_larger_of_given_scales(draw):
    parts = [
        blocked(draw, rounding=Rounding(Number.FP8, static=torch.tensor(scale)))[0]
        for scale in (0.5, 2.0)
    ]
    assert Fp8Weight.joined(parts).rounding.static == 2.0


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("tokens", [2, 9])
def test_products_multiply_rounded_inputs(ops, tokens, draw):
    x, bias = draw(tokens, 64), draw(24)
    numbers = draw(24, 64).mul(40).round().clamp(-127, 127)
    weights = [
        Int8Weight(numbers.to(torch.int8), draw(24).abs(), Rounding(Number.INT8)),
        Fp8Weight.made_of(draw(24, 64)),
        blocked(draw, 24, 64, 8, 32, Rounding(Number.FP8, 32))[0],
    ]
    for weight in weights:
        exact = weight.rounding.applied(x) @ weight.dequantised(torch.float32).t() + bias
        got = linear_of(ops.OPERATIONS, weight, bias)(x)
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize(
    ("inputs", "group", "zeros", "shuffled"),
    [
        (256, 128, True, False),
        (200, 64, False, False),
        (100, 100, True, False),
        (96, 32, True, True),
        (90, 10, True, False),
    ],
)
def test_products_with_groups_of_4_bits(inputs, group, zeros, shuffled, vnni, draw, monkeypatch):
    """Groups that words don't divide, and act-order; with the processor's dots and without."""
    if not vnni:
        monkeypatch.setattr(whole, "available", lambda: False)
    index = None
    if shuffled:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(2))
        index = order // group
    weight, exact = int4(draw, 37, inputs, group, zeros=zeros, index=index)
    bias = draw(37)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        product = linear_of(cpu.OPERATIONS, weight, bias)
        for tokens in (1, 3, 4, 7, 13):
            x = draw(tokens, inputs, dtype=dtype)
            expected = x.double() @ exact.double().t() + bias
            got = product(x)
            assert got.dtype == dtype
            assert (got.double() - expected).norm() < 4 * torch.finfo(dtype).eps * expected.norm()


def test_tokens_of_4_bits_do_not_hang_on_each_other(draw):
    """One that is no number is lost alone; one of zeros yields the bias."""
    weight, _ = int4(draw, 20, 64, 32)
    x, bias = draw(6, 64), draw(20)
    product = linear_of(cpu.OPERATIONS, weight, bias)
    alone = torch.cat([product(row[None]) for row in x])
    torch.testing.assert_close(product(x), alone, rtol=1e-6, atol=1e-6)
    x[1, 5], x[3] = float("inf"), 0
    y = product(x)
    assert y.isfinite().all(1).tolist() == [True, False, True, True, True, True]
    assert torch.equal(y[3], bias)


def test_w8a8_by_whole_numbers_is_the_definition(draw):
    """Static scales and those of tokens, at widths that fill no word."""
    numbers = draw(33, 70).mul(40).round().clamp(-127, 127).to(torch.int8)
    for static in (None, torch.tensor(0.02)):
        weight = Int8Weight(numbers, draw(33).abs(), Rounding(Number.INT8, static=static))
        x = draw(14, 70)
        exact = weight.rounding.applied(x).double() @ weight.dequantised(torch.float64).t()
        got = linear_of(cpu.OPERATIONS, weight, None)(x)
        assert (got.double() - exact).norm() < 1e-6 * exact.norm()
