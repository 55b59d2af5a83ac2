"""How many tokens of a row are likelier than the one that was drawn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.sampling.sampling_rows import RANKS, WORDS

_BLOCK = 2048


def find_ranks(
    logits: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    tokens: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    """Fill [n] int64 ranks from 1, by raw logits; 0 for token -1 and rows that don't ask.

    Args:
        logits: [n, vocab] floats, each row contiguous.
        rows: [n] int64.
        words: of all rows of the sampler.
        tokens: [n] int64.
        ranks: at least [n].
    """
    _rank_token[(len(rows),)](
        *(logits, logits.stride(0), rows, words, tokens, ranks, logits.shape[1]), BLOCK=_BLOCK
    )


@launched
@triton.jit
def _rank_token(
    logits_ptr,
    logits_stride,
    b_row_ptr,
    words_ptr,
    token_ptr,
    rank_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """[n] programs."""
    b = tl.program_id(0)
    words_ptr += tl.load(b_row_ptr + b).to(tl.int64) * WORDS
    token = tl.load(token_ptr + b)
    rank = tl.zeros((), tl.int64)
    if (tl.load(words_ptr + RANKS) != 0) & (token >= 0):
        logits_ptr += b.to(tl.int64) * logits_stride
        drawn = tl.load(logits_ptr + token).to(tl.float32)
        above = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=-float("inf"))
            above += (logits.to(tl.float32) > drawn).to(tl.int32)
        rank = tl.sum(above, axis=0).to(tl.int64) + 1
    tl.store(rank_ptr + b, rank)
