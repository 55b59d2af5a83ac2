"""Products with a weight whose tiles are widened in registers, on the matrix unit.

Inputs stay as they are. Per byte of the weight that is an instruction or two for each number, where
digits of inputs (`matrix`) need twice the multiplications and an end for each group; and each tile
of inputs, which comes from the L2 cache, can serve more rows, since there is one sum for each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.pointwise_ops import Activation
from tokenpod.kernels.triton.launch import await_inputs, capability, launch_options
from tokenpod.kernels.triton.pointwise import gated_unit
from tokenpod.kernels.triton.product import PARTIALS_BLOCK
from tokenpod.kernels.triton.product_kernels import add_partials
from tokenpod.kernels.triton.quantised.stored import row_scales, walk_stored
from tokenpod.kernels.triton.quantised.tiles import StoredTile
from tokenpod.kernels.triton.quantised.walked import Walked
from tokenpod.kernels.triton.quantised.widening import widened

#: The matrix unit's smallest side.
LEAST_ROWS = 16
#: Bytes that a program of `widen_stored` widens.
BYTES = 1024


def multiply_stored(
    x: torch.Tensor,
    weight: Walked,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    activation: Activation | None,
    add: bool,
    tile: StoredTile,
) -> None:
    """Y [T, n] = (or += with `add`) x · weightᵀ + bias; with an activation gates come first.

    Args:
        x: [T, inputs], rows contiguous; inputs in the order that the weight's bytes have them in.
        weight: whose format rounds no inputs.
        bias: [outputs] or None.
        y: [T, n], rows contiguous.
        activation: of the gates; None: there are none.
        add: to what y holds.
        tile: how a program works.
    """
    tokens, n = y.shape
    k = weight.inputs
    width = weight.width if weight.planes == 2 else min(tile.block_k, weight.width)
    block_t = min(tile.block_t, max(LEAST_ROWS, triton.next_power_of_2(tokens)))
    splits = 1 if activation is not None else tile.splits
    target = y
    if splits > 1:
        target = torch.empty((splits, tokens, n), dtype=torch.float32, device=y.device)
    blocks = triton.cdiv(n, tile.block_n) * triton.cdiv(tokens, block_t)
    stored_product[(blocks, splits)](
        *(x, weight.numbers, weight.scale, weight.zero, weight.table, bias, target),
        *(x.stride(0), target.stride(-2), tokens, n, k),
        *(weight.numbers.shape[1], weight.scale.shape[1], weight.scale_rows),
        KIND=weight.kind,
        PLANES=weight.planes,
        PER_GROUP=0 if weight.group is None else max(weight.group // width, 1),
        ACTIVATION="none" if activation is None else activation.value,
        ADD=add and splits == 1,
        IN_SUMS=tile.in_sums,
        ASSEMBLY=capability(y.device) is not None,
        EVEN=k % (weight.planes * width) == 0,
        SPLITS=splits,
        BLOCK_T=block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=width,
        STAGES=tile.stages,
        UNROLL=tile.unroll,
        num_warps=tile.warps,
        **launch_options(y.device),
    )
    if splits > 1:
        add_partials[(tokens, triton.cdiv(n, PARTIALS_BLOCK))](
            *(target, y if bias is None else bias, y, y.stride(0), tokens, n),
            BIAS=bias is not None,
            ADD=add,
            SPLITS=splits,
            BLOCK=PARTIALS_BLOCK,
            num_warps=2,
            **launch_options(y.device),
        )


def widen_stored(weight: Walked, dtype: torch.dtype) -> torch.Tensor:
    """[rows, inputs] as `dtype`, for products that are bound by arithmetic."""
    rows, row_bytes = weight.numbers.shape
    out = torch.empty((rows, weight.inputs), dtype=dtype, device=weight.numbers.device)
    _widen_stored[(rows, triton.cdiv(row_bytes, BYTES))](
        *(weight.numbers, weight.scale, weight.zero, weight.table, out),
        *(row_bytes, weight.inputs, weight.scale.shape[1], weight.scale_rows),
        weight.group or weight.inputs,
        KIND=weight.kind,
        PLANES=weight.planes,
        WIDTH=weight.width,
        BYTES=BYTES,
        **launch_options(out.device),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def stored_product(
    x,
    weight,
    scale,
    zero,
    table,
    bias,
    y,
    x_stride,
    y_stride,
    tokens,
    n,
    k,
    row_bytes,
    columns,
    scale_rows,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    IN_SUMS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] (+)= x · weightᵀ + bias; with ACTIVATION the weight has 2n rows, gates first.

    SPLITS programs share a row; they leave partial sums [SPLITS, tokens, n] float32. Programs of
    the same rows run one after the other, over tokens.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    blocks_t = tl.cdiv(tokens, BLOCK_T)
    row = tl.program_id(0) // blocks_t * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(0) % blocks_t * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < tokens
    own = tl.minimum(row, n - 1).to(tl.int64)
    steps = tl.cdiv(k, PLANES * BLOCK_K)
    share = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, steps)
    s_at = own // scale_rows * columns
    up_at = (own + n) // scale_rows * columns
    await_inputs(OVERLAP)
    at_x = x + token.to(tl.int64) * x_stride
    sums, up_sums = walk_stored(
        at_x,
        is_token,
        weight + own * row_bytes,
        weight + (own + n) * row_bytes,
        at_x,
        scale,
        zero,
        table,
        s_at,
        up_at,
        first,
        last,
        k,
        columns,
        1,
        KIND,
        False,
        GATED,
        x.dtype.element_ty,
        PLANES,
        BLOCK_K,
        PER_GROUP,
        0,
        IN_SUMS,
        EVEN,
        ASSEMBLY,
        STAGES,
        UNROLL,
        BLOCK_N,
        BLOCK_T,
    )
    out = sums * row_scales(scale, s_at, PER_GROUP)
    inside = is_token[None, :] & (row < n)[:, None]
    if SPLITS > 1:
        tl.static_assert(not GATED)
        at_part = (tl.program_id(1).to(tl.int64) * tokens + token[None, :]) * n + row[:, None]
        tl.store(y + at_part, out, mask=inside)
    else:
        if bias is not None:
            out += tl.load(bias + own).to(tl.float32)[:, None]
        if GATED:
            up_out = up_sums * row_scales(scale, up_at, PER_GROUP)
            if bias is not None:
                up_out += tl.load(bias + n + own).to(tl.float32)[:, None]
            out = gated_unit(out, up_out, ACTIVATION)
        at_y = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
        out = out.to(y.dtype.element_ty)
        if ADD:
            out = out.to(tl.float32) + tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
        tl.store(at_y, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _widen_stored(
    numbers,
    scale,
    zero,
    table,
    out,
    row_bytes,
    k,
    columns,
    scale_rows,
    group,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    packed = tl.load(numbers + row * row_bytes + byte, mask=byte < row_bytes, other=0)
    at_scale = row // scale_rows * columns
    await_inputs(OVERLAP)
    for plane in tl.static_range(PLANES):
        i = byte
        if PLANES == 2:
            i = byte // WIDTH * (2 * WIDTH) + plane * WIDTH + byte % WIDTH
        inside = (byte < row_bytes) & (i < k)
        s = tl.load(scale + at_scale + i // group, mask=inside, other=0)
        z = 0.0
        if zero is not None:
            z = tl.load(zero + at_scale + i // group, mask=inside, other=0).to(tl.float32)
        made = widened(packed, plane, s, z, table, KIND, False)
        tl.store(out + row * k + i, made.to(out.dtype.element_ty), mask=inside)
