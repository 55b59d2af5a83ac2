"""Operations of one rank among several: each computes its part, and a group joins the parts.

Every rank has the whole residual stream, bit by bit the same. Products that read it yield this
rank's heads or features. Products that end in it yield one summand a rank; the sum is made before
it meets the residual stream, so that the stream is rounded as often as on a single rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

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
from tokenpod.kernels.operations.ops import NormedLinear, Operations, PrepareAddLinear
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
        table: torch.Tensor, t_token: torch.Tensor, add: AddToRows | None = None
    ) -> torch.Tensor:
        row = t_token - group.rank * len(table)
        elsewhere = (row < 0) | (row >= len(table))
        x = embed(table, row.masked_fill(elsewhere, 0))
        x.masked_fill_(elsewhere[:, None], 0)
        if add is not None:
            add(x, row)
        group.sum(x)
        return x

    return embed_shard


class SummedAdd:
    """A product whose summands ranks add to the stream; it knows which product reads that next."""

    def __init__(
        self, ops: Operations, group: Group, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self._group = group
        #: Gets the stream normed where that is part of the sum.
        self.reader: NormedLinear | None = None
        own_bias = bias if group.rank == 0 else None  # it is added once
        if ops.prepare_sum_linear is None or group.buffers is None:
            self._summand = ops.prepare_linear(weight, own_bias)
            self._add_product = self._add_apart
        else:
            prepare = ops.prepare_sum_linear
            self._add_product = prepare(weight, own_bias, group.buffers, self._add)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Residual [T, out] += the sum over ranks of products with x [T, in]."""
        if self.reader is not None:
            self.reader.given = None
        self._add_product(x, residual)

    def _add_apart(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        self._add(self._summand(x), residual)

    def _add(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        reader = self.reader
        if reader is None or not reader.norms_apart(len(residual)):
            self._group.add(partial, residual)
        else:
            reader.given = self._group.add(partial, residual, reader.norm)


def let_follow(written: object, read: object) -> NormedLinear | None:
    """Let a sum that ends in the stream norm it for the product that reads it next.

    Nothing else may change the stream between the two, or what is `given` is to be forgotten.

    Returns:
        That product; None where these are other operations, which are left as they are.
    """
    if not isinstance(written, SummedAdd) or not isinstance(read, NormedLinear):
        return None
    written.reader = read
    return read


def _prepare_added(ops: Operations, group: Group) -> PrepareAddLinear:
    return partial(SummedAdd, ops, group)


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
