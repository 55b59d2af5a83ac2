"""A float copy of a weight, for products that are bound by arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.triton.launch import await_inputs, launch_options

#: That a program widens.
BYTES = 4096


def widen_bytes(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] as `dtype`."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.numbers.device)
    _widen_bytes[(n, triton.cdiv(k, BYTES))](
        weight.numbers, weight.scale, out, k, BYTES=BYTES, **launch_options(out.device)
    )
    return out


@triton.jit
def _widen_bytes(numbers, scale, out, k, BYTES: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    w = tl.load(numbers + row * k + i, mask=i < k, other=0).to(tl.float32)
    w *= tl.load(scale + row)
    await_inputs(OVERLAP)
    tl.store(out + row * k + i, w.to(out.dtype.element_ty), mask=i < k)
