"""The operations models are made of, and what each promises.

Axes: T tokens of a step, H query heads, K key/value heads, D head size, V vocabulary. Every
implementation agrees with `tokenpod.kernels.backends.reference` up to rounding; that package is the
specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tokenpod.kernels.operations.adapter_ops import (
    Adapt,
    AdaptedProducts,
    AdaptRows,
    OwnLinear,
    PlanAdapters,
)
from tokenpod.kernels.operations.attention_ops import (
    Attend,
    AttendLatent,
    AttendTexts,
    PlanAttention,
    PlanLatent,
    PlanTexts,
    PrepareCapture,
    Rotate,
    StoreKeyValue,
    StoreLatent,
)
from tokenpod.kernels.operations.expert_ops import PrepareExperts
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.pointwise_ops import (
    Activate,
    Activation,
    ActMul,
    AddLayerNorm,
    Embed,
    LayerNorm,
    RmsNorm,
    RowNorm,
)
from tokenpod.kernels.operations.recurrent_ops import (
    GatedDelta,
    PlanRecurrent,
    ShortConvolution,
    StateSpace,
)


class Linear(Protocol):
    """A product with fixed weights."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, in] -> [T, out], which nothing else holds."""
        ...


class AddLinear(Protocol):
    """A product with fixed weights that is added to the residual stream."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """X [T, in], residual [T, out], changed in place."""
        ...


class AddSummand(Protocol):
    """The end of a product whose summands are those of ranks."""

    def __call__(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """Partial [T, out] of this rank, or [splits, T, out] as `SymmetricBuffers.add` says."""
        ...


#: What `Group.buffers` is; each kind of group has its own.
PeerBuffers = Any


class PrepareLinear(Protocol):
    """Choose, once, how products with a weight are made."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Weight [out, in], bias [out] or None -> a function computing x · weightᵀ + bias."""
        ...


class PrepareActivatedLinear(Protocol):
    """Choose, once, how a product is made that an activation of its outputs follows."""

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> Linear | None:
        """Weight [out, in], bias [out] or None -> activation(x · weightᵀ + bias).

        None where that is not one operation; then nothing has been kept.
        """
        ...


class PrepareNormLinear(Protocol):
    """Choose, once, how the product of a normed residual with a weight is made.

    Norm, product and gate are one operation because for few tokens they are one kernel: reading
    the weight takes the time, and the rest hides behind it.
    """

    def __call__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RowNorm,
        activation: Activation | None,
    ) -> Linear:
        """Weight [out, in], bias [out] or None -> a function computing norm(x) · weightᵀ + bias.

        With an `activation` the first half of that are gates: the function returns
        activation(gate) · up [T, out / 2].
        """
        ...


class PrepareAddLinear(Protocol):
    """Choose, once, how a product is made that ends in the residual stream."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> AddLinear:
        """Weight [out, in], bias [out] or None -> residual += x · weightᵀ + bias, in place."""
        ...


class PrepareSumLinear(Protocol):
    """Choose, once, how a product is made whose partial sums ranks add in the residual stream.

    Product and sum are one operation because outputs can travel while others are still made.
    """

    def __call__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        buffers: PeerBuffers,
        add: AddSummand,
    ) -> AddLinear:
        """Weight [out, in], bias [out] or None -> residual += Σ (x · weightᵀ + bias), in place.

        The sum is over ranks and bit by bit the same on all. For tokens with which one step would
        not be faster, or impossible, `add` is the second.
        """
        ...


@dataclass(frozen=True, slots=True)
class FormatProducts:
    """Products with weights of one format of fewer bits, as those with dense weights are made.

    Where a fused one is None, it is made of the plain one and what is beside it.
    """

    linear: Callable[[Any, torch.Tensor | None], Linear]
    norm_linear: Callable[[Any, torch.Tensor | None, RowNorm, Activation | None], Linear] | None = (
        None
    )
    add_linear: Callable[[Any, torch.Tensor | None], AddLinear] | None = None
    #: A weight as its products hold it, in its place: several of them then hold it once. None: it
    #: stays as it is.
    laid_out: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Operations:
    """One implementation of everything a model calls, as plain functions."""

    embed: Embed
    rms_norm: RmsNorm
    layer_norm: LayerNorm
    rotate: Rotate
    store_key_value: StoreKeyValue
    plan_attention: PlanAttention
    attention: Attend
    plan_texts: PlanTexts
    attend_texts: AttendTexts
    store_latent: StoreLatent
    plan_latent: PlanLatent
    attend_latent: AttendLatent
    plan_recurrent: PlanRecurrent
    gated_delta: GatedDelta
    state_space: StateSpace
    short_convolution: ShortConvolution
    act_mul: ActMul
    activate: Activate
    prepare_linear: PrepareLinear
    prepare_norm_linear: PrepareNormLinear
    prepare_add_linear: PrepareAddLinear
    prepare_experts: PrepareExperts
    plan_adapters: PlanAdapters
    adapt: Adapt
    adapt_rows: AdaptRows
    own_linear: OwnLinear
    #: Kernels for formats of fewer bits, by the class of their weights, and of what these are
    #: `laid_out` as; others are made by the weights' own `multiply`.
    quantised: Mapping[type[Any], FormatProducts] = field(default_factory=dict)
    #: None where each is an operation of its own: norm, product, `adapt` and gate.
    adapted: AdaptedProducts | None = None
    #: None where activations come after their products.
    prepare_activated_linear: PrepareActivatedLinear | None = None
    #: None where sums come after their products.
    prepare_sum_linear: PrepareSumLinear | None = None
    #: None where steps are not captured.
    prepare_capture: PrepareCapture | None = None
    #: None: the sum is made where a product ends.
    add_layer_norm: AddLayerNorm | None = None
    #: The ranks that divide the model; None if there is one.
    group: Group | None = None
