"""Numbers of float types in loops, which compute in float32 whatever these are, and of int8.

numba has neither bfloat16 nor float16: such numbers are their bits. Those of bfloat16 are the upper
half of a float32's; those of float16 the processor converts.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, overload

from tokenpod.kernels.compiled.loops import inlined, pointer

#: What loops call the numbers of tensors.
KINDS: dict[torch.dtype, Any] = {
    torch.float32: numba.float32,
    torch.bfloat16: numba.uint16,
    torch.float16: numba.int16,
    torch.int8: numba.int8,
    torch.int32: numba.int32,
}


@intrinsic
def _widen_half(typing_context: Any, bits: Any) -> Any:
    """The float32 of a float16's bits."""

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del context, signature
        half = builder.bitcast(operands[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _narrow_to_half(typing_context: Any, x: Any) -> Any:
    """The bits of the float16 that is nearest to a float32, the even one in ties."""

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del context, signature
        half = builder.fptrunc(operands[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.int16(types.float32), generate


@inlined()
def tensor(address, shape, kind):
    """The tensor of `shape` at `address`, of numbers of a kind."""
    return carray(pointer(address), shape, kind)


def wide(x):
    """A number of any kind as float32."""


def narrow(x, kind):
    """A float32 as a number of `kind`, rounded to the nearest, to even in ties."""


@overload(wide, inline="always")
def _wide(x):
    if x == types.uint16:
        return lambda x: np.int32(np.int32(x) << np.int32(16)).view(np.float32)
    if x == types.int16:
        return lambda x: _widen_half(x)
    if x == types.int8:
        return lambda x: np.float32(x)
    return lambda x: x


@overload(narrow, inline="always")
def _narrow(x, kind):
    if kind.dtype == types.uint16:
        return lambda x, kind: _upper_half(x)
    if kind.dtype == types.int16:
        return lambda x, kind: _narrow_to_half(np.float32(x))
    return lambda x, kind: x


@inlined()
def _upper_half(x):
    whole = np.float32(x).view(np.uint32)
    odd = (whole >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint16((whole + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return rounded if x == x else np.uint16(0x7FC0)
