"""Products with a weight that oneDNN has laid out in advance for this processor.

One layout serves every number of rows. Laid out for 32 rows it is as fast as
any other for one row and for hundreds, and it replaces the weight, so it costs no memory; a layout
for each number of rows would cost the weights' size again, for little.

oneDNN compiles a product for each number of rows, which takes a millisecond, and keeps it. Prompts
have all lengths: above a limit the number of rows is rounded up (by an eighth at most), so that few
are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tokenpod.kernels.ops import Linear
from tokenpod.kernels.reference import product as reference

#: Rows that the layout is chosen for.
LAYOUT_ROWS = 32
#: More rows than this are rounded up.
EXACT_ROWS = 64


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """See `ops.PrepareLinear`. Keeps a copy of `weight` in another layout, not `weight`."""
    if not can_lay_out(weight.dtype):
        return reference.prepare_linear(weight, bias)
    laid_out = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), LAYOUT_ROWS)
    product: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
    no_scalars: list[Any] = []

    def linear(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        missing = rows_to_add(rows)
        if missing:
            x = functional.pad(x, (0, 0, 0, missing))
        y = product(x, laid_out, bias, "none", no_scalars, "")
        return y[:rows] if missing else y

    return linear


def rows_to_add(rows: int) -> int:
    """How many rows fill `rows` up to one of the eight numbers for which each doubling has code."""
    return 0 if rows <= EXACT_ROWS else -rows % (1 << rows.bit_length() - 4)


def can_lay_out(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies numbers of `dtype` natively through oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
