"""The vendor's library: kernels that it will choose are loaded before a step needs them.

It has some for each product and chooses by the number of tokens, which is another one in each step
that is not captured. A kernel is loaded when it is first launched, and loading may wait until the
device has computed all that is queued (CUDA's guide on lazy loading). The host is then held up for
a step or two, and all streams with it: docs/measurements/gpu.md, "A burst".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional

#: Numbers of tokens for which kernels are loaded: of the largest usual step, near enough to each
#: other that none is chosen between two of them alone. And numbers of a result, at most.
_TOKENS = range(1, 6144, 31)
_MOST_NUMBERS = 160_000_000
#: What a stand-in for a weight may take of a device's free memory.
_SHARE = 4


class StandIn(NamedTuple):
    """For a weight [n, k], and inputs of the largest number of tokens."""

    tokens: Sequence[int]
    x: torch.Tensor
    weight: torch.Tensor


def load_kernels(weight: torch.Tensor, bias: torch.Tensor | None, *, add: bool = False) -> None:
    """Those of products with weights [n, k] of this shape, added to what there is or not.

    Once per shape; only for numbers of 2 bytes on a GPU, where it matters.
    """
    if weight.is_cuda and weight.itemsize == 2:
        _load(*weight.shape, weight.dtype, weight.device, biased=bias is not None, add=add)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """X [T, k] · weight [n, k]ᵀ + bias, or the residual [T, n] that it has been added to."""
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is None:
        return residual.addmm_(x, weight.t())
    residual += functional.linear(x, weight, bias)
    return residual


def stand_in(
    n: int, k: int, dtype: torch.dtype, device: torch.device, tokens: Sequence[int]
) -> StandIn | None:
    """Memory for products with a weight [n, k] of some of these numbers of tokens.

    None where it would take much of what is free.
    """
    tokens = [t for t in tokens if t * max(n, k) <= _MOST_NUMBERS]
    taken = (n * k + (tokens[-1] if tokens else 0) * (n + k)) * dtype.itemsize
    if not tokens or _SHARE * taken > torch.cuda.mem_get_info(device)[0]:
        return None
    made = [torch.zeros(size, dtype=dtype, device=device) for size in ((tokens[-1], k), (n, k))]
    return StandIn(tokens, *made)


@cache
def _load(
    n: int, k: int, dtype: torch.dtype, device: torch.device, *, biased: bool, add: bool
) -> None:
    with torch.inference_mode():
        made = stand_in(n, k, dtype, device, _TOKENS)
        if made is None:
            return
        y = made.x.new_zeros((len(made.x), n)) if add else None
        bias = made.weight.new_zeros(n) if biased else None
        for t in made.tokens:
            multiply(made.x[:t], made.weight, bias, None if y is None else y[:t])
