"""What low-rank adapters add to products of some tokens, and what each operation promises.

Axes: T tokens of a step, S slots of adapters, P parts of a fused product, R largest rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

#: What operations make once a step of which token has which adapter; each has its own.
AdapterPlan = Any


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Every slot's part of one product. The tensors stay where they are; what they hold changes.

    Ranks that an adapter does not use are zeros, and so is a slot without an adapter.
    """

    #: [S, P · R, in]: each part's factor that inputs are multiplied with.
    down: torch.Tensor
    #: [S, out, R]: what these are multiplied with then, scale and all; a row has its part's ranks.
    up: torch.Tensor
    #: [S, out] is added to each token; None: the product has no bias that could be another.
    bias: torch.Tensor | None
    #: Rows of `up` of each part; they add up to out.
    rows: tuple[int, ...]
    #: [S] int32: the largest rank that an adapter has in any product.
    ranks: torch.Tensor

    @property
    def rank(self) -> int:
        """R."""
        return self.up.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the product's own tensors."""
        tensors = (self.down, self.up, self.bias)
        return sum(x.nbytes for x in tensors if x is not None)


class PlanAdapters(Protocol):
    """Find, once a step, which tokens have which adapter."""

    def __call__(self, t_adapter: torch.Tensor, slots: int) -> AdapterPlan:
        """T_adapter [T] int64: each token's slot, from 1; 0: none."""
        ...


class Adapt(Protocol):
    """What adapters add to one product."""

    def __call__(self, x: torch.Tensor, weights: AdapterWeights, plan: AdapterPlan) -> torch.Tensor:
        """X [T, in] -> [T, out] in x's dtype: (x · downᵀ) · upᵀ + bias of each token's adapter.

        Zeros for tokens without one. Both products are summed in float32; what lies between them
        may be rounded.
        """
        ...
