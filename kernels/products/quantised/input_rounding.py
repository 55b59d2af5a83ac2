"""Inputs of products as numbers of 8 bits: what the matrix unit multiplies with a weight of as few.

That is e4m3 or whole numbers, with a scale per token or group, as the format says. One program has
a token. It can norm it first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.products.formats.rounding import Rounding

FP8_MOST: tl.constexpr = tl.constexpr(448.0)
INT8_MOST: tl.constexpr = tl.constexpr(127.0)
#: Whose programs get more warps.
FEW_TOKENS = 16


class Rounded(NamedTuple):
    """Inputs [T, in] as numbers of 8 bits."""

    #: [T, in] float8_e4m3fn or int8.
    numbers: torch.Tensor
    #: [groups, T] float32: a step of a product reads a group's of many tokens.
    scale: torch.Tensor


def round_inputs(
    x: torch.Tensor,
    rounding: Rounding,
    *,
    norm: RowNorm | None = None,
) -> Rounded:
    """X [T, in] of 16 bits, rows contiguous, after its norm, if there is one."""
    tokens, k = x.shape
    block = k if rounding.group is None else rounding.group
    groups = -(-k // block)
    numbers = torch.empty((tokens, k), dtype=rounding.number.dtype, device=x.device)
    scale = torch.empty((groups, tokens), dtype=torch.float32, device=x.device)
    in_group = triton.next_power_of_2(block)
    _round_inputs[(tokens,)](
        x,
        numbers,
        scale,
        None if norm is None else norm.weight,
        rounding.static,
        x.stride(0),
        tokens,
        k,
        0.0 if norm is None else norm.epsilon,
        groups,
        block,
        KIND=rounding.number.value,
        GROUPS=triton.next_power_of_2(groups),
        IN_GROUP=in_group,
        num_warps=_warps(tokens, triton.next_power_of_2(groups) * in_group),
        **launch_options(x.device),
    )
    return Rounded(numbers, scale)


def _warps(tokens: int, numbers: int) -> int:
    """Of a program with so many numbers: few tokens are waited for, and few programs have room."""
    most, of_each = (32, 8) if tokens <= FEW_TOKENS else (16, 16)
    return min(most, max(1, numbers // (32 * of_each)))


@launched
@triton.jit(do_not_specialize=["tokens"])
def _round_inputs(
    x,
    numbers,
    scale,
    norm_weight,
    static,
    x_stride,
    tokens,
    k,
    epsilon,
    groups,
    in_group,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    IN_GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    place = tl.arange(0, IN_GROUP)
    i = group[:, None] * in_group + place[None, :]
    inside = (place < in_group)[None, :] & (i < k)
    if norm_weight is not None:
        factor = tl.load(norm_weight + i, mask=inside, other=0.0)
    await_inputs(OVERLAP)
    loaded = tl.load(x + token * x_stride + i, mask=inside, other=0.0)
    v = loaded.to(tl.float32)
    if norm_weight is not None:
        # Rounded where the norm by itself would be.
        v = v * tl.rsqrt(tl.sum(v * v) / k + epsilon)
        if factor.dtype == loaded.dtype:
            v = v.to(loaded.dtype).to(tl.float32)
        v = (v * factor.to(tl.float32)).to(loaded.dtype).to(tl.float32)
    MOST: tl.constexpr = FP8_MOST if KIND == "fp8" else INT8_MOST
    # As bits, what is no number is larger than any, and stays in a maximum.
    bits = tl.max(tl.abs(v).to(tl.int32, bitcast=True), axis=1)
    largest = bits.to(tl.float32, bitcast=True)
    if static is None:
        step = largest / MOST + largest * 0.0
    else:
        step = tl.load(static) + largest * 0.0
    q = v * tl.where(step > 0, 1.0 / step, 1.0)[:, None]
    q = tl.minimum(tl.maximum(q, -MOST), MOST)
    at = numbers + token * k + i
    if KIND == "fp8":
        tl.store(at, q.to(tl.float8e4nv), mask=inside)
    else:
        # In the bits of what 1.5 · 2²³ is added to is the nearest whole number, ties to even.
        whole = (q + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        tl.store(at, whole.to(tl.int8), mask=inside)
    tl.store(scale + group.to(tl.int64) * tokens + token, step, mask=group < groups)
