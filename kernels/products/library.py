"""The vendor's library: kernels that it will choose are loaded before a step needs them.

It has some for each product and chooses by the number of tokens, which is another one in each step
that is not captured. A kernel is loaded when it is first launched, and loading may wait until the
device has computed all that is queued (CUDA's guide on lazy loading). The host is then held up for
a step or two, and all streams with it: docs/measurements/gpu.md, "A burst".

Most of the numbers of tokens that are tried load nothing. Which ones do is the same in each process
of a machine, so a start tells, and those after it try these alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch.nn import functional

#: Numbers of tokens for which kernels are loaded: of the largest usual step, near enough to each
#: other that none is chosen between two of them alone. And numbers of a result, at most.
_TOKENS = range(1, 6144, 31)
_MOST_NUMBERS = 160_000_000
#: What a stand-in for a weight may take of a device's free memory.
_SHARE = 4
#: A product that takes this thread so many times as long as others do, or so many seconds, may have
#: loaded a kernel. On an H200 those that do take 2.3 to 5 ms, others 0.1 to 0.4 and 0.7 at most.
_TIMES, _SECONDS = 2.0, 1e-3

#: By the name of a product, numbers of tokens.
Loads = Mapping[str, Sequence[int]]


class _Product(NamedTuple):
    """Products with weights [n, k] of one shape, added to what there is or not."""

    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    biased: bool
    add: bool

    def __str__(self) -> str:
        """What tells it from others of the same device."""
        how = " biased" * self.biased + " added" * self.add
        return f"{self.n} x {self.k} {str(self.dtype).removeprefix('torch.')}{how}"

    def load(self, wanted: Sequence[int] | None) -> list[int]:
        """Multiply `wanted` numbers of tokens, or try all: those that loaded kernels, or may have.

        None, where memory does not suffice for more.
        """
        tokens = [t for t in _TOKENS if t * max(self.n, self.k) <= _MOST_NUMBERS]
        if wanted is not None:
            tokens = [t for t in wanted if t in tokens]
        taken = self.n * self.k + max(tokens, default=0) * (self.n + self.k)
        if not tokens or _SHARE * taken * self.dtype.itemsize > _free(self.device):
            return []
        weight = torch.zeros((self.n, self.k), dtype=self.dtype, device=self.device)
        x = weight.new_zeros((tokens[-1], self.k))
        bias = weight.new_zeros(self.n) if self.biased else None
        adds = self.add and bias is None
        y = weight.new_zeros((tokens[-1] if adds else 0, self.n))
        transposed = weight.t()
        if wanted is None:
            torch.cuda.synchronize(self.device)  # a full queue would be waited for
        seconds = []
        for t in tokens:
            began = time.thread_time()
            if adds:
                y[:t].addmm_(x[:t], transposed)
            else:
                functional.linear(x[:t], weight, bias)
            seconds.append(time.thread_time() - began)
        if wanted is not None:
            return [*wanted]
        least = min(_TIMES * median(seconds), _SECONDS)
        return [t for t, each in zip(tokens, seconds, strict=True) if each > least]


#: Products whose kernels are not loaded, in the order in which they were prepared; and what a
#: process has loaded.
_prepared: dict[_Product, None] = {}
_loaded: dict[_Product, list[int]] = {}


def prepare_kernels(weight: torch.Tensor, bias: torch.Tensor | None, *, add: bool = False) -> None:
    """Have `load_kernels` load those of products with weights [n, k] of this shape.

    `add`: to what there is. Only for numbers of 2 bytes on a GPU, where it matters.
    """
    if weight.is_cuda and weight.itemsize == 2:
        n, k = weight.shape
        product = _Product(n, k, weight.dtype, weight.device, bias is not None, add)
        _prepared[product] = None


def load_kernels(known: Loads) -> dict[str, list[int]]:
    """Load those of all products that were prepared; numbers of tokens that did it, by product.

    `known`: what an earlier start was told; of products that are not in it all numbers are tried.
    """
    found = {}
    with torch.inference_mode():
        for product in [*_prepared]:
            name = str(product)
            if product not in _loaded:
                _loaded[product] = product.load(known.get(name))
            found[name] = _loaded[product]
    if _prepared:
        torch.cuda.empty_cache()  # what stood in for weights is larger where all are tried
    _prepared.clear()
    return found


def _free(device: torch.device) -> int:
    """Bytes of a GPU's memory."""
    return torch.cuda.mem_get_info(device)[0]
