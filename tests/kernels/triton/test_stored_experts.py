"""Experts whose weights have fewer bits, by the kernels: against the reference, in every format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenpod.kernels.backends import reference
from tokenpod.kernels.experts import triton_experts as experts
from tokenpod.kernels.experts.expert_tiles import ANY, ProductTile, Tile
from tokenpod.kernels.operations.expert_ops import ExpertWeights, Routing
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.operations.weight import StackedWeight
from tokenpod.kernels.pointwise import triton_pointwise as pointwise
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.grouped import GroupedWeight, packed_pairs
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Number, Rounding
from tokenpod.models.weights.mxfp4 import VALUES

BF16 = torch.bfloat16
COUNT, HIDDEN, WIDTH = 3, 128, 96
SMALL = ((ANY, Tile(16, ProductTile(32, 64, 4, 2), ProductTile(16, 64, 4, 2))),)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def codes(dense, most):
    generator = torch.Generator().manual_seed(len(dense))
    drawn = torch.randint(0, most, dense.shape, generator=generator, dtype=torch.uint8)
    return drawn.to(dense.device)


def index_of(dense, group):
    return torch.arange(dense.shape[1], device=dense.device, dtype=torch.int32) // group


def scales(dense, group):
    return dense[:, : -(-dense.shape[1] // group)].abs() / 20 + 0.01


def int4(dense, group, *, zeros=False):
    scale = scales(dense, group).bfloat16()
    zero = codes(scale, 6) + 5 if zeros else None
    return Int4Weight.of(codes(dense, 16), scale, zero, group)


def blocks(dense, rounding, rows=32, columns=64):
    scale = dense[: -(-len(dense) // rows), : -(-dense.shape[1] // columns)].abs() + 0.1
    return Fp8Weight(dense.to(torch.float8_e4m3fn), scale, rows, columns, rounding)


def table(dense, group, values, scale):
    packed = packed_pairs(codes(dense, 16))
    return GroupedWeight(packed, scale, index_of(dense, group), table=values.to(dense.device))


def mxfp4(dense, group=32):
    scale = codes(scales(dense, group), 6) + 118
    return table(dense, group, VALUES, scale)


def groups_of_8_bits(dense, *, zeros):
    scale = scales(dense, 64) / 10
    zero = codes(scale, 40) + 100 if zeros else None
    return GroupedWeight(codes(dense, 256), scale, index_of(dense, 64), zero)


#: By name: of dense rows [n, k].
KINDS = {
    "int8": Int8Weight.made_of,
    "int8-rounded": lambda dense: replace(
        Int8Weight.made_of(dense), rounding=Rounding(Number.INT8)
    ),
    "fp8": Fp8Weight.made_of,
    "fp8-wide-inputs": lambda dense: replace(Fp8Weight.made_of(dense), rounding=None),
    "fp8-static": lambda dense: replace(
        Fp8Weight.made_of(dense),
        rounding=Rounding(Number.FP8, static=torch.tensor(0.01, device=dense.device)),
    ),
    "fp8-blocks": lambda dense: blocks(dense, Rounding(Number.FP8, 64)),
    "fp8-blocks-cut": lambda dense: blocks(dense, Rounding(Number.FP8, 64), columns=32),
    "fp8-blocks-per-token": lambda dense: blocks(dense, Rounding(Number.FP8)),
    "fp8-blocks-wide-inputs": lambda dense: blocks(dense, None),
    "int4-128": Int4Weight.made_of,
    "int4-64-zeros": lambda dense: int4(dense, 64, zeros=True),
    "int4-32": lambda dense: int4(dense, 32),
    "int4-16": lambda dense: int4(dense, 16),
    "groups-of-8-bits": lambda dense: groups_of_8_bits(dense, zeros=False),
    "groups-of-8-bits-zeros": lambda dense: groups_of_8_bits(dense, zeros=True),
    "mxfp4": mxfp4,
    "mxfp4-cut": lambda dense: mxfp4(dense, 16),
    "table": lambda dense: table(dense, 64, torch.linspace(-1, 1, 16), scales(dense, 64)),
}


def case(name, draw, device, tokens, dtype=BF16, hidden=HIDDEN, width=WIDTH):
    """A residual stream, experts, and a norm."""

    def stack(outputs, inputs):
        dense = (draw(COUNT * outputs, inputs) * inputs**-0.5).to(device)
        return StackedWeight(KINDS[name](dense), COUNT)

    weights = ExpertWeights(
        draw(COUNT, hidden, dtype=dtype).to(device),
        stack(2 * width, hidden),
        stack(hidden, width),
        gate_up_bias=draw(COUNT, 2 * width, dtype=dtype).to(device),
        down_bias=draw(COUNT, hidden, dtype=dtype).to(device),
    )
    norm = RowNorm(draw(hidden, dtype=dtype).abs().to(device), 1e-6)
    return 3 * draw(tokens, hidden, dtype=dtype).to(device), weights, norm


def error_of(residual, weights, norm, routing, activation=Activation.SILU, tiles=SMALL):
    """Of what is added, beside the reference's; experts are chosen by the same rounded norm."""
    normed = pointwise.rms_norm(residual, *norm)
    exact = torch.zeros_like(residual, dtype=torch.float32)
    reference.OPERATIONS.prepare_experts(weights, None, activation, routing)(normed, exact)
    got = torch.zeros_like(residual)
    experts.prepare_experts(weights, norm, activation, routing, tiles)(residual, got)
    return ((got.float() - exact).norm() / exact.norm()).item()


#: Roundings to bfloat16 of what is multiplied; and inputs of 8 bits that go to the other neighbour,
#: a sixteenth of e4m3, which so few outputs don't hide.
BOUND = 3 * torch.finfo(BF16).eps
FP8_BOUND = 7 * torch.finfo(BF16).eps


@pytest.mark.sampled(5, "gpu")
@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("name", KINDS)
def test_every_format(tokens, name, draw, device):
    bound = FP8_BOUND if "fp8" in name else BOUND
    assert error_of(*case(name, draw, device, tokens), Routing(2, True)) < bound


TALL = ((ANY, Tile(64, ProductTile(64, 64, 4, 2), ProductTile(32, 64, 4, 2))),)


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-blocks-per-token", "fp8-blocks-wide-inputs"])
def test_blocks_as_high_as_a_tile_with_many_tokens(name, draw, device):
    """Tokens are rows of the sums then; some blocks of tokens are hardly filled."""
    made = case(name, draw, device, 70)
    assert error_of(*made, Routing(2, True), tiles=TALL) < FP8_BOUND


@pytest.mark.sampled(3, "gpu")
@pytest.mark.parametrize("name", ["int8", "fp8", "int4-64-zeros", "mxfp4", "table"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_numbers(name, dtype, draw, device):
    bound = BOUND if dtype == torch.float16 else 1e-3
    assert error_of(*case(name, draw, device, 5, dtype), Routing(2, True)) < bound


@pytest.mark.sampled(2, "gpu")
@pytest.mark.parametrize("name", ["int8", "fp8-blocks", "int4-128", "mxfp4", "groups-of-8-bits"])
def test_sizes_that_no_tile_divides(name, draw, device):
    made = case(name, draw, device, 3, hidden=208, width=80)
    assert error_of(*made, Routing(3, False), Activation.SWIGLU_CLAMPED) < BOUND


def test_a_format_that_no_kernel_has_is_multiplied_dense(draw, device):
    residual, weights, norm = case("int8", draw, device, 3)
    index = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(2)).to(device) // 32
    dense = draw(COUNT * HIDDEN, WIDTH).to(device) / 10
    shuffled = Int4Weight.of(codes(dense, 16), scales(dense, 32).bfloat16(), None, 32, index)
    weights = weights._replace(down=StackedWeight(shuffled, COUNT))
    assert error_of(residual, weights, norm, Routing(2, True)) < BOUND


@pytest.mark.parametrize("name", ["int8", "fp8", "int4-32", "mxfp4"])
def test_what_is_no_number_stays_in_its_token(name, draw, device):
    residual, weights, norm = case(name, draw, device, 4)
    residual[2, 7] = float("nan")
    got = torch.zeros_like(residual)
    block = experts.prepare_experts(weights, norm, Activation.SILU, Routing(2, True), SMALL)
    block(residual, got)
    assert got.isnan().all(dim=1).tolist() == [False, False, True, False]
    assert not got[[0, 1, 3]].isnan().any()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["8 bits", "4 bits"])
def test_scales_of_groups_keep_what_bfloat16_does_not_hold(kind, scale_dtype, device):
    """A group of ones less a group of nearly ones: rounded, as a weight in bfloat16 is, none."""
    small, group, outputs, inputs = 2**-9, 128, 16, 256
    scale = torch.ones(outputs, 2, dtype=scale_dtype, device=device)
    scale[:, 0] += small
    ones = torch.ones(outputs, inputs, dtype=torch.uint8, device=device)
    if kind == "4 bits":
        weight = Int4Weight.of(ones + 8, scale, None, group)
    else:
        weight = GroupedWeight(ones + 128, scale, index_of(ones, group))
    stack = experts.stack_of(StackedWeight(weight, 1), BF16, experts.capability(device))
    x = torch.ones(3, inputs, dtype=BF16, device=device)
    x[:, group:] = -1
    assignments = experts.assign(x, x[:1], Routing(1, True))
    y = torch.empty(3, outputs, dtype=BF16, device=device)
    experts.multiply(x, stack, y, assignments, 16, ProductTile(16, 64, 4, 2), None)
    assert torch.equal(y.cpu(), torch.full((3, outputs), group * small, dtype=BF16))


@pytest.mark.parametrize("width", [768, 1408, 1536, 2048, 2560])
def test_blocks_that_ranks_cut_stay_in_8_bits_on_each(width, draw, device):
    """Widths of published experts, in blocks of 128, over 8 ranks."""
    whole = blocks(draw(2 * 128, width).to(device), Rounding(Number.FP8, 128), 128, 128)
    each = width // 8
    for rank in range(8):
        own = StackedWeight(whole.inputs(range(rank * each, (rank + 1) * each)), 2)
        stack = experts.stack_of(own, BF16, experts.capability(device))
        assert isinstance(stack, experts.KernelStack), rank


@pytest.mark.parametrize("tokens", [1, 3])
def test_blocks_of_16_inputs_multiply_inputs_that_are_not_rounded(
    tokens, draw, device, monkeypatch
):
    monkeypatch.setitem(KINDS, "cut", lambda dense: blocks(dense, Rounding(Number.FP8, 64), 32, 16))
    residual, weights, norm = case("cut", draw, device, tokens)
    plain = [
        replace(stack, rows=replace(stack.rows, rounding=None))
        for stack in (weights.gate_up, weights.down)
    ]
    got, exact = torch.zeros_like(residual), torch.zeros_like(residual, dtype=torch.float32)
    routing = Routing(2, True)
    experts.prepare_experts(weights, norm, Activation.SILU, routing, SMALL)(residual, got)
    expected = weights._replace(gate_up=plain[0], down=plain[1])
    normed = pointwise.rms_norm(residual, *norm)
    reference.OPERATIONS.prepare_experts(expected, None, Activation.SILU, routing)(normed, exact)
    assert (got.float() - exact).norm() < BOUND * exact.norm()
