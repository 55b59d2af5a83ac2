"""Weights of every kind that kernels of fewer bits take, and what their products are to be."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.grouped import GroupedWeight, packed_pairs
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Number, Rounding
from tokenpod.kernels.products.quantised.lane_products import kind_of_lanes
from tokenpod.kernels.products.quantised.lanes import lanes_of
from tokenpod.kernels.products.quantised.products import kind_of
from tokenpod.kernels.products.quantised.quantised_tiles import LaneTile, MatrixTile, Tiles
from tokenpod.models.weights.mxfp4 import VALUES

FP8, INT8 = Rounding(Number.FP8), Rounding(Number.INT8)
MATRIX = MatrixTile(block_n=32, block_k=64, block_t=16, warps=2, stages=2, panel=2)
LANES = LaneTile(block_n=32, block_t=4, parts=4, warps=2, stages=2)


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
IN_LANES = ["int8", *(n for n in KINDS if n.startswith(("int4", "groups8", "nf4", "mxfp4")))]


def tiles(weight, *entries):
    """A table for a weight."""
    as_they_come = isinstance(weight, Int8Weight) and weight.rounding is None
    if not (as_they_come or isinstance(weight, (Int4Weight, GroupedWeight))):
        return Tiles({kind_of(weight): list(entries)}, {})
    made = lanes_of(weight)
    return Tiles({} if made is None else {kind_of_lanes(made): list(entries)}, {})


#: Of a result: bfloat16's own, and what an input that rounds to the other neighbour makes of it.
BOUND = 2 * torch.finfo(torch.bfloat16).eps
