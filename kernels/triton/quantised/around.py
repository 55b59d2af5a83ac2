"""What a product does next to itself, in whatever kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.triton.pointwise import act_mul


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


#: (x [T, in], y [T, out], delta [T, outputs of the weight] or None), y written or added to.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]

#: (y [T, n], activation of its gates or None, whether it is added to): a launch of the product.
Launch = Callable[[torch.Tensor, Activation | None, bool], None]


def start_from(delta: torch.Tensor | None, y: torch.Tensor, around: Around, launch: Launch) -> None:
    """A product whose kernel takes no delta: it is added to a copy of that, or that to y first."""
    if delta is not None and not around.add:
        made = delta.clone()
        launch(made, None, True)
        y.copy_(made if around.activation is None else act_mul(made, around.activation))
        return
    if delta is not None:
        y += delta
    launch(y, around.activation, around.add)


def put(made: torch.Tensor, y: torch.Tensor, around: Around) -> None:
    """Gate what a product has made without its surroundings, and write it to y or add it."""
    if around.activation is not None:
        made = act_mul(made, around.activation)
    if around.add:
        y += made
    else:
        y.copy_(made)
