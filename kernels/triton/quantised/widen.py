"""A float copy of a weight, for products that are bound by arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.formats.int4 import Int4Weight, block_of
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.triton.launch import await_inputs, launch_options

#: Words, or bytes, that a program widens.
WORDS = 512
BYTES = 4096


def widen_bytes(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] as `dtype`."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.numbers.device)
    _widen_bytes[(n, triton.cdiv(k, BYTES))](
        weight.numbers, weight.scale, out, k, BYTES=BYTES, **launch_options(out.device)
    )
    return out


def widen_words(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] as `dtype`, inputs as they are stored; groups are regular."""
    n, k = weight.shape
    run = block_of(weight.group) // 8
    words = weight.packed.shape[1]
    out = torch.empty((n, k), dtype=dtype, device=weight.packed.device)
    _widen_words[(n, triton.cdiv(words, WORDS))](
        *(weight.packed, weight.scale, weight.zero, out, words, k),
        *(weight.scale.shape[1], weight.group // (8 * run)),
        RUN=run,
        WORDS=WORDS,
        **launch_options(out.device),
    )
    return out


@triton.jit
def _widen_bytes(numbers, scale, out, k, BYTES: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    w = tl.load(numbers + row * k + i, mask=i < k, other=0).to(tl.float32)
    w *= tl.load(scale + row)
    await_inputs(OVERLAP)
    tl.store(out + row * k + i, w.to(out.dtype.element_ty), mask=i < k)


@triton.jit
def _widen_words(
    packed,
    scale,
    zero,
    out,
    words,
    k,
    groups,
    blocks_in_group,
    RUN: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    block = word // RUN
    w = tl.load(packed + row * words + word, mask=word < words, other=0)
    at_scale = row * groups + block // blocks_in_group
    s = tl.load(scale + at_scale, mask=word < words, other=0.0).to(tl.float32)
    z = tl.full((WORDS,), 8.0, tl.float32)
    if zero is not None:
        z = tl.load(zero + at_scale, mask=word < words, other=0).to(tl.float32)
    await_inputs(OVERLAP)
    for place in tl.static_range(8):
        column = block * (8 * RUN) + place * RUN + word % RUN
        number = ((w >> (4 * place)) & 15).to(tl.float32)
        made = (number - z) * s
        tl.store(out + row * k + column, made.to(out.dtype.element_ty), mask=column < k)
