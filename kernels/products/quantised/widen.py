"""A float copy of a weight, for products that are bound by arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, capability, launch_options
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.quantised.lane_products import step_scales, step_zeros
from tokenpod.kernels.products.quantised.lane_widening import lane_planes, lane_unit, plus_zero
from tokenpod.kernels.products.quantised.lanes import Lanes
from tokenpod.kernels.products.quantised.widening import factor_of

#: That a program widens.
BYTES = 4096
ROWS = 16


def widen_bytes(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] as `dtype`."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.numbers.device)
    _widen_bytes[(n, triton.cdiv(k, BYTES))](
        weight.numbers, weight.scale, out, k, BYTES=BYTES, **launch_options(out.device)
    )
    return out


def widen_lanes(weight: Lanes, dtype: torch.dtype) -> torch.Tensor:
    """[rows, inputs] as `dtype`, for products that are bound by arithmetic."""
    row_lanes = weight.numbers.shape[1]
    out = torch.empty((weight.rows, weight.inputs), dtype=dtype, device=weight.numbers.device)
    _widen_lanes[(triton.cdiv(weight.rows, ROWS), row_lanes // weight.width)](
        *(weight.numbers, weight.scale, weight.zero, out),
        *(weight.rows, weight.inputs, row_lanes, len(weight.scale)),
        KIND=weight.kind,
        TABLE=weight.table,
        PLANES=weight.planes,
        WIDTH=weight.width,
        PER_GROUP=weight.group // weight.width,
        ASSEMBLY=capability(out.device) is not None,
        BLOCK_N=ROWS,
        **launch_options(out.device),
    )
    return out


@triton.jit
def _widen_bytes(numbers, scale, out, k, BYTES: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    w = tl.load(numbers + row * k + i, mask=i < k, other=0).to(tl.float32)
    w *= tl.load(scale + row)
    await_inputs(OVERLAP)
    tl.store(out + row * k + i, w.to(out.dtype.element_ty), mask=i < k)


@triton.jit
def _widen_lanes(
    weight,
    scale,
    zero,
    out,
    rows,
    k,
    row_lanes,
    groups,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, rows - 1)
    step = tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    at_w = weight + own.to(tl.int64) * row_lanes
    dtype: tl.constexpr = out.dtype.element_ty
    w = lane_planes(at_w + step * WIDTH, WIDTH, KIND, TABLE, dtype, ASSEMBLY)
    s = step_scales(scale, own, step, rows, groups, PLANES, PER_GROUP)
    z = step_zeros(zero, own, step, rows, PLANES, PER_GROUP)
    await_inputs(OVERLAP)
    for plane in tl.static_range(PLANES):
        i = (step * PLANES + plane) * WIDTH + lane
        made = plus_zero(w[plane], z[plane], zero, KIND, dtype, ASSEMBLY).to(tl.float32)
        made *= (factor_of(s[plane], KIND) * lane_unit(KIND, dtype, ASSEMBLY))[:, None]
        at = out + row.to(tl.int64)[:, None] * k + i[None, :]
        tl.store(at, made.to(dtype), mask=(row < rows)[:, None] & (i < k)[None, :])
