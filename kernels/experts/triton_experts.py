"""Mixtures of experts: five launches for one token, six or seven for more; none needs the host.

Norm and choice are the same for any number of tokens: see `expert_routing`.

The experts' results are written apart and summed in a launch of their own: sums in memory would
come in any order and differ from run to run.
"""

from __future__ import annotations

import torch
import triton

from tokenpod.kernels.experts.expert_products import SUM_BLOCK, most_blocks, product, weighted_sum
from tokenpod.kernels.experts.expert_routing import Assignments, Biases, assign
from tokenpod.kernels.experts.expert_stacks import Stacks, WalkedStack, stack_of, stored_arguments
from tokenpod.kernels.experts.expert_tiles import (
    TOKEN_TILE,
    ProductTile,
    Table,
    choose_tile,
    table_for,
)
from tokenpod.kernels.experts.expert_token import add_for_one
from tokenpod.kernels.experts.expert_token_stored import add_stored_for_one
from tokenpod.kernels.gpu.launch import capability, launch_options
from tokenpod.kernels.operations.expert_ops import AddExperts, ExpertWeights, Routing
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise.triton_pointwise import rms_norm

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
    for name, weight in weights._asdict().items():
        if isinstance(weight, torch.Tensor) and not weight.is_contiguous():
            raise ValueError(f"the experts' {name} {list(weight.shape)} is not contiguous")
    router, biases = weights.router, Biases(weights.router_bias, weights.correction)
    generation = capability(router.device)
    stacks = Stacks(
        stack_of(weights.gate_up, router.dtype, generation),
        stack_of(weights.down, router.dtype, generation),
    )
    gate_up, down = stacks
    dense = isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    # What was repacked must not live on beside it.
    nothing = router.new_empty((0, 0, 0))
    weights = weights._replace(
        gate_up=gate_up if isinstance(gate_up, torch.Tensor) else nothing,
        down=down if isinstance(down, torch.Tensor) else nothing,
    )
    table = tiles or table_for(router.element_size(), generation, dense=dense)

    def add_experts(residual: torch.Tensor, into: torch.Tensor | None = None) -> None:
        into = residual if into is None else into
        x = residual if norm is None else rms_norm(residual, norm.weight, norm.epsilon)
        assignments = assign(x, router, routing, biases)
        alone = len(residual) == 1
        if alone and dense:
            add_for_one(x, into, weights, activation, assignments, TOKEN_TILE)
        elif alone and isinstance(gate_up, WalkedStack) and isinstance(down, WalkedStack):
            add_stored_for_one(x, into, weights, gate_up, down, activation, assignments)
        else:
            add_for_many(x, into, weights, stacks, activation, assignments, table)

    return add_experts


def add_for_many(
    x: torch.Tensor,
    into: torch.Tensor,
    weights: ExpertWeights,
    stacks: Stacks,
    activation: Activation,
    assignments: Assignments,
    tiles: Table,
) -> None:
    """Into [T, hidden] += the output for x [T, hidden], which is normed, of its experts.

    On the matrix unit. Of `weights` only biases are read.
    """
    count = assignments.order.numel()
    hidden, experts = x.shape[1], len(weights.router)
    width = stacks.width
    tile = choose_tile(tiles, count, experts)
    inner = torch.empty((count, width), dtype=x.dtype, device=x.device)
    bias = weights.gate_up_bias
    multiply(x, stacks.gate_up, inner, assignments, tile.block_t, tile.gate_up, activation, bias)
    outer = torch.empty((count, hidden), dtype=x.dtype, device=x.device)
    bias = weights.down_bias
    multiply(inner, stacks.down, outer, assignments, tile.block_t, tile.down, None, bias)
    _add_sum(outer, assignments.scale, into)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor | WalkedStack,
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
            Inputs are rounded first if its format says so.
        y: [T · K, outputs], or half as many with an activation; overwritten.
        assignments: which expert computes which rows.
        block_t: rows of a program, for which `assignments` were sorted.
        tile: the rest of its shape.
        activation: of the gates; None: no gates.
        bias: [experts, outputs].
    """
    count, n = y.shape
    experts, _, k = weight.shape
    launch = stored_arguments(x, weight, tile.block_k)
    block_n = tile.block_n if activation is None else tile.block_n // 2
    blocks = most_blocks(count, experts, block_t)
    product[(blocks * triton.cdiv(n, block_n),)](
        launch.x,
        launch.x_scale,
        launch.weight,
        launch.scale,
        launch.zero,
        launch.table,
        bias,
        y,
        assignments.order,
        assignments.start,
        count,
        blocks,
        experts,
        n,
        k,
        launch.row_bytes,
        launch.columns,
        launch.scale_rows,
        launch.their_columns,
        KIND=launch.kind,
        ROUNDED=launch.rounded,
        PLANES=launch.planes,
        PER_GROUP=launch.per_group,
        PER_THEIR=launch.per_their,
        ASSEMBLY=capability(x.device) is not None,
        PER_TOKEN=assignments.scale.shape[1],
        EXPERTS=triton.next_power_of_2(experts),
        ACTIVATION="none" if activation is None else activation.value,
        EVEN=k % (launch.planes * launch.width) == 0,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=launch.width,
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
