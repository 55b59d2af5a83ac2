"""Products on a CPU: with panels of the weight by our own loop, or laid out by oneDNN.

Which form a weight has depends on the processor and on the weight alone, so that all ranks of a
model choose alike, and a start like the one before. A processor with registers of 512 bits makes
panels (`compiled_panels`), unless it multiplies numbers of the weight's type by itself: the loop
would widen them. Measured at the start, forms would change with whatever else ran just then.

oneDNN's layout serves every number of rows. Laid out for 32 rows it is as fast as
any other for one row and for hundreds, and it replaces the weight, so it costs no memory; a layout
for each number of rows would cost the weights' size again, for little.

For each number of rows it meets, oneDNN generates code and keeps it: a millisecond the first time,
and some hundred kilobytes, that fragment the heap besides. Steps have any number of rows, so the
rows are filled up to one of few numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenpod.kernels.operations.compose import add_linear_of, norm_linear_of
from tokenpod.kernels.operations.ops import AddLinear, Linear
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise.compiled_pointwise import act_mul, rms_norm
from tokenpod.kernels.products import reference_product as reference
from tokenpod.kernels.products.compiled_panels import Ending, Panels, fits
from tokenpod.kernels.products.compiled_tiles import multiplies
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.narrow import NarrowWeight

#: Rows that the layout is chosen for.
LAYOUT_ROWS = 32


#: What oneDNN computes where a product ends, by its name and kind.
_FOLLOWING = {
    Activation.GELU: ("gelu", "none"),
    Activation.GELU_TANH: ("gelu", "tanh"),
    Activation.RELU: ("relu", ""),
    Activation.SILU: ("swish", ""),
}


def prepare_linear(weight: torch.Tensor | NarrowWeight, bias: torch.Tensor | None) -> Linear:
    """The product x · weightᵀ + bias with a weight [out, in].

    Keeps a copy of `weight` in another layout, not `weight`.
    """
    if in_panels(weight):
        return Panels(weight, bias)
    if isinstance(weight, NarrowWeight):  # of few outputs
        weight = weight.dequantised(torch.float32)
    if not can_lay_out(weight.dtype):
        return reference.prepare_linear(weight, bias)
    return laid_out(weight, bias)


def prepare_norm_linear(
    weight: torch.Tensor | NarrowWeight,
    bias: torch.Tensor | None,
    norm: RowNorm,
    activation: Activation | None,
) -> Linear:
    """The same of the normed rows; with an activation, of the first half's gates."""
    ending = Ending.WRITTEN if activation is None else Ending.GATED
    if activation in (None, Activation.SILU) and in_panels(weight, ending):
        return Panels(weight, bias, ending, norm)
    made_of: Any = norm_linear_of(prepare_linear, rms_norm, act_mul)
    return made_of(weight, bias, norm, activation)  # type: ignore[no-any-return]


def prepare_add_linear(weight: torch.Tensor | NarrowWeight, bias: torch.Tensor | None) -> AddLinear:
    """The product, added to the stream."""
    if in_panels(weight):
        return Panels(weight, bias, Ending.ADDED).into
    made_of: Any = add_linear_of(prepare_linear)
    return made_of(weight, bias)  # type: ignore[no-any-return]


def in_panels(weight: torch.Tensor | NarrowWeight, ending: Ending = Ending.WRITTEN) -> bool:
    """Whether products with a weight are made with panels of it."""
    if not fits(weight, ending):
        return False
    return isinstance(weight, NarrowWeight) or not multiplies(weight.dtype)


def prepare_activated_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> Linear | None:
    """The same, activated where the product ends; None where that is not one operation."""
    if activation not in _FOLLOWING or not can_lay_out(weight.dtype):
        return None
    if weight.dtype != torch.float32 and in_panels(weight):
        return None
    return laid_out(weight, bias, _FOLLOWING[activation])


def laid_out(
    weight: torch.Tensor, bias: torch.Tensor | None, following: tuple[str, str] = ("none", "")
) -> Linear:
    """The product with a weight that oneDNN lays out, and what follows by oneDNN's names."""
    name, kind = following
    numbers = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), LAYOUT_ROWS)
    product: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
    no_scalars: list[Any] = []

    def linear(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        filled = filled_rows(rows)
        if filled == rows:
            return product(x, numbers, bias, name, no_scalars, kind)
        x = torch.nn.functional.pad(x, (0, 0, 0, filled - rows))
        return product(x, numbers, bias, name, no_scalars, kind)[:rows]

    return linear


def prepare_int8_linear(weight: Int8Weight, bias: torch.Tensor | None) -> Linear:
    """The product x · weightᵀ + bias of inputs that are rounded if the format says so.

    May keep a copy of `weight` in another layout, not `weight`.
    """
    # Not above: that package is made of this one.
    from tokenpod.kernels.products import compiled_int8 as int8
    from tokenpod.kernels.products import compiled_whole as whole

    return whole.prepare_int8(weight, bias) or int8.prepare_int8_linear(weight, bias)


def prepare_int4_linear(weight: Int4Weight, bias: torch.Tensor | None) -> Linear:
    """The product x · weightᵀ + bias.

    May keep a copy of `weight` in another layout, not `weight`.
    """
    from tokenpod.kernels.products import compiled_whole as whole

    made = whole.prepare_int4(weight, bias)
    return made or (lambda x: weight.multiply(x, bias))


def filled_rows(rows: int) -> int:
    """The number of rows that a product of `rows` is computed with: at most a sixteenth more.

    Up to 32 any number, then 16 numbers from each power of two to the next.
    """
    if rows <= 32:
        return rows
    step = 1 << ((rows - 1).bit_length() - 5)
    return -(-rows // step) * step


def can_lay_out(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies numbers of `dtype` natively through oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
