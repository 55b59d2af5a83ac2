"""Products and what adapters make of them, in as few launches as there can be.

One token's first factors are further rows of the product that it is a part of, if its weight is
dense; otherwise `shrink` multiplies them. A launch behind the product adds the rest, scales what is
scaled, gates what is gated, and adds to the stream what ends there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from tokenpod.kernels.adapters.triton_adapters import (
    AdaptedTokens,
    expand,
    room_for,
    shrink,
    width_of,
)
from tokenpod.kernels.operations.adapter_ops import (
    AdaptedAdd,
    AdaptedLinear,
    AdaptedProducts,
    Added,
    BaseLinear,
    DenseWeight,
)
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise.triton_pointwise import rms_norm
from tokenpod.kernels.products.product_tiles import Kind, Tiles
from tokenpod.kernels.products.triton_product import MoreRows, multiply, table_for

#: Whether `shrink` runs beside the product, on a stream of its own, where it is a launch.
BESIDE = True


def linear(
    product: BaseLinear,
    dense: DenseWeight | None,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    tiles: Tiles | None = None,
) -> AdaptedLinear:
    """The product of steps in which some tokens have adapters.

    One token's norm is the product's own. `tiles` None means those measured.
    """
    base = _base(product, dense, norm, tiles)

    def adapted(x: torch.Tensor, added: Added) -> torch.Tensor:
        y, inner = base(x, added)
        gated = None
        if activation is not None:
            gated = torch.empty((len(x), y.shape[1] // 2), dtype=x.dtype, device=x.device)
        expand(inner, added.weights, _plan(added), y, gated=gated, activation=activation)
        return y if gated is None else gated

    return adapted


def add_linear(
    product: BaseLinear, dense: DenseWeight | None, tiles: Tiles | None = None
) -> AdaptedAdd:
    """The same, added to the stream.

    The product is made apart from the stream: an adapter may scale it, and not what was there.
    """
    base = _base(product, dense, None, tiles)

    def add_product(x: torch.Tensor, residual: torch.Tensor, added: Added) -> None:
        y, inner = base(x, added)
        expand(inner, added.weights, _plan(added), y, stream=residual)

    return add_product


#: (x, added) -> the base's product [T, out], and what the first factors make.
_Base = Callable[[torch.Tensor, Added], tuple[torch.Tensor, torch.Tensor]]


def _base(
    product: BaseLinear, dense: DenseWeight | None, norm: RowNorm | None, tiles: Tiles | None
) -> _Base:
    """The product, and the first factors: one launch for one token of a dense weight."""

    def apart(x: torch.Tensor, added: Added) -> tuple[torch.Tensor, torch.Tensor]:
        return _both(x if norm is None else rms_norm(x, norm.weight, norm.epsilon), added, product)

    if dense is None:
        return apart
    (weight, bias), (n, k) = dense, dense.weight.shape
    table = table_for(weight, tiles)

    def joined(x: torch.Tensor, added: Added) -> tuple[torch.Tensor, torch.Tensor]:
        tile = table.choose(n, k, len(x))
        if len(x) > 1 or tile.kind is not Kind.MULTIPLY_ADD:
            return apart(x, added)
        y, (inner, more) = torch.empty((1, n), dtype=x.dtype, device=x.device), _more(added)
        multiply(x, weight, bias, y, tile, norm=norm, more=more)
        return y, inner

    return joined


def _more(added: Added) -> tuple[torch.Tensor, MoreRows]:
    """Room for what one token's first factors make, and these as rows of a product."""
    plan, down = _plan(added), added.weights.down
    _, parts, rank, _ = down.shape
    width = width_of(rank)
    inner = torch.empty((1, 1, parts, width), dtype=torch.float32, device=down.device)
    slot, part, rank_stride, _ = down.stride()
    more = MoreRows(down, plan.t_adapter, plan.ranks, inner, slot, part, rank_stride, parts, width)
    return inner, more


def _plan(added: Added) -> AdaptedTokens:
    assert isinstance(added.plan, AdaptedTokens)
    return added.plan


@cache
def _side() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _both(x: torch.Tensor, added: Added, product: BaseLinear) -> tuple[torch.Tensor, torch.Tensor]:
    """What the product makes of x, and what `shrink` does."""
    weights, plan = added.weights, _plan(added)
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
