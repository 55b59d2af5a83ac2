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


class StandIn(NamedTuple):
    """For a weight [n, k], and inputs of the largest number of tokens."""

    tokens: Sequence[int]
    x: torch.Tensor
    weight: torch.Tensor


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
        tokens = _TOKENS if wanted is None else [t for t in wanted if t in _TOKENS]
        made = stand_in(self.n, self.k, self.dtype, self.device, tokens)
        if made is None:
            return []
        bias = made.weight.new_zeros(self.n) if self.biased else None
        y = made.x.new_zeros((len(made.x), self.n)) if self.add else None
        if wanted is None:
            torch.cuda.synchronize(self.device)  # a full queue would be waited for
        seconds = []
        for t in made.tokens:
            began = time.thread_time()
            multiply(made.x[:t], made.weight, bias, None if y is None else y[:t])
            seconds.append(time.thread_time() - began)
        if wanted is not None:
            return [*wanted]
        least = min(_TIMES * median(seconds), _SECONDS)
        return [t for t, each in zip(made.tokens, seconds, strict=True) if each > least]


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
