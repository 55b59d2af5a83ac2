"""Products of a few tokens with a weight of 8 bits, which is read once and as it is stored."""

from __future__ import annotations

import numpy as np
import torch

from tokenpod.kernels.compiled.loops import (
    END,
    FIRST,
    arguments,
    floats,
    loop,
    small_integers,
    take,
)
from tokenpod.kernels.operations.ops import Linear
from tokenpod.kernels.products.formats.int8 import Int8Weight, multiply_widened

#: Rows of the weight that a thread takes at a time.
BLOCK = 32
#: From so many tokens on, making a float weight of it costs less than the loop.
MANY_TOKENS = 9

_F = np.float32


def prepare_int8_linear(weight: Int8Weight, bias: torch.Tensor | None) -> Linear:
    """The product x · weightᵀ + bias of inputs that are rounded if the format says so.

    For inputs of any float type, summed in float32.
    """
    numbers, scale = weight.numbers.contiguous(), weight.scale.contiguous()
    n, k = numbers.shape
    offset = torch.zeros(n) if bias is None else bias.float().contiguous()

    def linear(x: torch.Tensor) -> torch.Tensor:
        x, rows = weight.rounded_inputs(x).to(x.dtype), x.shape[0]
        if rows >= MANY_TOKENS:
            return multiply_widened(x, weight, bias)
        wide, out = x.float().contiguous(), torch.empty((rows, n))
        _product(
            -(-n // BLOCK),
            *(wide.data_ptr(), numbers.data_ptr(), scale.data_ptr(), offset.data_ptr()),
            *(out.data_ptr(), rows, n, k),
        )
        return out.to(x.dtype)

    return linear


@loop
def _product(address):
    a = arguments(address)
    rows, n, k = a[FIRST + 5], a[FIRST + 6], a[FIRST + 7]
    x = floats(a[FIRST], (rows, k))
    weight = small_integers(a[FIRST + 1], (n, k))
    scale, offset = floats(a[FIRST + 2], (n,)), floats(a[FIRST + 3], (n,))
    y = floats(a[FIRST + 4], (rows, n))
    block = take(a)
    while block < a[END]:
        for r in range(block * BLOCK, min((block + 1) * BLOCK, n)):
            for t in range(rows):
                total = _F(0)
                for i in range(k):
                    total += x[t, i] * _F(weight[r, i])
                y[t, r] = total * scale[r] + offset[r]
        block = take(a)
