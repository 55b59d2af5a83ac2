"""One token's experts: in ordinary arithmetic, bound by reading their weights.

The sum over the experts is made where their last product ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.experts.expert_products import load_tile
from tokenpod.kernels.experts.expert_routing import Assignments
from tokenpod.kernels.experts.expert_tiles import ProductTile, TokenTile
from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.operations.expert_ops import ExpertWeights
from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit

#: Steps along a weight's row that divide it are worth their masks' absence, if not shorter.
SHORTEST_STEP = 256


def add_for_one(
    x: torch.Tensor,
    into: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    table: Assignments,
    tile: TokenTile,
) -> None:
    """Into [1, hidden] += the output for x [1, hidden], which is normed, of its experts."""
    assert isinstance(weights.gate_up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    bias = weights.gate_up_bias
    inner = gate_up_for_one(x, weights.gate_up, activation, table, tile.gate_up, bias)
    down_for_one(inner, weights.down, table, into, tile.down, weights.down_bias)


def gate_up_for_one(
    x: torch.Tensor,
    weight: torch.Tensor,
    activation: Activation,
    table: Assignments,
    tile: ProductTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gated units [K, n] of the token's experts, by their weights [E, 2n, hidden]."""
    places, n, k = table.chosen.shape[1], weight.shape[1] // 2, weight.shape[2]
    y = torch.empty((places, n), dtype=x.dtype, device=x.device)
    block_n, block_k = max(1, tile.block_n // 2), _step(k, tile.block_k)
    gated[(triton.cdiv(n, block_n), places)](
        x,
        weight,
        bias,
        table.chosen,
        y,
        n,
        k,
        ACTIVATION=activation.value,
        EVEN=k % block_k == 0,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(x.device),
    )
    return y


def down_for_one(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: Assignments,
    residual: torch.Tensor,
    tile: ProductTile,
    bias: torch.Tensor | None = None,
) -> None:
    """Residual [1, hidden] += the weighted sum of x [K, n] through weights [E, hidden, n]."""
    n, k = weight.shape[1:]
    block_k = _step(k, tile.block_k)
    added[(triton.cdiv(n, tile.block_n),)](
        x,
        weight,
        bias,
        table.chosen,
        table.scale,
        residual,
        n,
        k,
        PER_TOKEN=len(x),
        EVEN=k % block_k == 0,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(x.device),
    )


def _step(k: int, most: int) -> int:
    """Elements to read at a time, a power of two: `most`, or less if that divides k."""
    step: int = min(most, triton.next_power_of_2(k))
    dividing = min(step, k & -k)
    return dividing if dividing >= SHORTEST_STEP else step


@triton.jit
def gated(
    x,
    weight,
    bias,
    chosen,
    y,
    n,
    k,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [K, n] from x [k] and weight [E, 2n, k], gates first, with a bias [E, 2n]."""
    place = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)[:, None]
    await_inputs(OVERLAP)
    first = tl.load(chosen + place).to(tl.int64) * 2 * n
    at_gate = weight + (first + own) * k
    at_up = weight + (first + n + own) * k
    gates = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK_K)[None, :]
        gate = load_tile(at_gate + i, i < k, EVEN).to(tl.float32)
        up = load_tile(at_up + i, i < k, EVEN).to(tl.float32)
        v = load_tile(x + i, i < k, EVEN).to(tl.float32)
        gates += v * gate
        ups += v * up
    gate_sum, up_sum = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    if bias is not None:
        of_bias = bias + first + tl.minimum(row, n - 1)
        gate_sum += tl.load(of_bias).to(tl.float32)
        up_sum += tl.load(of_bias + n).to(tl.float32)
    out = gated_unit(gate_sum, up_sum, ACTIVATION)
    tl.store(y + place * n + row, out.to(y.dtype.element_ty), mask=row < n)


@triton.jit
def added(
    x,
    weight,
    bias,
    chosen,
    scale,
    residual,
    n,
    k,
    PER_TOKEN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Residual [n] += Σ scale [K] · x [K, k] · weightᵀ [E, n, k], over the token's experts."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)[:, None]
    await_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    # One loop over all experts' rows: what is in flight does not run dry between two of them.
    steps = tl.cdiv(k, BLOCK_K)
    for step in tl.range(0, PER_TOKEN * steps, num_stages=STAGES):
        place = step // steps
        i = (step - place * steps) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        at_w = weight + (tl.load(chosen + place).to(tl.int64) * n + own) * k
        w = load_tile(at_w + i, i < k, EVEN).to(tl.float32)
        v = load_tile(x + place * k + i, i < k, EVEN).to(tl.float32)
        sums += tl.load(scale + place) * v * w
    at = residual + row
    out = tl.sum(sums, axis=1) + tl.load(at, mask=row < n, other=0.0).to(tl.float32)
    if bias is not None:
        for place in range(PER_TOKEN):
            of_bias = bias + tl.load(chosen + place).to(tl.int64) * n + tl.minimum(row, n - 1)
            out += tl.load(scale + place) * tl.load(of_bias).to(tl.float32)
    tl.store(at, out.to(residual.dtype.element_ty), mask=row < n)
