"""Norms over a token's features: as data, and made of their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layers.linear import Products

#: [T, n] -> the same, normed.
NormRows = Callable[[torch.Tensor], torch.Tensor]

#: Changes the first [T, n] to the sum of both, normed.
NormOfSum = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over a token's features: root mean square ("rms") or layer norm ("layer")."""

    kind: str
    epsilon: float
    #: Added to the stored weight.
    offset: int = 0
    weight: bool = True
    bias: bool = False
    #: The weight is applied before the result is rounded: it is held in float32.
    exact: bool = False

    def __post_init__(self) -> None:
        """Raise ModelError for a norm that there is not."""
        if self.kind not in ("rms", "layer"):
            raise ModelError(f"norm.kind is {self.kind!r}; supported: rms, layer")
        if self.kind == "rms" and (self.bias or not self.weight):
            raise ModelError("norm.kind is 'rms': it has a weight, and no bias")


def make_norm(norm: Norm | None, products: Products, name: str) -> NormRows:
    """The norm whose weight is `name`; without one, nothing is done."""
    if norm is None:
        return _as_it_is
    weight, bias = _weights(norm, products, name)
    if norm.kind == "layer":
        return partial(products.ops.layer_norm, weight=weight, bias=bias, epsilon=norm.epsilon)
    assert weight is not None, "an rms norm has one"
    return partial(products.ops.rms_norm, weight=weight, epsilon=norm.epsilon)


def make_norm_of_sum(norm: Norm, products: Products, name: str) -> NormOfSum:
    """The layer norm whose weight is `name`, of a sum."""
    add = products.ops.add_layer_norm
    assert add is not None, "other sums are made where a product ends"
    weight, bias = _weights(norm, products, name)
    return partial(add, weight=weight, bias=bias, epsilon=norm.epsilon)


def _weights(
    norm: Norm, products: Products, name: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    of_bias = products.tensor(f"{name}_bias") if norm.bias else None
    return products.tensor(name) if norm.weight else None, of_bias


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x
