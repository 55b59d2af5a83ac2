"""Products made of plain operations: in any format, and composite ones where that is as good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenpod.kernels.operations.adapter_ops import AdaptedLinear, Added, BaseLinear
from tokenpod.kernels.operations.ops import (
    AddLinear,
    FormatProducts,
    Linear,
    Operations,
    PrepareAddLinear,
    PrepareLinear,
    PrepareNormLinear,
)
from tokenpod.kernels.operations.pointwise_ops import Activation, ActMul, RmsNorm, RowNorm
from tokenpod.kernels.operations.weight import QuantisedWeight, Stored


def linear_of(ops: Operations, weight: Stored, bias: torch.Tensor | None) -> Linear:
    """The product with a weight [out, in] in any format, bias [out] or None, as `Linear` says."""
    return product_of(ops.prepare_linear, ops.quantised, weight, bias)


def laid_out(ops: Operations, weight: Stored) -> Any:
    """A weight as its products hold it; it takes the weight's place in the functions here."""
    made = ops.quantised.get(type(weight))
    return weight if made is None or made.laid_out is None else made.laid_out(weight)


def product_of(
    prepare_linear: PrepareLinear,
    quantised: Mapping[type[QuantisedWeight], FormatProducts],
    weight: Stored,
    bias: torch.Tensor | None,
) -> Linear:
    """The same, of the operations that it takes."""
    if isinstance(weight, torch.Tensor):
        return prepare_linear(weight, bias)
    made = quantised.get(type(weight))
    if made is not None:
        return made.linear(weight, bias)
    return lambda x: weight.multiply(x, bias)


def fused_norm_linear(
    ops: Operations,
    weight: Stored,
    bias: torch.Tensor | None,
    norm: RowNorm,
    activation: Activation | None,
) -> Linear | None:
    """The product of the normed stream as `PrepareNormLinear` says; None where it is not one."""
    if isinstance(weight, torch.Tensor):
        return ops.prepare_norm_linear(weight, bias, norm, activation)
    made = ops.quantised.get(type(weight))
    if made is None or made.norm_linear is None:
        return None
    return made.norm_linear(weight, bias, norm, activation)


def fused_add_linear(
    ops: Operations, weight: Stored, bias: torch.Tensor | None
) -> AddLinear | None:
    """The product that ends in the stream as `PrepareAddLinear` says; None where it is not one."""
    if isinstance(weight, torch.Tensor):
        return ops.prepare_add_linear(weight, bias)
    made = ops.quantised.get(type(weight))
    # A sum over ranks comes between the product and the stream.
    if made is None or made.add_linear is None or ops.group is not None:
        return None
    return made.add_linear(weight, bias)


def norm_linear_of(
    prepare_linear: PrepareLinear, rms_norm: RmsNorm, act_mul: ActMul
) -> PrepareNormLinear:
    """Norm, product and gate one after the other."""

    def prepare(
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RowNorm,
        activation: Activation | None,
    ) -> Linear:
        product = prepare_linear(weight, bias)

        def normed_product(x: torch.Tensor) -> torch.Tensor:
            return product(rms_norm(x, norm.weight, norm.epsilon))

        def gated_product(x: torch.Tensor) -> torch.Tensor:
            assert activation is not None
            return act_mul(normed_product(x), activation)

        return normed_product if activation is None else gated_product

    return prepare


def add_linear_of(prepare_linear: PrepareLinear) -> PrepareAddLinear:
    """The product, then the sum."""

    def prepare(weight: torch.Tensor, bias: torch.Tensor | None) -> AddLinear:
        product = prepare_linear(weight, bias)

        def add_product(x: torch.Tensor, residual: torch.Tensor) -> None:
            residual += product(x)

        return add_product

    return prepare


def adapted_linear_of(
    product: BaseLinear,
    rms_norm: RmsNorm,
    act_mul: ActMul,
    norm: RowNorm | None,
    activation: Activation | None,
) -> AdaptedLinear:
    """Norm, product, what adapters make of it, and gate; see `PrepareAdaptedLinear`."""

    def adapted(x: torch.Tensor, added: Added) -> torch.Tensor:
        read = x if norm is None else rms_norm(x, norm.weight, norm.epsilon)
        y = product(read)
        added.apply(read, y)
        return y if activation is None else act_mul(y, activation)

    return adapted
