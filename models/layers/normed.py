"""Products of the normed stream: one operation where nothing lies between, else several."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.pointwise_ops import Activate, Activation, ActMul, RowNorm
from tokenpod.models.layers.linear import Product, Products
from tokenpod.models.layers.norms import Norm, NormRows, make_norm


def normed_product(
    products: Products,
    name: str,
    norm: Norm | None,
    norm_name: str,
    gate: Activation | None = None,
) -> Product:
    """The product `name` of the stream behind `norm`; gated if there is an activation of gates."""
    if norm is not None and norm.kind == "rms":
        row_norm = RowNorm(products.tensor(norm_name), norm.epsilon)
        return products.norm_linear(name, row_norm, gate)
    before = make_norm(norm, products, norm_name)
    product = products.linear(name)
    if gate is None:
        return product if norm is None else NormedProduct(before, product)
    return GatedProduct(before, product, products.ops.act_mul, gate)


@dataclass(frozen=True, slots=True)
class NormedProduct:
    """Norm, then product."""

    norm: NormRows
    product: Product

    def __call__(self, x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        """[T, hidden] -> [T, out]."""
        return self.product(self.norm(x), step)


@dataclass(frozen=True, slots=True)
class GatedProduct:
    """Norm, product, then the activation of its first half times its second."""

    norm: NormRows
    product: Product
    act_mul: ActMul
    activation: Activation

    def __call__(self, x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        """[T, hidden] -> [T, out / 2]."""
        return self.act_mul(self.product(self.norm(x), step), self.activation)


@dataclass(frozen=True, slots=True)
class ActivatedProduct:
    """A product, then an activation of each of its outputs, without a gate."""

    product: Product
    activate: Activate
    activation: Activation

    def __call__(self, x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        """[T, hidden] -> [T, out]."""
        return self.activate(self.product(x, step), self.activation)
