"""A float copy of a weight of 4 bits, for products that are bound by arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.formats.int4 import Int4Weight, block_of
from tokenpod.kernels.triton.launch import await_inputs, launch_options

#: Words that a program widens.
WORDS = 512


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
