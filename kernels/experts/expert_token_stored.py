"""One token's experts whose weights are bytes of some format: as `expert_token`, read so.

A program walks along a tile of its rows' bytes [rows, runs, width], a run of which has one scale. A
format that rounds inputs gets rounded ones, which is a launch more for each product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.experts.expert_routing import Assignments
from tokenpod.kernels.experts.expert_stacks import WalkedStack
from tokenpod.kernels.gpu.launch import await_inputs, capability, launch_options
from tokenpod.kernels.operations.expert_ops import ExpertWeights
from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit
from tokenpod.kernels.products.quantised.input_rounding import Rounded, round_inputs
from tokenpod.kernels.products.quantised.walked import Walked
from tokenpod.kernels.products.quantised.widening import widened

#: Rows of the weight that a program has (of gates half as many, with what they open), bytes of each
#: that it reads at a time, and its warps.
ROWS, BYTES, WARPS = 4, 1024, 4


def add_stored_for_one(
    x: torch.Tensor,
    into: torch.Tensor,
    weights: ExpertWeights,
    gate_up: WalkedStack,
    down: WalkedStack,
    activation: Activation,
    table: Assignments,
) -> None:
    """Into [1, hidden] += the output for x [1, hidden], which is normed, of its experts.

    Of `weights` only biases are read.
    """
    places, (_, hidden, width) = table.chosen.shape[1], down.shape
    inner = torch.empty((places, width), dtype=x.dtype, device=x.device)
    x_scale, device = x, x.device
    if gate_up.rows.rounding is not None:
        x, x_scale = _bytes(round_inputs(x, gate_up.rows.rounding))
    rows = max(1, ROWS // 2)
    gated_stored[(triton.cdiv(width, rows), places)](
        *(x, x_scale, *_tensors(gate_up.rows)),
        *(weights.gate_up_bias, table.chosen, inner, width, gate_up.rows.inputs),
        *_sizes(gate_up.rows, x_scale),
        ACTIVATION=activation.value,
        BLOCK_N=rows,
        **_options(gate_up.rows, device),
    )
    x, x_scale = inner, inner
    if down.rows.rounding is not None:
        x, x_scale = _bytes(round_inputs(inner, down.rows.rounding))
    added_stored[(triton.cdiv(hidden, ROWS),)](
        *(x, x_scale, *_tensors(down.rows), weights.down_bias, table.chosen, table.scale, into),
        *(hidden, down.rows.inputs, *_sizes(down.rows, x_scale)),
        PER_TOKEN=places,
        BLOCK_N=ROWS,
        **_options(down.rows, device),
    )


def _bytes(rounded: Rounded) -> tuple[torch.Tensor, torch.Tensor]:
    return rounded.numbers.view(torch.int8), rounded.scale


def _tensors(rows: Walked) -> tuple[torch.Tensor | None, ...]:
    return rows.numbers, rows.scale, rows.zero, rows.table


def _sizes(rows: Walked, x_scale: torch.Tensor) -> tuple[int, ...]:
    """Bytes of a row, its scales, rows that share them, and scales of an input."""
    their_columns = 1 if rows.rounding is None else x_scale.shape[1]
    return rows.numbers.shape[1], rows.scale.shape[1], rows.scale_rows, their_columns


def _options(rows: Walked, device: torch.device) -> dict[str, object]:
    rounding, width = rows.rounding, rows.width
    return {
        "KIND": rows.kind,
        "ROUNDED": rounding is not None,
        "PLANES": rows.planes,
        "WIDTH": width,
        "PER_GROUP": 0 if rows.group is None else max(rows.group // width, 1),
        "PER_THEIR": 0 if rounding is None or rounding.group is None else rounding.group // width,
        "RUNS": BYTES // width,
        "ASSEMBLY": capability(device) is not None,
        "num_warps": WARPS,
        **launch_options(device),
    }


@triton.jit
def gated_stored(
    x,
    x_scale,
    weight,
    scale,
    zero,
    table,
    bias,
    chosen,
    y,
    n,
    k,
    row_bytes,
    columns,
    scale_rows,
    their_columns,
    KIND: tl.constexpr,
    ROUNDED: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_GROUP: tl.constexpr,
    PER_THEIR: tl.constexpr,
    RUNS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [K, n] from x [k] and weight [E, 2n, k], gates first, with a bias [E, 2n]."""
    place = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)
    await_inputs(OVERLAP)
    gate_row = tl.load(chosen + place).to(tl.int64) * 2 * n + own
    gates = tl.zeros((BLOCK_N, RUNS, WIDTH), tl.float32)
    ups = tl.zeros((BLOCK_N, RUNS, WIDTH), tl.float32)
    for start in tl.range(0, tl.cdiv(row_bytes, WIDTH), RUNS):
        run = start + tl.arange(0, RUNS)
        packed = _read(weight, gate_row, run, row_bytes, WIDTH)
        up_packed = _read(weight, gate_row + n, run, row_bytes, WIDTH)
        for plane in tl.static_range(PLANES):
            q = run * PLANES + plane
            v = _inputs(x, x_scale, q, k, their_columns, KIND, ROUNDED, PER_THEIR, WIDTH)
            at = gate_row // scale_rows * columns
            gates += v * _numbers(
                packed, plane, scale, zero, table, at, q, columns, KIND, PER_GROUP, ASSEMBLY
            )
            at = (gate_row + n) // scale_rows * columns
            ups += v * _numbers(
                up_packed, plane, scale, zero, table, at, q, columns, KIND, PER_GROUP, ASSEMBLY
            )
    gate_sum = tl.sum(tl.sum(gates, axis=2), axis=1)
    up_sum = tl.sum(tl.sum(ups, axis=2), axis=1)
    if ROUNDED and PER_THEIR == 0:
        factor = tl.load(x_scale)
        gate_sum, up_sum = gate_sum * factor, up_sum * factor
    if PER_GROUP == 0:
        gate_sum *= tl.load(scale + gate_row // scale_rows * columns).to(tl.float32)
        up_sum *= tl.load(scale + (gate_row + n) // scale_rows * columns).to(tl.float32)
    if bias is not None:
        gate_sum += tl.load(bias + gate_row).to(tl.float32)
        up_sum += tl.load(bias + gate_row + n).to(tl.float32)
    out = gated_unit(gate_sum, up_sum, ACTIVATION)
    tl.store(y + place * n + row, out.to(y.dtype.element_ty), mask=row < n)


@triton.jit
def added_stored(
    x,
    x_scale,
    weight,
    scale,
    zero,
    table,
    bias,
    chosen,
    share,
    residual,
    n,
    k,
    row_bytes,
    columns,
    scale_rows,
    their_columns,
    KIND: tl.constexpr,
    ROUNDED: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_GROUP: tl.constexpr,
    PER_THEIR: tl.constexpr,
    RUNS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Residual [n] += Σ share [K] · (x [K, k] · weightᵀ [E, n, k] + bias [E, n])."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)
    await_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_N, RUNS, WIDTH), tl.float32)
    # One loop over all experts' rows: what is in flight does not run dry between two of them.
    steps = tl.cdiv(tl.cdiv(row_bytes, WIDTH), RUNS)
    for step in tl.range(0, PER_TOKEN * steps):
        place = step // steps
        run = (step - place * steps) * RUNS + tl.arange(0, RUNS)
        its_row = tl.load(chosen + place).to(tl.int64) * n + own
        at = its_row // scale_rows * columns
        packed = _read(weight, its_row, run, row_bytes, WIDTH)
        factor = tl.load(share + place)
        if ROUNDED and PER_THEIR == 0:
            factor *= tl.load(x_scale + place)
        made = tl.zeros((BLOCK_N, RUNS, WIDTH), tl.float32)
        for plane in tl.static_range(PLANES):
            q = run * PLANES + plane
            v = _inputs(
                x + place * k,
                x_scale + place * their_columns,
                q,
                k,
                their_columns,
                KIND,
                ROUNDED,
                PER_THEIR,
                WIDTH,
            )
            made += v * _numbers(
                packed, plane, scale, zero, table, at, q, columns, KIND, PER_GROUP, ASSEMBLY
            )
        if PER_GROUP == 0:
            made *= tl.load(scale + at).to(tl.float32)[:, None, None]
        sums += factor * made
    at = residual + row
    out = tl.sum(tl.sum(sums, axis=2), axis=1)
    out += tl.load(at, mask=row < n, other=0.0).to(tl.float32)
    if bias is not None:
        for place in range(PER_TOKEN):
            of_bias = bias + tl.load(chosen + place).to(tl.int64) * n + own
            out += tl.load(share + place) * tl.load(of_bias).to(tl.float32)
    tl.store(at, out.to(residual.dtype.element_ty), mask=row < n)


@triton.jit
def _read(weight, row, run, row_bytes, WIDTH: tl.constexpr):
    """Bytes [rows, runs, width]; zeros beyond a row's end."""
    byte = run[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    at = weight + row[:, None, None] * row_bytes + byte
    return tl.load(at, mask=byte < row_bytes, other=0, eviction_policy="evict_first")


@triton.jit
def _inputs(
    x,
    x_scale,
    run,
    k,
    their_columns,
    KIND: tl.constexpr,
    ROUNDED: tl.constexpr,
    PER_THEIR: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Inputs of runs [1, runs, width] float32."""
    i = run[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    loaded = tl.load(x + i, mask=i < k, other=0)
    if ROUNDED and KIND == "fp8":
        v = loaded.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        v = loaded.to(tl.float32)
    if ROUNDED and PER_THEIR > 0:
        v *= tl.load(x_scale + tl.minimum(run // PER_THEIR, their_columns - 1))[None, :, None]
    return v


@triton.jit
def _numbers(
    packed,
    plane,
    scale,
    zero,
    table,
    at,
    run,
    columns,
    KIND: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """What bytes stand for [rows, runs, width] float32, but for the scale of a whole row."""
    if PER_GROUP > 0:
        of_run = at[:, None, None] + tl.minimum(run // PER_GROUP, columns - 1)[None, :, None]
        z = 0.0
        if zero is not None:
            z = tl.load(zero + of_run).to(tl.float32)
        w = widened(packed, plane, tl.load(scale + of_run), z, table, KIND, ASSEMBLY)
    else:
        w = widened(packed, plane, tl.full((1, 1, 1), 1.0, tl.float32), 0.0, table, KIND, ASSEMBLY)
    return w
