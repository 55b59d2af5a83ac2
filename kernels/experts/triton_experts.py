"""Mixtures of experts: six launches for few tokens, seven for more; none needs the host.

The norm, the choice, two products and a sum, the same for one token and for thousands: what a token
gets depends on no other (`expert_routing`). The experts' results are written apart and summed in a
launch of their own, which also adds what a shared expert made: sums in memory would come in any
order and differ from run to run.
"""

from __future__ import annotations

import torch
import triton

from tokenpod.kernels.experts.expert_products import SUM_BLOCK, most_blocks, product, weighted_sum
from tokenpod.kernels.experts.expert_routing import Assignments, Biases, assign
from tokenpod.kernels.experts.expert_stacks import KernelStack, Stacks, stack_of, walk_of
from tokenpod.kernels.experts.expert_tiles import ProductTile, Table, choose_tile, table_for
from tokenpod.kernels.gpu.launch import capability, launch_options, most_stages
from tokenpod.kernels.operations.expert_ops import AddExperts, ExpertWeights, Routing, Shared
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise.triton_pointwise import rms_norm

#: The matrix unit's fewest rows of factors in shared memory.
LEAST_TILE = 64
#: Blocks of tokens that share an expert's weight while it is in the cache.
GROUP = 8


def prepare_experts(
    weights: ExpertWeights,
    norm: RowNorm | None,
    activation: Activation,
    routing: Routing,
    tiles: Table | None = None,
) -> AddExperts:
    """A sparse block by the kernels here; `tiles` None means those of expert_tiles."""
    for name, weight in weights._asdict().items():
        if isinstance(weight, torch.Tensor) and not weight.is_contiguous():
            raise ValueError(f"the experts' {name} {list(weight.shape)} is not contiguous")
    router, biases = weights.router, Biases(weights.router_bias, weights.correction)
    gate_up_bias, down_bias = weights.gate_up_bias, weights.down_bias
    generation = capability(router.device)
    # What was repacked does not live on beside it: nothing else of `weights` is kept.
    stacks = Stacks(
        stack_of(weights.gate_up, router.dtype, generation),
        stack_of(weights.down, router.dtype, generation),
    )
    table = tiles or table_for(router.element_size(), generation, stacks.form)

    def add_experts(
        residual: torch.Tensor,
        into: torch.Tensor | None = None,
        shared: Shared | None = None,
        inputs: torch.Tensor | None = None,
    ) -> None:
        x = residual if norm is None else rms_norm(residual, norm.weight, norm.epsilon)
        assignments = assign(x, router, routing, biases)
        count = assignments.order.numel()
        tile = choose_tile(table, count, len(router))
        seen = x if inputs is None else inputs
        inner = torch.empty((count, stacks.width), dtype=x.dtype, device=x.device)
        multiply(
            *(seen, stacks.gate_up, inner, assignments),
            *(tile.block_t, tile.gate_up, activation, gate_up_bias),
        )
        outer = torch.empty((count, seen.shape[1]), dtype=x.dtype, device=x.device)
        multiply(inner, stacks.down, outer, assignments, tile.block_t, tile.down, None, down_bias)
        _add_sum(outer, assignments.scale, shared, residual if into is None else into)

    return add_experts


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor | KernelStack,
    y: torch.Tensor,
    assignments: Assignments,
    block_t: int,
    tile: ProductTile,
    activation: Activation | None,
    bias: torch.Tensor | None = None,
) -> None:
    """Launch `expert_products.product`: gathered and activated if there is an `activation`.

    Args:
        x: [T, in] with an activation, else [T · K, in], for K experts a token.
        weight: [experts, outputs, in]; if y has half as many outputs, gates first, then what they
            gate. Inputs are rounded first if its format says so.
        y: [T · K, outputs or half as many]; overwritten.
        assignments: which expert computes which rows.
        block_t: rows of a program, for which `assignments` were sorted.
        tile: the rest of its shape.
        activation: of the gates, or of what is made without gates; None: there is none.
        bias: [experts, outputs].
    """
    count, n = y.shape
    experts, rows, k = weight.shape
    gates = 1 if activation is None else rows // n
    walk = walk_of(x, weight, tile.block_k)
    block_n = tile.block_n // gates
    blocks = most_blocks(count, experts, block_t)
    whole = walk.scale_rows % block_n == 0 and n % block_n == 0
    shared = walk.per_group > 0 and walk.rounded and whole and block_t >= LEAST_TILE
    product[(blocks * triton.cdiv(n, block_n),)](
        *(walk.x, walk.x_scale, walk.weight, walk.scale, bias, y),
        *(assignments.order, assignments.start, count, blocks, experts, n, k),
        *(walk.columns, walk.scale_rows, walk.their_columns, len(x)),
        FORM=walk.form,
        KIND=walk.kind,
        TABLE=walk.table,
        SCALES=walk.scales,
        ZEROS=walk.zeros,
        SCALES_APART=walk.apart,
        PLANES=walk.planes,
        WIDTH=walk.width,
        ROUNDED=walk.rounded,
        SHARED=shared,
        PER_GROUP=walk.per_group,
        PER_THEIR=walk.per_their,
        EVEN=walk.even,
        BLOCK_K=walk.block_k,
        ASSEMBLY=capability(x.device) is not None,
        PER_TOKEN=assignments.scale.shape[1],
        EXPERTS=triton.next_power_of_2(experts),
        ACTIVATION="none" if activation is None else activation.value,
        GATES=gates,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        STAGES=min(tile.stages, most_stages(x.device, walk.step_bytes(block_t, tile.block_n))),
        GROUP=GROUP,
        num_warps=tile.warps,
        **launch_options(x.device),
    )


def _add_sum(
    x: torch.Tensor, scale: torch.Tensor, shared: Shared | None, residual: torch.Tensor
) -> None:
    """Residual [T, n] += the sum of x [T · K, n] by scale [T, K], and what is shared."""
    tokens, n = residual.shape
    weighted_sum[(tokens, triton.cdiv(n, SUM_BLOCK))](
        *(x, scale, *(shared or (None, None)), residual, residual.stride(0), n),
        PER_TOKEN=scale.shape[1],
        BLOCK=SUM_BLOCK,
        **launch_options(x.device),
    )
