"""The most likely tokens of a row, by raw logits: each split's best 64, then the best of those.

A token is one integer, its rank: the logit's bits in an order that integers have too, then the id
reversed, so that the lowest id comes first in ties.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.triton.noise import precise_log
from tokenpod.kernels.triton.sampling_rows import TOP_N, WORDS

#: How many are found, whatever a row asks.
MOST_TOP_TOKENS = tl.constexpr(64)

_ID_BITS = tl.constexpr(20)
_ID_MASK = tl.constexpr((1 << 20) - 1)
#: Below every token's.
_NOTHING = tl.constexpr(-(1 << 62))


@triton.jit
def _rank_of(logits, ids):
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 ties with 0
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (rising << _ID_BITS) | (_ID_MASK - ids)


@triton.jit
def _logit_of(rank):
    rising = (rank >> _ID_BITS).to(tl.int32)
    return tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising).to(tl.float32, bitcast=True)


@triton.jit
def split_tops(
    logits_ptr,
    logits_stride,
    b_row_ptr,
    words_ptr,
    rank_ptr,
    best_ptr,
    mass_ptr,
    vocab_size,
    SPLIT: tl.constexpr,
):
    """[n, splits, 64] ranks, falling; each split's highest logit and mass relative to it."""
    split, b, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if tl.load(words_ptr + tl.load(b_row_ptr + b).to(tl.int64) * WORDS + TOP_N) == 0:
        return
    ids = split * SPLIT + tl.arange(0, SPLIT)
    there = ids < vocab_size
    logits = tl.load(
        logits_ptr + b.to(tl.int64) * logits_stride + ids, mask=there, other=-float("inf")
    ).to(tl.float32)
    ranks = tl.topk(tl.where(there, _rank_of(logits, ids), _NOTHING), MOST_TOP_TOKENS)
    best = tl.max(logits, axis=0)
    out = b * splits + split
    tl.store(rank_ptr + out * MOST_TOP_TOKENS + tl.arange(0, MOST_TOP_TOKENS), ranks)
    tl.store(best_ptr + out, best)
    mass = tl.sum(tl.exp(logits - tl.where(best == -float("inf"), 0.0, best)), axis=0)
    tl.store(mass_ptr + out, mass)


@triton.jit
def join_tops(
    b_row_ptr,
    words_ptr,
    rank_ptr,
    best_ptr,
    mass_ptr,
    token_ptr,
    top_id_ptr,
    top_logprob_ptr,
    splits,
    SPLITS: tl.constexpr,
):
    """[n, 64] ids and log probabilities: the row's top_n and what ties with the last; then -1, 0.

    SPLITS is a power of two that holds `splits`.
    """
    b = tl.program_id(0)
    top_n = tl.load(words_ptr + tl.load(b_row_ptr + b).to(tl.int64) * WORDS + TOP_N)
    place = tl.arange(0, MOST_TOP_TOKENS)
    top_id_ptr += b * MOST_TOP_TOKENS + place
    top_logprob_ptr += b * MOST_TOP_TOKENS + place
    if (top_n == 0) | (tl.load(token_ptr + b) < 0):
        tl.store(top_id_ptr, tl.full((MOST_TOP_TOKENS,), -1, tl.int64))
        tl.store(top_logprob_ptr, tl.zeros((MOST_TOP_TOKENS,), tl.float32))
        return
    at = tl.arange(0, SPLITS * MOST_TOP_TOKENS)
    ranks = tl.load(
        rank_ptr + b.to(tl.int64) * splits * MOST_TOP_TOKENS + at,
        mask=at < splits * MOST_TOP_TOKENS,
        other=_NOTHING,
    )
    ranks = tl.topk(ranks, MOST_TOP_TOKENS)
    logits = _logit_of(ranks)
    # With fewer tokens than top_n there is no last place: -inf lets all in.
    last = tl.max(
        tl.where((place == top_n - 1) & (ranks > _NOTHING), logits, -float("inf")), axis=0
    )
    report = (ranks > _NOTHING) & ((place < top_n) | (logits == last))
    split = tl.arange(0, SPLITS)
    best = tl.load(best_ptr + b * splits + split, mask=split < splits, other=-float("inf"))
    mass = tl.load(mass_ptr + b * splits + split, mask=split < splits, other=0.0)
    peak = tl.max(best, axis=0)
    total = tl.sum(mass * tl.exp(best - peak), axis=0)
    ids = tl.where(report, _ID_MASK - (ranks & _ID_MASK), -1)
    tl.store(top_id_ptr, ids)
    tl.store(top_logprob_ptr, tl.where(report, logits - peak - precise_log(total), 0.0))
