"""Products with dense weights and what adapters add to them, in as few launches as there can be.

`shrink` multiplies inputs with the first factors. Of few tokens the product's own kernel then adds
the rest where it ends: before a norm's divisor, a gate and the residual. Of many, and where the
library makes the product, one launch adds to what was made.
"""

from __future__ import annotations

import torch

from tokenpod.kernels.adapter_ops import AdaptedAdd, AdaptedLinear, AdaptedProducts, Added
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.triton.adapter_sums import Terms
from tokenpod.kernels.triton.adapters import Plan, expand, shrink
from tokenpod.kernels.triton.pointwise import act_mul, rms_norm
from tokenpod.kernels.triton.product import (
    TermsOf,
    multiply,
    outputs_of,
    prepare_add_linear,
    prepare_linear,
    table_for,
)
from tokenpod.kernels.triton.tiles import Kind, Tile, Tiles

#: Tokens of a step, at most, whose products add adapters' terms themselves.
MOST_JOINED = 64


def linear(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> AdaptedLinear:
    """See `AdaptedProducts`; `tiles` None means those measured."""
    table, (n, k) = table_for(weight, tiles), weight.shape
    plain = prepare_linear(weight, bias, tiles)

    def product(x: torch.Tensor, added: Added) -> torch.Tensor:
        tile = table.choose(n, k, len(x))
        inner = shrink(x, added.weights, added.plan)
        if not _joins(tile, added, gated=False):
            y = plain(x)
            expand(inner, added.weights, added.plan, y, add=True)
            return y
        y = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
        multiply(x, weight, bias, y, tile, terms=_terms(inner, added))
        return y

    return product


def norm_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RowNorm,
    activation: Activation | None,
    tiles: Tiles | None = None,
) -> AdaptedLinear:
    """See `AdaptedProducts`: of a handful of tokens the norm is the product's own."""
    table, (n, k) = table_for(weight, tiles), weight.shape
    plain, gated = prepare_linear(weight, bias, tiles), activation is not None
    outputs = n // 2 if gated else n

    def normed_product(x: torch.Tensor, added: Added) -> torch.Tensor:
        tile = table.choose(n, k, len(x))
        joins = _joins(tile, added, gated=gated)
        inside = norm if joins and tile.kind is Kind.MULTIPLY_ADD else None
        if inside is None:
            x = rms_norm(x, norm.weight, norm.epsilon)
        inner = shrink(x, added.weights, added.plan, inside and inside.weight)
        if not joins:
            y = plain(x)
            expand(inner, added.weights, added.plan, y, add=True)
            return y if activation is None else act_mul(y, activation)
        y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        terms = _terms(inner, added)
        multiply(x, weight, bias, y, tile, norm=inside, activation=activation, terms=terms)
        return y

    return normed_product


def add_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> AdaptedAdd:
    """See `AdaptedProducts`: the sum is made where the product ends."""
    table, (n, k) = table_for(weight, tiles), weight.shape
    plain = prepare_add_linear(weight, bias, tiles)

    def add_product(x: torch.Tensor, residual: torch.Tensor, added: Added) -> None:
        tile = table.choose(n, k, len(x))
        inner = shrink(x, added.weights, added.plan)
        if _joins(tile, added, gated=False):
            multiply(x, weight, bias, residual, tile, add=True, terms=_terms(inner, added))
            return
        plain(x, residual)
        expand(inner, added.weights, added.plan, residual, add=True)

    return add_product


def _joins(tile: Tile, added: Added, *, gated: bool) -> bool:
    """Whether a kernel of ours makes the product, and each of its programs outputs of one part."""
    plan: Plan = added.plan
    if tile.kind is Kind.LIBRARY or plan.units is None or len(plan.order) > MOST_JOINED:
        return False
    rows = added.weights.rows
    if gated:
        return len(rows) == 2 and rows[0] == rows[1]
    return all(part % outputs_of(tile, gated=False) == 0 for part in rows[:-1])


def _terms(inner: torch.Tensor, added: Added) -> TermsOf:
    """Of one product, for its kernel."""
    plan: Plan = added.plan
    weights, (splits, _, parts, width) = added.weights, inner.shape
    assert plan.t_tile is not None, plan
    assert plan.units is not None, plan
    assert plan.count is not None, plan
    up, bias = weights.up, weights.bias
    slot_stride, rank_stride = up.stride()[:2]
    read = Terms(
        inner,
        up,
        up if bias is None else bias,
        plan.t_adapter,
        plan.t_tile,
        plan.units,
        plan.count,
        plan.ranks,
        slot_stride,
        rank_stride,
        0 if bias is None else bias.stride(0),
        weights.rows[0],
        sum(weights.rows[:2]),
    )
    return TermsOf(read, splits, parts, width, bias is not None)


ADAPTED = AdaptedProducts(linear, norm_linear, add_linear)
