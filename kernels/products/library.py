"""The vendor's library: kernels that it will choose are loaded before a step needs them.

It has some for each product and chooses by the number of tokens, which is another one in each step
that is not captured. A kernel is loaded when it is first launched, and loading may wait until the
device has computed all that is queued (CUDA's guide on lazy loading). The host is then held up for
a step or two, and all streams with it: docs/measurements/gpu.md, "A burst".
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

#: Numbers of tokens for which kernels are loaded: of the largest usual step, near enough to each
#: other that none is chosen between two of them alone. And numbers of a result, at most.
_TOKENS = range(1, 6144, 31)
_MOST_NUMBERS = 160_000_000
#: What a stand-in for a weight may take of a device's free memory.
_SHARE = 4


def load_kernels(weight: torch.Tensor, bias: torch.Tensor | None, *, add: bool = False) -> None:
    """Those of products with weights [n, k] of this shape, added to what there is or not.

    Once per shape; only for numbers of 2 bytes on a GPU, where it matters.
    """
    if weight.is_cuda and weight.itemsize == 2:
        _load(*weight.shape, weight.dtype, weight.device, biased=bias is not None, add=add)


@cache
def _load(
    n: int, k: int, dtype: torch.dtype, device: torch.device, *, biased: bool, add: bool
) -> None:
    tokens = [t for t in _TOKENS if t * max(n, k) <= _MOST_NUMBERS]
    taken = (n * k + (tokens[-1] if tokens else 0) * (n + k)) * dtype.itemsize
    if not tokens or _SHARE * taken > torch.cuda.mem_get_info(device)[0]:
        return
    with torch.inference_mode():
        weight = torch.zeros((n, k), dtype=dtype, device=device)
        x = torch.zeros((tokens[-1], k), dtype=dtype, device=device)
        y = torch.zeros((tokens[-1], n), dtype=dtype, device=device) if add else None
        bias = weight.new_zeros(n) if biased else None
        for t in tokens:
            if y is not None and bias is None:
                y[:t].addmm_(x[:t], weight.t())
            else:
                functional.linear(x[:t], weight, bias)
