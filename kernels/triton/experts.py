"""Mixtures of experts: four launches for one token, six or seven for more; none needs the host.

The experts' results are written apart and summed in a launch of their own: sums in memory would
come in any order and differ from run to run.
"""

from __future__ import annotations

import torch
import triton

from tokenpod.kernels.expert_ops import AddExperts, ExpertWeights, Routing, Stack
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.triton.expert_products import (
    SUM_BLOCK,
    most_blocks,
    product,
    weighted_sum,
)
from tokenpod.kernels.triton.expert_routing import Assignments, Biases, assign
from tokenpod.kernels.triton.expert_tiles import (
    TOKEN_TILE,
    ProductTile,
    Table,
    choose_tile,
    table_for,
)
from tokenpod.kernels.triton.expert_token import add_for_one
from tokenpod.kernels.triton.launch import capability, launch_options
from tokenpod.kernels.triton.pointwise import rms_norm

#: Blocks of tokens that share an expert's weight while it is in the cache.
GROUP = 8


def prepare_experts(
    weights: ExpertWeights,
    norm: RowNorm | None,
    activation: Activation,
    routing: Routing,
    tiles: Table | None = None,
) -> AddExperts:
    """See `ops.PrepareExperts`; `tiles` None means those of expert_tiles."""
    router = weights.router
    weights = weights._replace(
        gate_up=_dense(weights.gate_up, router.dtype), down=_dense(weights.down, router.dtype)
    )
    for name, weight in weights._asdict().items():
        if weight is not None and not weight.is_contiguous():
            raise ValueError(f"the experts' {name} {list(weight.shape)} is not contiguous")
    table = tiles or table_for(router.element_size(), capability(router.device))

    def add_experts(residual: torch.Tensor, into: torch.Tensor | None = None) -> None:
        into = residual if into is None else into
        if len(residual) == 1:
            add_for_one(residual, into, weights, norm, activation, routing, TOKEN_TILE)
        else:
            add_for_many(residual, into, weights, norm, activation, routing, table)

    return add_experts


def _dense(weights: Stack, dtype: torch.dtype) -> torch.Tensor:
    return weights if isinstance(weights, torch.Tensor) else weights.dequantised(dtype)


def add_for_many(
    residual: torch.Tensor,
    into: torch.Tensor,
    weights: ExpertWeights,
    norm: RowNorm | None,
    activation: Activation,
    routing: Routing,
    tiles: Table,
) -> None:
    """Into [T, hidden] += the block's output for `residual`, on the matrix unit."""
    assert isinstance(weights.gate_up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    x = residual if norm is None else rms_norm(residual, norm.weight, norm.epsilon)
    biases = Biases(weights.router_bias, weights.correction)
    assignments = assign(x, weights.router, routing, biases)
    count = assignments.order.numel()
    experts, hidden, width = weights.down.shape
    tile = choose_tile(tiles, count, experts)
    inner = torch.empty((count, width), dtype=x.dtype, device=x.device)
    bias = weights.gate_up_bias
    multiply(x, weights.gate_up, inner, assignments, tile.block_t, tile.gate_up, activation, bias)
    outer = torch.empty((count, hidden), dtype=x.dtype, device=x.device)
    bias = weights.down_bias
    multiply(inner, weights.down, outer, assignments, tile.block_t, tile.down, None, bias)
    _add_sum(outer, assignments.scale, into)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    assignments: Assignments,
    block_t: int,
    tile: ProductTile,
    activation: Activation | None,
    bias: torch.Tensor | None = None,
) -> None:
    """Launch `expert_products.product`: gated and gathered if there is an `activation`.

    Args:
        x: [T, in] with an activation, else [T · K, in], for K experts a token.
        weight: [experts, outputs, in]; with an activation the gates first, then what they gate.
        y: [T · K, outputs], or half as many with an activation; overwritten.
        assignments: which expert computes which rows.
        block_t: rows of a program, for which `assignments` were sorted.
        tile: the rest of its shape.
        activation: of the gates; None: no gates.
        bias: [experts, outputs].
    """
    count, n = y.shape
    experts, _, k = weight.shape
    block_n = tile.block_n if activation is None else tile.block_n // 2
    blocks = most_blocks(count, experts, block_t)
    product[(blocks * triton.cdiv(n, block_n),)](
        x,
        weight,
        bias,
        y,
        assignments.order,
        assignments.start,
        count,
        blocks,
        experts,
        n,
        k,
        PER_TOKEN=assignments.scale.shape[1],
        EXPERTS=triton.next_power_of_2(experts),
        ACTIVATION="none" if activation is None else activation.value,
        EVEN=k % tile.block_k == 0,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        GROUP=GROUP,
        num_warps=tile.warps,
        **launch_options(x.device),
    )


def _add_sum(x: torch.Tensor, scale: torch.Tensor, residual: torch.Tensor) -> None:
    """See `expert_products.weighted_sum`."""
    tokens, n = residual.shape
    weighted_sum[(tokens, triton.cdiv(n, SUM_BLOCK))](
        x,
        scale,
        residual,
        residual.stride(0),
        n,
        PER_TOKEN=scale.shape[1],
        BLOCK=SUM_BLOCK,
        **launch_options(x.device),
    )
