"""Operations of one rank among several: each computes its part, and a group joins the parts.

Every rank has the whole residual stream, bit by bit the same. Products that read it yield this
rank's heads or features. Products that end in it yield one summand a rank; the sum is made before
it meets the residual stream, so that the stream is rounded as often as on a single rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenpod.kernels.operations.adapter_ops import (
    AdaptedAdd,
    AdaptedProducts,
    Added,
    BaseLinear,
    DenseWeight,
)
from tokenpod.kernels.operations.expert_ops import (
    AddExperts,
    ExpertWeights,
    PrepareExperts,
    Routing,
    Shared,
)
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.ops import AddLinear, Operations, PrepareAddLinear
from tokenpod.kernels.operations.pointwise_ops import Activation, AddToRows, Embed, RowNorm


def parallel(ops: Operations, group: Group) -> Operations:
    """The same operations for weights of which this rank has its shard.

    - `embed` takes this rank's block of a vocabulary, as many rows on every rank, those of rank 0
      first, and yields what the whole table yields.
    - `prepare_add_linear` and `prepare_experts` take this rank's input features, and every bias
      whole.
    - Plain products are this rank's own: who makes them sums or gathers.
    """
    return replace(
        ops,
        embed=_embed(ops.embed, group),
        prepare_add_linear=_prepare_added(ops, group),
        prepare_experts=_prepare_experts(ops.prepare_experts, group),
        adapted=ops.adapted and _adapted(ops.adapted, group),
        group=group,
    )


def _embed(embed: Embed, group: Group) -> Embed:
    def embed_shard(
        table: torch.Tensor,
        t_token: torch.Tensor,
        add: AddToRows | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        row = t_token - group.rank * len(table)
        elsewhere = (row < 0) | (row >= len(table))
        x = embed(table, row.masked_fill(elsewhere, 0), dtype=dtype)
        x.masked_fill_(elsewhere[:, None], 0)
        if add is not None:
            add(x, row)
        group.sum(x)
        return x

    return embed_shard


def _prepare_added(ops: Operations, group: Group) -> PrepareAddLinear:
    def prepare(weight: torch.Tensor, bias: torch.Tensor | None) -> AddLinear:
        # A bias is added once.
        own_bias = bias if group.rank == 0 else None
        if ops.prepare_sum_linear is not None and group.buffers is not None:
            return ops.prepare_sum_linear(weight, own_bias, group.buffers, group.add)
        product = ops.prepare_linear(weight, own_bias)

        def add_product(x: torch.Tensor, residual: torch.Tensor) -> None:
            group.add(product(x), residual)

        return add_product

    return prepare


def _adapted(products: AdaptedProducts, group: Group) -> AdaptedProducts:
    def add_linear(product: BaseLinear, dense: DenseWeight | None) -> AdaptedAdd:
        adapted = products.linear(product, dense)

        def add_product(x: torch.Tensor, residual: torch.Tensor, added: Added) -> None:
            group.add(adapted(x, added), residual)

        return add_product

    return replace(products, add_linear=add_linear)


def _prepare_experts(prepare_experts: PrepareExperts, group: Group) -> PrepareExperts:
    def prepare(
        weights: ExpertWeights, norm: RowNorm | None, activation: Activation, routing: Routing
    ) -> AddExperts:
        if group.rank:  # a bias of what ranks sum is added once
            weights = weights._replace(down_bias=None)
        block = prepare_experts(weights, norm, activation, routing)

        def add_experts(
            residual: torch.Tensor,
            into: torch.Tensor | None = None,
            shared: Shared | None = None,
            inputs: torch.Tensor | None = None,
        ) -> None:
            partial = torch.zeros_like(residual if inputs is None else inputs)
            block(residual, partial, shared, inputs)
            group.add(partial, residual if into is None else into)

        return add_experts

    return prepare
