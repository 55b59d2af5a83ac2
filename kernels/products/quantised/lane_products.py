"""Products with a weight in lanes, on the matrix unit, of any number of tokens.

The weight is the left factor. Tiles of lanes come through shared memory, several steps ahead,
straight into the registers that the matrix unit takes a left factor from; a few instructions on two
numbers at a time make them bfloat16 there, scales included. So a weight is rounded to 16 bits, once
and at any number of tokens, and never written out. A step's planes beside each other are one
factor. A program widens, then multiplies (`launch.settled`): several on a multiprocessor
take turns.

Few tokens' rows are cut into `parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenpod.kernels.gpu.launch import (
    await_inputs,
    capability,
    launch_options,
    most_stages,
    settled,
)
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit, rms_norm
from tokenpod.kernels.products.product_kernels import ask_rows
from tokenpod.kernels.products.quantised.around import Around, Product, put
from tokenpod.kernels.products.quantised.lane_widening import lane_unit, widened_lanes
from tokenpod.kernels.products.quantised.lanes import Lanes
from tokenpod.kernels.products.quantised.parts import LEAST_COLUMNS, sum_parts, write_tile
from tokenpod.kernels.products.quantised.quantised_tiles import LaneTile, Tiles, measured
from tokenpod.kernels.products.triton_product import add_up, asks_rows

#: The matrix unit's fewest rows.
LEAST_ROWS = 16


def prepare_lanes(
    weight: Lanes, bias: torch.Tensor | None, around: Around, tiles: Tiles | None
) -> Product:
    """The product with a weight in lanes: of inputs of 16 bits by the kernel here."""
    chosen = tiles or measured(capability(weight.numbers.device))
    kind = kind_of_lanes(weight)

    def product(x: torch.Tensor, y: torch.Tensor) -> None:
        if around.norm is not None:
            x = rms_norm(x, around.norm.weight, around.norm.epsilon)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        tile = None
        if x.itemsize <= 2:
            tile = chosen.choose(kind, *weight.shape, len(x))
        if isinstance(tile, LaneTile):
            multiply_lanes(x, weight, bias, y, around.activation, around.add, tile)
        else:
            put(functional.linear(x, weight.dequantised(x.dtype), bias), y, around)

    return product


def kind_of_lanes(weight: Lanes) -> str:
    """The name under which its tiles are."""
    return "groups8" if weight.kind == "int8" and weight.scales else weight.kind


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
        x: [T, inputs] of 16 bits, rows contiguous, in the weight's order.
        weight: in lanes.
        bias: [outputs] or None.
        y: [T, n], rows contiguous.
        activation: of the gates; None: there are none.
        add: to what y holds.
        tile: how a program works.
    """
    tokens, n = y.shape
    gates = 1 if activation is None else 2
    block_t = tile.block_t
    block_n = max(tile.block_n // gates, LEAST_ROWS // (gates * tile.parts), 1)
    splits = tile.splits if activation is None else 1
    block = weight.planes * weight.width
    lanes = weight.width * max(tile.inputs, weight.planes * LEAST_ROWS) // block
    target = y
    if splits > 1:
        target = torch.empty((splits, tokens, n), dtype=torch.float32, device=y.device)
    even = weight.blocks * weight.width % (lanes * tile.parts * splits) == 0
    columns = max(tile.parts * block_t, LEAST_COLUMNS)
    # Lanes, words of a scale each, and inputs.
    step = gates * tile.parts * block_n * (2 * lanes + 4) + 2 * weight.planes * lanes * columns
    described = tile.described and lanes % weight.width == 0 and _can_describe(x, tile)
    written = described and splits == 1 and is_aligned(y)
    if written:
        target = TensorDescriptor.from_tensor(y, [block_t, block_n])
    lane_product[(triton.cdiv(n, block_n) * triton.cdiv(tokens, block_t), splits)](
        TensorDescriptor.from_tensor(x, [block_t, weight.planes * lanes]) if described else x,
        *(weight.numbers, weight.scale, bias, target),
        *(x.stride(0), n if splits > 1 else y.stride(0), tokens, n, weight.inputs, weight.blocks),
        DESCRIBED=described,
        WRITTEN=written,
        KIND=weight.kind,
        TABLE=weight.table,
        SCALES=weight.scales,
        ZEROS=weight.zeros,
        PLANES=weight.planes,
        WIDTH=weight.width,
        LANES=lanes,
        ACTIVATION="none" if activation is None else activation.value,
        ADD=add and splits == 1,
        ASSEMBLY=capability(y.device) is not None,
        EVEN=weight.inputs % block == 0 and even,
        SPLITS=splits,
        PARTS=tile.parts,
        COLUMNS=columns,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        AHEAD=tile.ahead if asks_rows(weight.numbers) else 0,
        STAGES=min(tile.stages, most_stages(y.device, step)),
        num_warps=tile.warps,
        **launch_options(y.device),
    )
    if splits > 1:
        add_up(target, bias, y, add=add)


def _can_describe(x: torch.Tensor, tile: LaneTile) -> bool:
    """Whether the tensor memory engine can fetch blocks of the inputs."""
    generation = capability(x.device)
    has_engine = generation is None or generation >= (9, 0)
    whole = tile.parts == 1 and tile.block_t >= LEAST_COLUMNS
    return has_engine and whole and is_aligned(x)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether rows begin where the tensor memory engine takes them: at multiples of 16 bytes."""
    return x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


@launched
@triton.jit(do_not_specialize=["tokens"])
def lane_product(
    x,
    weight,
    scale,
    bias,
    y,
    x_stride,
    y_stride,
    tokens,
    n,
    k,
    blocks,
    DESCRIBED: tl.constexpr,
    WRITTEN: tl.constexpr,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
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
    some that are nothing. A step takes LANES of a row. AHEAD bytes of each row are
    asked for at first. SPLITS programs share a row; they leave partial sums [SPLITS, tokens, n]
    float32. Programs of a block of rows follow each other, so that its weight is read once.
    """
    GATES: tl.constexpr = 2 if ACTIVATION != "none" else 1
    ALL: tl.constexpr = GATES * PARTS * BLOCK_N
    #: Blocks of a step, their lanes, and steps of a block.
    BLOCKS: tl.constexpr = max(LANES // WIDTH, 1)
    SOME: tl.constexpr = min(LANES, WIDTH)
    SUB: tl.constexpr = WIDTH // SOME
    INPUTS: tl.constexpr = PLANES * LANES
    DTYPE: tl.constexpr = x.dtype if DESCRIBED else x.dtype.element_ty
    row_lanes = blocks * WIDTH
    share = tl.cdiv(tl.cdiv(row_lanes, LANES), PARTS * SPLITS)
    blocks_t = tl.cdiv(tokens, BLOCK_T)
    block_n, block_t = tl.program_id(0) // blocks_t, tl.program_id(0) % blocks_t
    tile_row = tl.arange(0, ALL)
    row_part = tile_row // BLOCK_N % PARTS
    own = tl.minimum(block_n * BLOCK_N + tile_row % BLOCK_N, n - 1)
    own += tile_row // (PARTS * BLOCK_N) * n
    column = tl.arange(0, COLUMNS)
    part, token = column // BLOCK_T, block_t * BLOCK_T + column % BLOCK_T
    is_x = (token < tokens) & (part < PARTS)
    first_of_row = (tl.program_id(1) * PARTS + row_part) * share
    first = (tl.program_id(1) * PARTS + part) * share
    at_w = weight + own.to(tl.int64) * row_lanes
    at_x = token.to(tl.int64) * x_stride
    rows = GATES * n
    if AHEAD > 0:
        start = tl.program_id(1) * PARTS * share * LANES
        ask_rows(weight, block_n * BLOCK_N, n, start, row_lanes, BLOCK_N, AHEAD)
        if GATES == 2:
            ask_rows(weight, block_n * BLOCK_N + n, rows, start, row_lanes, BLOCK_N, AHEAD)
    await_inputs(OVERLAP)
    sums = tl.zeros((ALL, COLUMNS), tl.float32)
    tl.assume(share > 0)
    for step in tl.range(0, share, num_stages=STAGES):
        its = (first + step)[None, :]
        of_step = tl.arange(0, INPUTS)[:, None]
        i = its // SUB * (PLANES * WIDTH) * BLOCKS + its % SUB * SOME
        i += of_step // SOME * WIDTH + of_step % SOME
        if DESCRIBED:
            # Beyond the last input and token it gives zeros.
            v = tl.trans(x.load([block_t * BLOCK_T, (tl.program_id(1) * share + step) * INPUTS]))
        else:
            inside = _inside(is_x[None, :], i, k, EVEN)
            v = tl.load(x + at_x[None, :] + i, mask=inside, other=0.0)
        lane = ((first_of_row + step) * LANES)[:, None] + tl.arange(0, LANES)[None, :]
        block = ((first_of_row + step) // SUB * BLOCKS)[:, None] + tl.arange(0, BLOCKS)[None, :]
        w = widened_lanes(
            at_w, scale, own, lane, block, row_lanes, blocks, rows,
            KIND, TABLE, SCALES, ZEROS, PLANES, SOME, DTYPE, ASSEMBLY, EVEN,
        )  # fmt: skip
        sums = settled(tl.dot(w, v, sums, input_precision="ieee"), ASSEMBLY)
    sums *= lane_unit(KIND, ZEROS, DTYPE, ASSEMBLY)
    if SCALES == 0:
        sums *= tl.load(scale + own).to(tl.float32, bitcast=True)[:, None]
    out = sum_parts(sums, row_part, part, GATES, PARTS, BLOCK_N, BLOCK_T)
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = block_t * BLOCK_T + tl.arange(0, BLOCK_T)
    _finish(
        out, bias, y, y_stride, tokens, n, row, token, block_n * BLOCK_N, block_t * BLOCK_T,
        WRITTEN, GATES, ACTIVATION, ADD, SPLITS,
    )  # fmt: skip


@triton.jit
def _inside(is_x, i, k, EVEN: tl.constexpr):
    return is_x if EVEN else is_x & (i < k)


@triton.jit
def _finish(
    out,
    bias,
    y,
    y_stride,
    tokens,
    n,
    row,
    token,
    first_row,
    first_token,
    WRITTEN: tl.constexpr,
    GATES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Bias, gate, residual; rounded once, and once more where it is added. Or parts of sums."""
    inside = (token < tokens)[None, :] & (row < n)[:, None]
    if SPLITS > 1:
        tl.static_assert(GATES == 1)
        at_part = (tl.program_id(1).to(tl.int64) * tokens + token[None, :]) * n + row[:, None]
        tl.store(y + at_part, tl.reshape(out, (row.numel, token.numel)), mask=inside)
    else:
        own = tl.minimum(row, n - 1)
        if GATES == 2:
            out, up = tl.split(tl.permute(out, (1, 2, 0)))
            if bias is not None:
                up += tl.load(bias + n + own).to(tl.float32)[:, None]
        else:
            out = tl.reshape(out, (row.numel, token.numel))
        if bias is not None:
            out += tl.load(bias + own).to(tl.float32)[:, None]
        if GATES == 2:
            out = gated_unit(out, up, ACTIVATION)
        if WRITTEN:
            write_tile(out, y, first_row, first_token, ADD)
        else:
            at_y = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
            out = out.to(y.dtype.element_ty)
            if ADD:
                out = out.to(tl.float32) + tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
            tl.store(at_y, out.to(y.dtype.element_ty), mask=inside)
