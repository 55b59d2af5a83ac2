"""Products with dense weights and what adapters add to them, in as few launches as there can be.

One token's first factors are further rows of the product that it is a part of; of more tokens
`shrink` multiplies them. A launch behind the product adds the rest, and gates what is gated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

from tokenpod.kernels.adapter_ops import AdaptedAdd, AdaptedLinear, AdaptedProducts, Added
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.triton.adapters import Plan, expand, room_for, shrink, width_of
from tokenpod.kernels.triton.pointwise import rms_norm
from tokenpod.kernels.triton.product import (
    MoreRows,
    multiply,
    prepare_add_linear,
    prepare_linear,
    table_for,
)
from tokenpod.kernels.triton.tiles import Kind, Tile, Tiles

Made = TypeVar("Made")

#: Whether `shrink` runs beside the product, on a stream of its own, where it is a launch.
BESIDE = True


def linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    tiles: Tiles | None = None,
) -> AdaptedLinear:
    """See `PrepareAdaptedLinear`; one token's norm is the product's own. `tiles`: what to try."""
    table, (n, k) = table_for(weight, tiles), weight.shape
    plain = prepare_linear(weight, bias, tiles)

    def product(x: torch.Tensor, added: Added) -> torch.Tensor:
        tile = table.choose(n, k, len(x))
        if _is_one(x, tile):
            y, (inner, more) = torch.empty((1, n), dtype=x.dtype, device=x.device), _more(added)
            multiply(x, weight, bias, y, tile, norm=norm, more=more)
        else:
            read = x if norm is None else rms_norm(x, norm.weight, norm.epsilon)
            y, inner = _both(read, added, plain)
        gated = None
        if activation is not None:
            gated = torch.empty((len(x), n // 2), dtype=x.dtype, device=x.device)
        expand(inner, added.weights, added.plan, y, add=True, gated=gated, activation=activation)
        return y if gated is None else gated

    return product


def add_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> AdaptedAdd:
    """See `AdaptedProducts`."""
    table, (n, k) = table_for(weight, tiles), weight.shape
    plain = prepare_add_linear(weight, bias, tiles)

    def add_product(x: torch.Tensor, residual: torch.Tensor, added: Added) -> None:
        tile = table.choose(n, k, len(x))
        if _is_one(x, tile):
            inner, more = _more(added)
            multiply(x, weight, bias, residual, tile, add=True, more=more)
        else:
            _, inner = _both(x, added, lambda x: plain(x, residual))
        expand(inner, added.weights, added.plan, residual, add=True)

    return add_product


def _is_one(x: torch.Tensor, tile: Tile) -> bool:
    return len(x) == 1 and tile.kind is Kind.MULTIPLY_ADD


def _more(added: Added) -> tuple[torch.Tensor, MoreRows]:
    """Room for what one token's first factors make, and these as rows of a product."""
    plan: Plan = added.plan
    down = added.weights.down
    _, parts, rank, _ = down.shape
    width = width_of(rank)
    inner = torch.empty((1, 1, parts, width), dtype=torch.float32, device=down.device)
    slot, part, rank_stride, _ = down.stride()
    more = MoreRows(down, plan.t_adapter, plan.ranks, inner, slot, part, rank_stride, parts, width)
    return inner, more


@cache
def _side() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _both(
    x: torch.Tensor, added: Added, product: Callable[[torch.Tensor], Made]
) -> tuple[Made, torch.Tensor]:
    """What the product makes of x, and what `shrink` does."""
    weights, plan = added.weights, added.plan
    if not (BESIDE and x.is_cuda):
        inner = shrink(x, weights, plan)
        return product(x), inner
    inner, own, other = room_for(x, weights, plan), torch.cuda.current_stream(), _side()
    other.wait_stream(own)
    with torch.cuda.stream(other):
        shrink(x, weights, plan, inner)
    made = product(x)
    own.wait_stream(other)
    return made, inner


ADAPTED = AdaptedProducts(linear, add_linear)
