"""What low-rank adapters add to products of some tokens, and what each operation promises.

Axes: T tokens of a step, S slots of adapters, P parts of a fused product, R largest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm


class AdapterPlan:
    """Which token of a step has which adapter, as `Operations.plan_adapters` has found out.

    Each implementation has its own.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Every slot's part of one product: views of memory that stays; what it holds changes.

    Along R only the ranks that a slot's adapter has mean anything. An adapter that leaves a product
    as it is has zeros there.
    """

    #: [S, P, R, in]: each part's factor that inputs are multiplied with.
    down: torch.Tensor
    #: [S, R, out]: what these are multiplied with then, scale and all; an output has its part's.
    up: torch.Tensor
    #: [S, out] is added to each token; None: the product has no bias that could be another.
    bias: torch.Tensor | None
    #: Outputs of each part; they add up to out.
    rows: tuple[int, ...]
    #: [S, out] float32 multiplies base and factors together (DoRA), where a slot is `scaled`, [S]
    #: int32; None: no slot is.
    scale: torch.Tensor | None = None
    scaled: torch.Tensor | None = None


class PlanAdapters(Protocol):
    """Find, once a step, which tokens have which adapter."""

    def __call__(self, t_adapter: torch.Tensor, ranks: torch.Tensor) -> AdapterPlan:
        """What each token has, and how much of it there is.

        Args:
            t_adapter: [T] int64, each token's slot, from 1; 0: none.
            ranks: [S] int32, the rank of each slot's adapter.
        """
        ...


class Adapt(Protocol):
    """What adapters make of one product."""

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor, weights: AdapterWeights, plan: AdapterPlan
    ) -> None:
        """X [T, in], y [T, out], of one dtype; y, the base's product, is changed in place.

        y = (y + (x · downᵀ) · upᵀ) · scale + bias of each token's adapter; tokens without one keep
        theirs. Both products are summed in float32; what lies between them may be rounded.
        """
        ...


class AdaptRows(Protocol):
    """What adapters add to rows of a table."""

    def __call__(
        self,
        x: torch.Tensor,
        weights: AdapterWeights,
        t_row: torch.Tensor,
        t_adapter: torch.Tensor,
        ranks: torch.Tensor,
    ) -> None:
        """X [T, out], changed in place: += down[slot, 0, :, row] · up[slot] of a token's adapter.

        Summed in float32. Nothing is added to tokens without an adapter, and to those whose row is
        not among the inputs of `down`.

        Args:
            x: rows of the table, contiguous.
            weights: of the product of a one-hot row with the table; one part, and no bias.
            t_row: [T] int64.
            t_adapter: [T] int64, each token's slot, from 1; 0: none.
            ranks: [S] int32, of each slot's factors; 0: it adds nothing.
        """
        ...


class OwnLinear(Protocol):
    """Products of some tokens with a weight of their adapter's own."""

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        t_adapter: torch.Tensor,
        has: torch.Tensor,
    ) -> torch.Tensor:
        """X [T, in] -> [T, out] in x's dtype: x · weights[slot - 1]ᵀ, summed in float32.

        Rows of tokens without an adapter, and of those whose slot has no weight, are undefined.

        Args:
            x: what is multiplied.
            weights: [S, out, in], of the first slots.
            t_adapter: [T] int64, each token's slot, from 1; 0: none.
            has: [S] int32, 0 where a slot has no weight.
        """
        ...


@dataclass(frozen=True, slots=True)
class Added:
    """What adapters make of one product of a step, not made yet."""

    weights: AdapterWeights
    plan: AdapterPlan
    adapt: Adapt

    def apply(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Make it of y [T, out], which the base has made of x [T, in]."""
        self.adapt(x, y, self.weights, self.plan)


@dataclass(frozen=True, slots=True)
class AddedRows:
    """What adapters add to rows of a table in a step, not made yet."""

    weights: AdapterWeights
    t_adapter: torch.Tensor
    ranks: torch.Tensor
    adapt_rows: AdaptRows

    def add(self, x: torch.Tensor, t_row: torch.Tensor) -> None:
        """Add it to x [T, out], in place; t_row [T] int64 as `AdaptRows` has it."""
        self.adapt_rows(x, self.weights, t_row, self.t_adapter, self.ranks)


#: x [T, in] -> [T, out], what adapters make of it.
AdaptedLinear = Callable[[torch.Tensor, Added], torch.Tensor]

#: x [T, in], the stream [T, out], changed in place.
AdaptedAdd = Callable[[torch.Tensor, torch.Tensor, Added], None]

#: x [T, in] -> [T, out]: the base's.
BaseLinear = Callable[[torch.Tensor], torch.Tensor]


class DenseWeight(NamedTuple):
    """What a product is made with, where that is one tensor: for those who make more with it."""

    #: [out, in], as the plain product has it.
    weight: torch.Tensor
    #: [out], likewise.
    bias: torch.Tensor | None


class PrepareAdaptedLinear(Protocol):
    """Prepare a product which adapters finish."""

    def __call__(
        self,
        product: BaseLinear,
        dense: DenseWeight | None,
        norm: RowNorm | None = None,
        activation: Activation | None = None,
        /,
    ) -> AdaptedLinear:
        """Of x as it is, or normed; gated if there is an `activation`.

        Args:
            product: the base's, with its bias, neither normed nor gated.
            dense: its weight; None: it has another format, or several parts.
            norm: of rows of x.
            activation: the first half of outputs are gates.
        """
        ...


class PrepareAdaptedAdd(Protocol):
    """Prepare a product which adapters finish, and which ends in the stream."""

    def __call__(self, product: BaseLinear, dense: DenseWeight | None, /) -> AdaptedAdd:
        """The product of steps in which some tokens have adapters."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedProducts:
    """Products that adapters finish in fewer launches than norm, product, `Adapt` and gate."""

    linear: PrepareAdaptedLinear
    add_linear: PrepareAdaptedAdd
