"""Products of few tokens with a weight of 8 bits, which is read once and as it is stored.

A program has some rows of the weight and walks along them. Whole numbers up to 127 are exact in
every float type, so the matrix unit gets them as they are, and a row's scale multiplies its sum.
Many tokens are bound by arithmetic instead: the library multiplies them with a float copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenpod.kernels.formats.int8 import Int8Weight, multiply_widened
from tokenpod.kernels.ops import Linear
from tokenpod.kernels.triton.launch import await_inputs, launch_options

#: The matrix unit's smallest side.
LEAST_TOKENS = 16
#: Beyond, a float copy of the weight is made.
MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """How one program works; see benchmarks/gpu_int8.py."""

    #: Rows of the weight that it owns.
    block_n: int = 16
    #: Their numbers that it reads at a time.
    block_k: int = 256
    warps: int = 4
    stages: int = 4


def prepare_int8_linear(
    weight: Int8Weight, bias: torch.Tensor | None, tile: Int8Tile | None = None
) -> Linear:
    """See `Int8Weight.multiply`: one kernel for few tokens, of numbers of 16 bits."""
    if not weight.numbers.is_contiguous():
        raise ValueError(f"a weight {list(weight.shape)} of 8 bits is not contiguous")
    chosen = Int8Tile() if tile is None else tile

    def linear(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        if weight.rounding is not None:
            return weight.multiply(x, bias, delta)
        if len(x) > MOST_TOKENS or x.itemsize > 2:
            y = multiply_widened(x, weight, bias)
            return y if delta is None else y.add_(delta)
        return multiply_int8(x, weight, bias, delta, chosen)

    return linear


def multiply_int8(
    x: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    delta: torch.Tensor | None,
    tile: Int8Tile,
) -> torch.Tensor:
    """X [T, k], weight [n, k], delta [T, n] or None -> x · weightᵀ + delta + bias, rounded once.

    Rows of x and delta are contiguous.
    """
    tokens, k = x.shape
    n = len(weight.numbers)
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    _multiply_int8[(triton.cdiv(n, tile.block_n),)](
        x,
        weight.numbers,
        weight.scale,
        bias,
        delta,
        y,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        tokens,
        n,
        k,
        EVEN=k % tile.block_k == 0,
        BLOCK_T=max(LEAST_TOKENS, triton.next_power_of_2(tokens)),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(x.device),
    )
    return y


@triton.jit(do_not_specialize=["tokens"])
def _multiply_int8(
    x,
    weight,
    scale,
    bias,
    delta,
    y,
    x_stride,
    delta_stride,
    tokens,
    n,
    k,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The weight is the left factor: its rows are many."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)
    start_of_row = weight + own.to(tl.int64)[:, None] * k
    token = tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_K)
    start_of_token = x + token[None, :] * x_stride
    factor = tl.load(scale + own)
    await_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        at = start + i
        if EVEN:
            # Read once: it makes room for what is read again.
            w = tl.load(start_of_row + at[None, :], eviction_policy="evict_first")
            v = tl.load(start_of_token + at[:, None], mask=(token < tokens)[None, :], other=0.0)
        else:
            w = tl.load(
                start_of_row + at[None, :],
                mask=(at < k)[None, :],
                other=0,
                eviction_policy="evict_first",
            )
            inside = (token < tokens)[None, :] & (at < k)[:, None]
            v = tl.load(start_of_token + at[:, None], mask=inside, other=0.0)
        sums = tl.dot(w.to(tl.float32).to(v.dtype), v, sums)
    sums *= factor[:, None]
    inside = (row < n)[:, None] & (token < tokens)[None, :]
    if delta is not None:
        added = delta + token[None, :] * delta_stride + row[:, None]
        sums += tl.load(added, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        sums += tl.load(bias + own).to(tl.float32)[:, None]
    tl.store(y + token[None, :] * n + row[:, None], sums.to(y.dtype.element_ty), mask=inside)
