"""What a product does next to itself, in whatever kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise.triton_pointwise import act_mul


@dataclass(frozen=True, slots=True)
class Around:
    """Norm of the input, gate of the output, residual."""

    norm: RowNorm | None = None
    activation: Activation | None = None
    add: bool = False

    @property
    def gated(self) -> bool:
        """Whether the weight has gates."""
        return self.activation is not None


#: (x [T, in], y [T, out]), y written or added to.
Product = Callable[[torch.Tensor, torch.Tensor], None]


def put(made: torch.Tensor, y: torch.Tensor, around: Around) -> None:
    """Gate what a product has made without its surroundings, and write it to y or add it."""
    if around.activation is not None:
        made = act_mul(made, around.activation)
    if around.add:
        y += made
    else:
        y.copy_(made)
