"""The most likely tokens of a row: each split's best 64, then the best of those.

    split_tops            [splits, n]  rows by raw logits
    split_processed_tops  [splits, n]  rows by what their token was drawn from
    join_tops             [n]          both

They are two launches since one would need the registers of both for all rows.

A token is one integer, its rank: the logit's bits in an order that integers have too, then the id
reversed, so that the lowest id comes first in ties. Ranks are not sorted but halved by a border
until 64 are above it: a loop of few instructions, where sorting compiles for seconds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.core import sampling
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.sampling.noise import precise_log
from tokenpod.kernels.sampling.sampling import CENTRE, LIMIT, LOG_MASS, NEAREST, PEAK, STATS
from tokenpod.kernels.sampling.sampling_rows import (
    CUTS,
    DRAWS,
    FLAGS,
    PROCESSED_TOPS,
    TOP_N,
    WORDS,
    note,
    read_scores,
    temperature_of,
)
from tokenpod.kernels.sampling.selection import border_of, of_rising, rising_bits
from tokenpod.kernels.sampling.truncation import falling_key, survives

#: How many are found, whatever a row asks.
MOST_TOP_TOKENS = tl.constexpr(sampling.MOST_TOP_TOKENS)

_ID_BITS = tl.constexpr(20)
_ID_MASK = tl.constexpr((1 << 20) - 1)
#: Below every token's.
_NOTHING = tl.constexpr(-(1 << 62))


@triton.jit
def _rank_of(logits, ids):
    return (rising_bits(logits).to(tl.int64) << _ID_BITS) | (_ID_MASK - ids)


@triton.jit
def _logit_of(rank):
    return of_rising((rank >> _ID_BITS).to(tl.int32))


@triton.jit
def _store_best(ranks, there, out_ptr):
    """Store the 64 highest of distinct ranks in any order; where there are fewer, `_NOTHING`."""
    kept = there & (ranks >= border_of(ranks, there, MOST_TOP_TOKENS))
    one = kept.to(tl.int32)
    tl.store(out_ptr + tl.cumsum(one, axis=0) - 1, ranks, mask=kept)
    place = tl.arange(0, MOST_TOP_TOKENS)
    tl.store(out_ptr + place, _NOTHING, mask=place >= tl.sum(one, axis=0))


@launched
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
    """[n, splits, 64] ranks; each split's highest logit and mass relative to it."""
    split, b, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    words_ptr += tl.load(b_row_ptr + b).to(tl.int64) * WORDS
    if (tl.load(words_ptr + TOP_N) == 0) | ((tl.load(words_ptr + FLAGS) & PROCESSED_TOPS) != 0):
        return
    ids = split * SPLIT + tl.arange(0, SPLIT)
    there = ids < vocab_size
    logits = tl.load(
        logits_ptr + b.to(tl.int64) * logits_stride + ids, mask=there, other=-float("inf")
    ).to(tl.float32)
    out = b * splits + split
    _store_best(_rank_of(logits, ids), there, rank_ptr + out * MOST_TOP_TOKENS)
    best = tl.max(logits, axis=0)
    tl.store(best_ptr + out, best)
    mass = tl.sum(tl.exp(logits - tl.where(best == -float("inf"), 0.0, best)), axis=0)
    tl.store(mass_ptr + out, mass)


@launched
@triton.jit
def split_processed_tops(
    logits_ptr,
    logits_stride,
    mask_ptr,
    b_row_ptr,
    b_position_ptr,
    words_ptr,
    counts_ptr,
    edit_id_ptr,
    edit_value_ptr,
    stats_ptr,
    rank_ptr,
    vocab_size,
    MOST_EDITS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """[n, splits, 64] ranks of the tokens that could be drawn."""
    split, b, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(b_row_ptr + b).to(tl.int64)
    words_ptr += row * WORDS
    flags = tl.load(words_ptr + FLAGS)
    if (flags & PROCESSED_TOPS) == 0:
        return
    first = split * SPLIT
    ids = first + tl.arange(0, SPLIT)
    scores = read_scores(
        logits_ptr + b.to(tl.int64) * logits_stride, mask_ptr, b, ids, first,
        tl.load(b_position_ptr + b), row, words_ptr, counts_ptr,
        edit_id_ptr, edit_value_ptr, vocab_size, MOST_EDITS, SPLIT,
    )  # fmt: skip
    stats_ptr += b * STATS
    drawable = scores > -float("inf")
    if flags & DRAWS:
        peak = tl.load(stats_ptr + PEAK).to(tl.float32)
        scores = tl.div_rn(scores - peak, temperature_of(words_ptr, flags))
        drawable = scores > -float("inf")
        if flags & CUTS:
            limit = tl.load(stats_ptr + LIMIT).to(tl.int64)
            nearest = tl.load(stats_ptr + NEAREST).to(tl.int64)
            centre = tl.load(stats_ptr + CENTRE)
            drawable = drawable & survives(falling_key(scores, ids), limit, nearest, centre)
    out = b * splits + split
    _store_best(_rank_of(scores, ids), drawable, rank_ptr + out * MOST_TOP_TOKENS)


@launched
@triton.jit
def join_tops(
    b_row_ptr,
    words_ptr,
    counts_ptr,
    edit_id_ptr,
    edit_value_ptr,
    stats_ptr,
    rank_ptr,
    best_ptr,
    mass_ptr,
    token_ptr,
    top_id_ptr,
    top_logprob_ptr,
    vocab_size,
    splits,
    MOST_EDITS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """[n, 64] ids and log probabilities: the row's top_n and what ties with the last; then -1, 0.

    SPLITS is a power of two that holds `splits`. The row's ranks are overwritten.
    """
    b = tl.program_id(0)
    row = tl.load(b_row_ptr + b).to(tl.int64)
    words_ptr += row * WORDS
    flags, top_n = tl.load(words_ptr + FLAGS), tl.load(words_ptr + TOP_N)
    place = tl.arange(0, MOST_TOP_TOKENS)
    top_id_ptr += b * MOST_TOP_TOKENS
    top_logprob_ptr += b * MOST_TOP_TOKENS
    token = tl.load(token_ptr + b)
    if (top_n == 0) | (token < 0):
        tl.store(top_id_ptr + place, tl.full((MOST_TOP_TOKENS,), -1, tl.int64))
        tl.store(top_logprob_ptr + place, tl.zeros((MOST_TOP_TOKENS,), tl.float32))
        return
    at = tl.arange(0, SPLITS * MOST_TOP_TOKENS)
    rank_ptr += b.to(tl.int64) * splits * MOST_TOP_TOKENS
    ranks = tl.load(rank_ptr + at, mask=at < splits * MOST_TOP_TOKENS, other=_NOTHING)
    # Threads read what others write: the best 64 are brought together where all were.
    tl.debug_barrier()
    _store_best(ranks, ranks > _NOTHING, rank_ptr)
    tl.debug_barrier()
    ranks = tl.load(rank_ptr + place)
    there = ranks > _NOTHING
    # Those that are none lie behind the others.
    place = tl.where(there, tl.sum((ranks[None, :] > ranks[:, None]).to(tl.int32), axis=1), place)
    logits = _logit_of(ranks)
    # With fewer tokens than top_n there is no last place: -inf lets all in.
    last = tl.max(tl.where((place == top_n - 1) & there, logits, -float("inf")), axis=0)
    report = there & ((place < top_n) | (logits == last))
    if flags & PROCESSED_TOPS:
        # As the drawn token's log probability came about, so that its own is the same.
        stats_ptr += b * STATS
        peak = tl.where((flags & DRAWS) != 0, 0.0, tl.load(stats_ptr + PEAK)).to(tl.float32)
        log_mass = tl.load(stats_ptr + LOG_MASS).to(tl.float32)
        counts_ptr += row * vocab_size
        note(words_ptr, counts_ptr, row, edit_id_ptr, edit_value_ptr, token, MOST_EDITS)
    else:
        split = tl.arange(0, SPLITS)
        best = tl.load(best_ptr + b * splits + split, mask=split < splits, other=-float("inf"))
        mass = tl.load(mass_ptr + b * splits + split, mask=split < splits, other=0.0)
        peak = tl.max(best, axis=0)
        log_mass = precise_log(tl.sum(mass * tl.exp(best - peak), axis=0))
    ids = tl.where(report, _ID_MASK - (ranks & _ID_MASK), -1)
    tl.store(top_id_ptr + place, ids)
    tl.store(top_logprob_ptr + place, tl.where(report, logits - peak - log_mass, 0.0))
