"""The composite products of `ops`, made of plain operations: for devices where that is as good."""

from __future__ import annotations

import torch

from tokenpod.kernels.ops import (
    Activation,
    ActMul,
    AddLinear,
    HeadNorm,
    HeadsLinear,
    KVScales,
    Linear,
    PrepareAddLinear,
    PrepareHeads,
    PrepareLinear,
    PrepareNormLinear,
    RmsNorm,
    Rotation,
    RowNorm,
    StoreKeyValue,
)


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


def heads_of(
    prepare_norm_linear: PrepareNormLinear, store_key_value: StoreKeyValue
) -> PrepareHeads:
    """The product, then what becomes of its heads."""

    def prepare(
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RowNorm,
        head_norm: HeadNorm | None,
    ) -> HeadsLinear:
        product = prepare_norm_linear(weight, bias, norm, None)

        def heads(
            residual: torch.Tensor,
            rotation: Rotation,
            keys: torch.Tensor,
            values: torch.Tensor,
            t_slot: torch.Tensor,
            scales: KVScales | None = None,
        ) -> torch.Tensor:
            qkv = product(residual)
            return store_key_value(qkv, rotation, head_norm, keys, values, t_slot, scales)

        return heads

    return prepare


def add_linear_of(prepare_linear: PrepareLinear) -> PrepareAddLinear:
    """The product, then the sum."""

    def prepare(weight: torch.Tensor, bias: torch.Tensor | None) -> AddLinear:
        product = prepare_linear(weight, bias)

        def add_product(x: torch.Tensor, residual: torch.Tensor) -> None:
            residual += product(x)

        return add_product

    return prepare
