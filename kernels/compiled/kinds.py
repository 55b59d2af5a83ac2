"""Numbers of float32 and bfloat16 in loops, which compute in float32 either way, and of int8.

numba has no bfloat16: such a number is its bits, the upper half of a float32's.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import carray, types
from numba.extending import overload

from tokenpod.kernels.compiled.loops import inlined, pointer

#: What loops call the numbers of tensors.
KINDS: dict[torch.dtype, Any] = {
    torch.float32: numba.float32,
    torch.bfloat16: numba.uint16,
    torch.int8: numba.int8,
    torch.int32: numba.int32,
}


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
    if x == types.int8:
        return lambda x: np.float32(x)
    return lambda x: x


@overload(narrow, inline="always")
def _narrow(x, kind):
    if kind.dtype == types.uint16:
        return lambda x, kind: _upper_half(x)
    return lambda x, kind: x


@inlined()
def _upper_half(x):
    whole = np.float32(x).view(np.uint32)
    odd = (whole >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint16((whole + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return rounded if x == x else np.uint16(0x7FC0)
