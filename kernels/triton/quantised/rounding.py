"""Inputs of products as numbers of 8 bits: what the matrix unit multiplies with a weight of as few.

Where the format rounds inputs, that is it: e4m3 or whole numbers, with a scale per token or group.
Where it does not, an input becomes two digits, value = scale · (128 · high + low), each a whole
number of 8 bits: 15 bits of the token's largest number, no less exact than bfloat16, whose own
rounding of that number is larger. Whole numbers are multiplied and summed without any error.

One program has a token. It can norm it first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenpod.kernels.formats.rounding import Rounding
from tokenpod.kernels.pointwise_ops import RowNorm
from tokenpod.kernels.triton.launch import await_inputs, launch_options

#: The largest two digits: 127 · 128.
DIGITS_MOST: tl.constexpr = tl.constexpr(16256.0)
FP8_MOST: tl.constexpr = tl.constexpr(448.0)
INT8_MOST: tl.constexpr = tl.constexpr(127.0)


class Rounded(NamedTuple):
    """Inputs [T, in] as numbers of 8 bits; digits are two tensors below each other."""

    #: [T, in] float8_e4m3fn or int8; [2T, in] int8 where they are digits, the high ones first. `in`
    #: is a multiple of the block where inputs are in the order of a block's nibbles.
    numbers: torch.Tensor
    #: [T, groups] float32
    scale: torch.Tensor
    #: [T, blocks] float32: the sum of a block's whole numbers; None where nobody asked.
    sums: torch.Tensor | None


def round_inputs(
    x: torch.Tensor,
    rounding: Rounding | None,
    *,
    norm: RowNorm | None = None,
    run: int | None = None,
    order: torch.Tensor | None = None,
) -> Rounded:
    """X [T, in], rows contiguous, after its norm.

    Args:
        x: inputs of 16 bits.
        rounding: of the format; None: as two digits.
        norm: of the stream that x is then.
        run: of a weight of 4 bits: inputs are put in the order of the nibbles of its blocks, and
            summed block by block.
        order: [in] int64, which input each one is to be; before `run`.
    """
    kind = "digits" if rounding is None else rounding.number.value
    return _arranged(x, rounding, kind, norm, run, order)


def arrange_inputs(
    x: torch.Tensor, norm: RowNorm | None, run: int, order: torch.Tensor | None
) -> torch.Tensor:
    """X [T, in] after its norm, in the order of nibbles, as `round_inputs` has them, as it is."""
    return _arranged(x, None, "plain", norm, run, order).numbers


def _arranged(
    x: torch.Tensor,
    rounding: Rounding | None,
    kind: str,
    norm: RowNorm | None,
    run: int | None,
    order: torch.Tensor | None,
) -> Rounded:
    tokens, k = x.shape
    block = 8 * run if run else (rounding.group if rounding and rounding.group else None)
    groups = -(-k // block) if block else 1
    width = groups * block if run and block else k
    digits = kind == "digits"
    dtype = x.dtype if kind == "plain" else torch.int8
    if rounding is not None:
        dtype = rounding.number.dtype
    numbers = torch.empty((2 * tokens if digits else tokens, width), dtype=dtype, device=x.device)
    grouped = rounding is not None and rounding.group is not None
    scale = torch.empty((tokens, groups if grouped else 1), dtype=torch.float32, device=x.device)
    sums = None
    if run and digits:
        sums = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    in_group = triton.next_power_of_2(k if block is None else block)
    _round_inputs[(tokens,)](
        x,
        numbers,
        scale,
        sums,
        None if norm is None else norm.weight,
        None if rounding is None else rounding.static,
        order,
        x.stride(0),
        tokens,
        k,
        width,
        0.0 if norm is None else norm.epsilon,
        groups,
        k if block is None else block,
        KIND=kind,
        GROUPED=grouped,
        RUN=run or 0,
        GROUPS=triton.next_power_of_2(groups),
        IN_GROUP=in_group,
        num_warps=min(16, max(1, triton.next_power_of_2(groups) * in_group // 512)),
        **launch_options(x.device),
    )
    return Rounded(numbers, scale, sums)


@triton.jit(do_not_specialize=["tokens"])
def _round_inputs(
    x,
    numbers,
    scale,
    sums,
    norm_weight,
    static,
    order,
    x_stride,
    tokens,
    k,
    width,
    epsilon,
    groups,
    in_group,
    KIND: tl.constexpr,
    GROUPED: tl.constexpr,
    RUN: tl.constexpr,
    GROUPS: tl.constexpr,
    IN_GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    place = tl.arange(0, IN_GROUP)
    to = group[:, None] * in_group + place[None, :]
    inside = (place < in_group)[None, :] & (to < width)
    source = to
    if RUN > 0:
        # The byte of a nibble, and which half of it: see `Int4Weight.packed`.
        half = place // (4 * RUN)
        byte = place % (4 * RUN)
        source = group[:, None] * in_group + ((2 * (byte % 4) + half) * RUN + byte // 4)[None, :]
    there = inside & (source < k)
    if order is not None:
        source = tl.load(order + source, mask=there, other=0)
    if norm_weight is not None:
        factor = tl.load(norm_weight + source, mask=there, other=0.0)
    await_inputs(OVERLAP)
    loaded = tl.load(x + token * x_stride + source, mask=there, other=0.0)
    v = loaded.to(tl.float32)
    if norm_weight is not None:
        # Rounded where the norm by itself would be.
        v = v * tl.rsqrt(tl.sum(tl.sum(v * v, axis=1), axis=0) / k + epsilon)
        if factor.dtype == loaded.dtype:
            v = v.to(loaded.dtype).to(tl.float32)
        v = (v * factor.to(tl.float32)).to(loaded.dtype).to(tl.float32)
    at = numbers + token * width + to
    if KIND == "plain":
        tl.store(at, v.to(numbers.dtype.element_ty), mask=inside)
    else:
        _store_rounded(
            v,
            at,
            scale,
            sums,
            static,
            inside,
            token,
            tokens,
            group,
            groups,
            width,
            KIND,
            GROUPED,
            RUN,
        )


@triton.jit
def _store_rounded(
    v,
    at,
    scale,
    sums,
    static,
    inside,
    token,
    tokens,
    group,
    groups,
    width,
    KIND: tl.constexpr,
    GROUPED: tl.constexpr,
    RUN: tl.constexpr,
):
    MOST: tl.constexpr = (
        DIGITS_MOST if KIND == "digits" else (FP8_MOST if KIND == "fp8" else INT8_MOST)
    )
    # A number that is none gets lost in a maximum; times zero it stays what it is.
    lost = tl.sum(v * 0.0, axis=1)
    largest = tl.max(tl.abs(v), axis=1)
    if not GROUPED:
        lost = tl.zeros_like(lost) + tl.sum(lost, axis=0)
        largest = tl.zeros_like(largest) + tl.max(largest, axis=0)
    if static is None:
        step = largest / MOST + lost
    else:
        step = tl.load(static) + lost
    q = v * tl.where(step > 0, 1.0 / step, 1.0)[:, None]
    q = tl.minimum(tl.maximum(q, -MOST), MOST)
    if KIND == "fp8":
        tl.store(at, q.to(tl.float8e4nv), mask=inside)
    else:
        # Adding and taking off 1.5 · 2²³ leaves the nearest whole number, ties to even.
        q = q + 12582912.0 - 12582912.0
        if KIND == "int8":
            tl.store(at, q.to(tl.int8), mask=inside)
        else:
            high = tl.floor(q * 0.0078125 + 0.5)
            tl.store(at, high.to(tl.int8), mask=inside)
            low = q - 128.0 * high
            tl.store(at + tokens.to(tl.int64) * width, low.to(tl.int8), mask=inside)
    if GROUPED:
        tl.store(scale + token * groups + group, step, mask=group < groups)
    else:
        tl.store(scale + token, tl.max(step, axis=0) + tl.sum(lost, axis=0))
    if RUN > 0:
        tl.store(sums + token * groups + group, tl.sum(q, axis=1), mask=group < groups)
