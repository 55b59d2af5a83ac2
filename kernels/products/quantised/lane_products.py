"""Products of few tokens with a weight in lanes, on the matrix unit, bound by reading it.

Tiles of lanes come through shared memory, several steps ahead, straight into the registers that the
matrix unit takes a left factor from; a few instructions on two numbers at a time make them bfloat16
there. A group's sums get its scale. Inputs stay as they are. Few tokens' rows are cut into `parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, capability, launch_options
from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit
from tokenpod.kernels.products.product_kernels import ask_rows
from tokenpod.kernels.products.quantised.lane_widening import lane_planes, lane_unit, plus_zero
from tokenpod.kernels.products.quantised.lanes import Lanes
from tokenpod.kernels.products.quantised.parts import LEAST_COLUMNS, sum_parts
from tokenpod.kernels.products.quantised.quantised_tiles import LaneTile
from tokenpod.kernels.products.quantised.widening import factor_of, halves
from tokenpod.kernels.products.triton_product import add_up, asks_rows

#: The matrix unit's fewest rows.
LEAST_ROWS = 16


def multiply_lanes(
    x: torch.Tensor,
    weight: Lanes,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    activation: Activation | None,
    add: bool,
    tile: LaneTile,
) -> None:
    """Y [T, n] = (or += with `add`) x · weightᵀ + bias; with an activation gates come first.

    Args:
        x: [T, inputs], rows contiguous, in the weight's order.
        weight: in lanes.
        bias: [outputs] or None.
        y: [T, n], rows contiguous.
        activation: of the gates; None: there are none.
        add: to what y holds.
        tile: how a program works.
    """
    tokens, n = y.shape
    gates = 1 if activation is None else 2
    block_t = triton.next_power_of_2(tokens)
    block_n = max(tile.block_n // gates, LEAST_ROWS // (gates * tile.parts), 1)
    splits = tile.splits if activation is None else 1
    lanes = min(tile.lanes, weight.width)
    steps = weight.numbers.shape[1] // lanes
    target = y
    if splits > 1:
        target = torch.empty((splits, tokens, n), dtype=torch.float32, device=y.device)
    options = launch_options(y.device)
    lane_product[(triton.cdiv(n, block_n), splits)](
        *(x, weight.numbers, weight.scale, weight.zero, bias, target),
        *(x.stride(0), target.stride(-2), tokens, n, weight.inputs, weight.numbers.shape[1]),
        len(weight.scale),
        KIND=weight.kind,
        TABLE=weight.table,
        PLANES=weight.planes,
        WIDTH=weight.width,
        LANES=lanes,
        PER_GROUP=weight.group // weight.width,
        ACTIVATION="none" if activation is None else activation.value,
        ADD=add and splits == 1,
        ASSEMBLY=capability(y.device) is not None,
        EVEN=weight.inputs % (weight.planes * weight.width) == 0
        and steps % (tile.parts * splits) == 0,
        SPLITS=splits,
        PARTS=tile.parts,
        COLUMNS=max(tile.parts * block_t, LEAST_COLUMNS),
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        AHEAD=tile.ahead if asks_rows(weight.numbers) else 0,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **options,
    )
    if splits > 1:
        add_up(target, bias, y, add=add)


@triton.jit(do_not_specialize=["tokens"])
def lane_product(
    x,
    weight,
    scale,
    zero,
    bias,
    y,
    x_stride,
    y_stride,
    tokens,
    n,
    k,
    row_lanes,
    groups,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] (+)= x · weightᵀ + bias; with ACTIVATION the weight has 2n rows, gates first.

    Rows of a tile are [gates and what they open, PARTS, BLOCK_N], columns [PARTS, BLOCK_T] and
    some that are nothing. A step takes LANES of a plane's WIDTH. AHEAD bytes of each row are asked
    for at first. SPLITS programs share a row; they
    leave partial sums [SPLITS, tokens, n] float32.
    """
    GATES: tl.constexpr = 2 if ACTIVATION != "none" else 1
    ALL: tl.constexpr = GATES * PARTS * BLOCK_N
    SUB: tl.constexpr = WIDTH // LANES
    steps = row_lanes // LANES
    share = tl.cdiv(steps, PARTS * SPLITS)
    tile_row = tl.arange(0, ALL)
    row_part = tile_row // BLOCK_N % PARTS
    own = tl.minimum(tl.program_id(0) * BLOCK_N + tile_row % BLOCK_N, n - 1)
    own += tile_row // (PARTS * BLOCK_N) * n
    at_w = weight + own.to(tl.int64) * row_lanes
    first_step = (tl.program_id(1) * PARTS + row_part) * share
    column = tl.arange(0, COLUMNS)
    part, token = column // BLOCK_T, column % BLOCK_T
    is_x = (token < tokens) & (part < PARTS)
    first = (tl.program_id(1) * PARTS + part) * share
    at_x = x + token.to(tl.int64) * x_stride
    rows = GATES * n
    # Scales are asked for one step ahead: they are too short to be copied beside the loop.
    next_s = step_scales(scale, own, first_step // SUB, rows, groups, PLANES, PER_GROUP)
    if AHEAD > 0:
        start = tl.program_id(1) * PARTS * share * LANES
        ask_rows(weight, tl.program_id(0) * BLOCK_N, n, start, row_lanes, BLOCK_N, AHEAD)
        if GATES == 2:
            ask_rows(weight, tl.program_id(0) * BLOCK_N + n, rows, start, row_lanes, BLOCK_N, AHEAD)
    await_inputs(OVERLAP)
    sums = tl.zeros((ALL, COLUMNS), tl.float32)
    for step in tl.range(0, share, num_stages=STAGES):
        s = next_s
        ahead = first_step + tl.minimum(step + 1, share - 1)
        next_s = step_scales(scale, own, ahead // SUB, rows, groups, PLANES, PER_GROUP)
        # Steps beyond the last one have inputs of zero, and the last one's weight.
        its_step = first_step + step
        if not EVEN:
            its_step = tl.minimum(its_step, steps - 1)
        i = (first + step) // SUB * (PLANES * WIDTH) + (first + step) % SUB * LANES
        v = _inputs(at_x, i, k, is_x, PLANES, WIDTH, LANES, EVEN)
        w = lane_planes(at_w + its_step * LANES, LANES, KIND, TABLE, x.dtype.element_ty, ASSEMBLY)
        z = step_zeros(zero, own, its_step // SUB, rows, PLANES, PER_GROUP)
        sums = _add_planes(sums, w, v, s, z, zero, KIND, PLANES, PER_GROUP, ASSEMBLY)
    sums *= lane_unit(KIND, x.dtype.element_ty, ASSEMBLY)
    out = sum_parts(sums, row_part, part, GATES, PARTS, BLOCK_N, BLOCK_T)
    _finish(out, bias, y, y_stride, tokens, n, GATES, ACTIVATION, ADD, SPLITS, BLOCK_T, BLOCK_N)


@triton.jit
def _inputs(
    at_x,
    first,
    k,
    is_x,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Inputs of a step, plane by plane, each a right factor [lanes, columns]."""
    i = first[None, :] + tl.arange(0, LANES)[:, None]
    v0 = _plane(at_x, i, k, is_x, EVEN)
    v1 = _plane(at_x, i + WIDTH, k, is_x, EVEN)
    v2, v3 = v0, v1
    if PLANES == 4:
        v2 = _plane(at_x, i + 2 * WIDTH, k, is_x, EVEN)
        v3 = _plane(at_x, i + 3 * WIDTH, k, is_x, EVEN)
    return v0, v1, v2, v3


@triton.jit
def _plane(at_x, i, k, is_x, EVEN: tl.constexpr):
    inside = is_x[None, :] if EVEN else is_x[None, :] & (i < k)
    return tl.load(at_x[None, :] + i, mask=inside, other=0.0)


@triton.jit
def step_scales(scale, row, step, rows, groups, PLANES: tl.constexpr, PER_GROUP: tl.constexpr):
    """Scales of a step's planes, as stored; planes of one group have the same."""
    plane = step * PLANES
    s0 = _scale(scale, row, plane // PER_GROUP, rows, groups)
    s1, s2, s3 = s0, s0, s0
    if PER_GROUP % PLANES != 0:
        if PER_GROUP % 2 != 0:
            s1 = _scale(scale, row, (plane + 1) // PER_GROUP, rows, groups)
        if PLANES == 4:
            s2 = _scale(scale, row, (plane + 2) // PER_GROUP, rows, groups)
            s3 = s2
            if PER_GROUP % 2 != 0:
                s3 = _scale(scale, row, (plane + 3) // PER_GROUP, rows, groups)
    return s0, s1, s2, s3


@triton.jit
def _scale(scale, row, group, rows, groups):
    return tl.load(scale + (tl.minimum(group, groups - 1) * rows + row))


@triton.jit
def step_zeros(zero, row, step, rows, PLANES: tl.constexpr, PER_GROUP: tl.constexpr):
    """What is added to a step's planes; see `Lanes.zero`. Loaded with the tile they are for."""
    if zero is None:
        return 0, 0, 0, 0
    elif PER_GROUP % 2 == 0:
        z0, z2 = halves(tl.load(zero + step * rows + row))
        return z0, z0, z2, z2
    elif PLANES == 2:
        z0, z1 = halves(tl.load(zero + step * rows + row))
        return z0, z1, z0, z1
    else:
        z0, z1 = halves(tl.load(zero + step * (2 * rows) + row))
        z2, z3 = halves(tl.load(zero + step * (2 * rows) + rows + row))
        return z0, z1, z2, z3


@triton.jit
def _add_planes(
    sums,
    w,
    v,
    s,
    z,
    zero,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Sums plus a step's products: as many planes at once as share a scale."""
    s0, s1, s2, s3 = s
    z0, z1, z2, z3 = z
    w0, w1, w2, w3 = w
    v0, v1, v2, v3 = v
    w0 = plus_zero(w0, z0, zero, KIND, v0.dtype, ASSEMBLY)
    w1 = plus_zero(w1, z1, zero, KIND, v0.dtype, ASSEMBLY)
    if PLANES == 4:
        w2 = plus_zero(w2, z2, zero, KIND, v0.dtype, ASSEMBLY)
        w3 = plus_zero(w3, z3, zero, KIND, v0.dtype, ASSEMBLY)
    dot = tl.dot(w0, v0, input_precision="ieee")
    if PER_GROUP % 2 != 0:
        sums += dot * factor_of(s0, KIND)[:, None]
        dot = tl.dot(w1, v1, input_precision="ieee")
        if PLANES == 4:
            sums += dot * factor_of(s1, KIND)[:, None]
            dot = tl.dot(w2, v2, input_precision="ieee")
            sums += dot * factor_of(s2, KIND)[:, None]
            dot = tl.dot(w3, v3, input_precision="ieee")
    else:
        dot = tl.dot(w1, v1, dot, input_precision="ieee")
        if PLANES == 4:
            if PER_GROUP % 4 != 0:
                sums += dot * factor_of(s0, KIND)[:, None]
                dot = tl.dot(w2, v2, input_precision="ieee")
            else:
                dot = tl.dot(w2, v2, dot, input_precision="ieee")
            dot = tl.dot(w3, v3, dot, input_precision="ieee")
    return sums + dot * factor_of(s3 if PLANES == 4 else s1, KIND)[:, None]


@triton.jit
def _finish(
    out,
    bias,
    y,
    y_stride,
    tokens,
    n,
    GATES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bias, gate, residual; rounded once, and once more where it is added. Or parts of sums."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_T)
    inside = (token < tokens)[None, :] & (row < n)[:, None]
    if SPLITS > 1:
        tl.static_assert(GATES == 1)
        at_part = (tl.program_id(1).to(tl.int64) * tokens + token[None, :]) * n + row[:, None]
        tl.store(y + at_part, tl.reshape(out, (BLOCK_N, BLOCK_T)), mask=inside)
    else:
        own = tl.minimum(row, n - 1)
        if GATES == 2:
            out, up = tl.split(tl.permute(out, (1, 2, 0)))
            if bias is not None:
                up += tl.load(bias + n + own).to(tl.float32)[:, None]
        else:
            out = tl.reshape(out, (BLOCK_N, BLOCK_T))
        if bias is not None:
            out += tl.load(bias + own).to(tl.float32)[:, None]
        if GATES == 2:
            out = gated_unit(out, up, ACTIVATION)
        at_y = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
        out = out.to(y.dtype.element_ty)
        if ADD:
            out = out.to(tl.float32) + tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
        tl.store(at_y, out.to(y.dtype.element_ty), mask=inside)
