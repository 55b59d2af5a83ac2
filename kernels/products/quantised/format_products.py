"""Products with weights of 8 and 4 bits on NVIDIA GPUs, as `ops.FormatProducts`."""

from __future__ import annotations

import torch

from tokenpod.kernels.operations.ops import AddLinear, FormatProducts, Linear
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.products.quantised.around import Around
from tokenpod.kernels.products.quantised.lanes import Lanes, lanes_of
from tokenpod.kernels.products.quantised.products import AnyFormat, prepare_product
from tokenpod.kernels.products.quantised.quantised_tiles import Tiles


def prepare_linear(
    weight: AnyFormat, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> Linear:
    """The product x · weightᵀ + bias with a weight [out, in]; `tiles` None means those measured."""
    return _linear(weight, bias, Around(), tiles)


def prepare_norm_linear(
    weight: AnyFormat,
    bias: torch.Tensor | None,
    norm: RowNorm,
    activation: Activation | None,
    tiles: Tiles | None = None,
) -> Linear:
    """The product norm(x) · weightᵀ + bias, gated if there is an activation."""
    return _linear(weight, bias, Around(norm, activation), tiles)


def prepare_add_linear(
    weight: AnyFormat, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> AddLinear:
    """The product residual += x · weightᵀ + bias."""
    product = prepare_product(weight, bias, Around(add=True), tiles)

    def add_product(x: torch.Tensor, residual: torch.Tensor) -> None:
        product(x, residual)

    return add_product


def _linear(
    weight: AnyFormat, bias: torch.Tensor | None, around: Around, tiles: Tiles | None
) -> Linear:
    product = prepare_product(weight, bias, around, tiles)
    n = weight.shape[0] // 2 if around.gated else weight.shape[0]

    def linear(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
        product(x, y)
        return y

    return linear


def _laid_out(weight: AnyFormat) -> AnyFormat:
    return weight if isinstance(weight, Lanes) else lanes_of(weight) or weight


PRODUCTS = FormatProducts(prepare_linear, prepare_norm_linear, prepare_add_linear, _laid_out)
