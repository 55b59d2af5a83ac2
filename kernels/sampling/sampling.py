"""Drawing one token per row in a few launches, whatever the rows ask, without the host.

    prepare   [splits, n]  each split's best score, and its sums over temperature
    summarise [n]          each row's; greedy rows are done here
    race      [splits, n]  rows that sample: each split's winner, or its tokens that cuts may leave
    finish    [n]          rows that sample: cut exactly (`truncation`), and draw

A split is a fixed stretch of the vocabulary, so that a row's bits do not depend on its batch, and
one row still fills the device. Edited scores are computed again where they are needed: storing
them would move as many bytes as reading logits and counts once more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.sampling.noise import (
    MOST_LUCK,
    exponential,
    precise_log,
    span_words,
    token_words,
)
from tokenpod.kernels.sampling.sampling_rows import (
    CUTS,
    DRAWS,
    FLAGS,
    PROCESSED_TOPS,
    SEED,
    STREAM,
    WORDS,
    note,
    read_scores,
    temperature_of,
)
from tokenpod.kernels.sampling.truncation import cut, draw_survivor, falling_key, least_survivor

# What `summarise` and `finish` leave of each row, as float64.
#: Highest edited score; not finite: nothing can be drawn.
PEAK = tl.constexpr(0)
#: Sum of exp(s), s being the score less the highest, over temperature.
MASS = tl.constexpr(1)
#: Mean of s.
MEAN = tl.constexpr(2)
#: No token with a lower s survives the row's cuts.
LEAST = tl.constexpr(3)
#: A token that nothing cuts must reach this to win the race.
REACH = tl.constexpr(4)
#: Log of the sum of exp(s) of the tokens that can be drawn: what a log probability is s less.
LOG_MASS = tl.constexpr(5)
# Where the row's cuts fall (`truncation.survives`): keys, which float64 holds exactly, and a score.
LIMIT = tl.constexpr(6)
NEAREST = tl.constexpr(7)
CENTRE = tl.constexpr(8)
STATS = tl.constexpr(9)

NOBODY = tl.constexpr(0x7FFFFFFF)


@launched
@triton.jit
def prepare(
    logits_ptr,
    logits_stride,
    mask_ptr,
    b_row_ptr,
    b_position_ptr,
    words_ptr,
    counts_ptr,
    edit_id_ptr,
    edit_value_ptr,
    best_ptr,
    best_id_ptr,
    mass_ptr,
    moment_ptr,
    group_best_ptr,
    vocab_size,
    MOST_EDITS: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Each split's best score (+inf: some score is NaN or +inf), its sums, its groups' bests."""
    split, b, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(b_row_ptr + b).to(tl.int64)
    words_ptr += row * WORDS
    flags = tl.load(words_ptr + FLAGS)
    first = split * SPLIT
    group = tl.arange(0, GROUPS)
    length: tl.constexpr = SPLIT // GROUPS
    ids = first + group[:, None] * length + tl.arange(0, length)[None, :]
    scores = read_scores(
        logits_ptr + b.to(tl.int64) * logits_stride, mask_ptr, b, ids, first,
        tl.load(b_position_ptr + b), row, words_ptr, counts_ptr,
        edit_id_ptr, edit_value_ptr, vocab_size, MOST_EDITS, SPLIT,
    )  # fmt: skip
    bad = (scores != scores) | (scores == float("inf"))
    scores = tl.where(bad, -float("inf"), scores)
    group_best = tl.max(scores, axis=1)
    best = tl.max(group_best, axis=0)
    best_id = tl.min(tl.min(tl.where(scores == best, ids, NOBODY), axis=1), axis=0)
    s = scores - tl.where(best == -float("inf"), 0.0, best)
    if flags & DRAWS:
        s = tl.div_rn(s, temperature_of(words_ptr, flags))
    e = tl.exp(s)
    out = b * splits + split
    if flags & CUTS:
        tl.store(group_best_ptr + out * GROUPS + group, group_best)
        moment = tl.sum(tl.sum(tl.where(e > 0, e * s, 0.0), axis=1), axis=0)
        tl.store(moment_ptr + out, moment)
    spoiled = tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) > 0
    tl.store(best_ptr + out, tl.where(spoiled, float("inf"), best))
    tl.store(best_id_ptr + out, best_id)
    tl.store(mass_ptr + out, tl.sum(tl.sum(e, axis=1), axis=0))


@launched
@triton.jit
def summarise(
    b_row_ptr,
    b_position_ptr,
    words_ptr,
    counts_ptr,
    edit_id_ptr,
    edit_value_ptr,
    best_ptr,
    best_id_ptr,
    mass_ptr,
    moment_ptr,
    group_best_ptr,
    stats_ptr,
    found_ptr,
    token_ptr,
    logprob_ptr,
    vocab_size,
    splits,
    MOST_EDITS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    NOTE: tl.constexpr,
):
    """Join the splits; draw for greedy rows; tell `race` what it may leave out.

    SPLITS is a power of two that holds `splits`. NOTE: drawn tokens enter their rows' history.
    """
    b = tl.program_id(0)
    row = tl.load(b_row_ptr + b).to(tl.int64)
    words_ptr += row * WORDS
    flags = tl.load(words_ptr + FLAGS)
    split = tl.arange(0, SPLITS)
    there = split < splits
    at = b * splits + split
    best = tl.load(best_ptr + at, mask=there, other=-float("inf"))
    best_id = tl.load(best_id_ptr + at, mask=there, other=NOBODY)
    mass = tl.load(mass_ptr + at, mask=there, other=0.0).to(tl.float64)
    peak = tl.max(best, axis=0)
    token = tl.min(tl.where(best == peak, best_id, NOBODY), axis=0)
    drawable = (peak > -float("inf")) & (peak < float("inf"))
    temperature = temperature_of(words_ptr, flags)
    below = tl.div_rn(best - tl.where(drawable, peak, 0.0), temperature)
    scale = tl.where(there, tl.exp(below), 0.0)
    total = tl.sum(mass * scale, axis=0)
    stats_ptr += b * STATS
    tl.store(stats_ptr + PEAK, peak.to(tl.float64))
    tl.store(stats_ptr + MASS, total)
    if ((flags & DRAWS) == 0) | (drawable == 0):
        tl.store(token_ptr + b, tl.where(drawable, token, -1).to(tl.int64))
        # The best score less the highest is 0.
        log_mass = precise_log(tl.where(drawable, total, 1.0).to(tl.float32))
        tl.store(logprob_ptr + b, -log_mass)
        tl.store(stats_ptr + LOG_MASS, log_mass.to(tl.float64))
        if NOTE:  # noqa: SIM102 - known when it is compiled
            if drawable & ((flags & PROCESSED_TOPS) == 0):
                counts_ptr += row * vocab_size
                note(words_ptr, counts_ptr, row, edit_id_ptr, edit_value_ptr, token, MOST_EDITS)
    elif flags & CUTS:
        moment = tl.load(moment_ptr + at, mask=there, other=0.0).to(tl.float64)
        moment += mass * tl.where(scale > 0, below, 0.0)
        mean = tl.sum(scale * moment, axis=0) / total
        tl.store(stats_ptr + MEAN, mean)
        group_best_ptr += b * splits * GROUPS
        least = least_survivor(
            words_ptr,
            group_best_ptr,
            peak,
            temperature,
            total,
            mean,
            vocab_size,
            splits * GROUPS,
            SPLITS * GROUPS,
        )
        tl.store(stats_ptr + LEAST, least.to(tl.float64))
        tl.store(found_ptr + b, 0)
    else:
        seed, stream = tl.load(words_ptr + SEED), tl.load(words_ptr + STREAM)
        word = token_words(seed, token, tl.load(b_position_ptr + b), stream)
        reach = -precise_log(exponential(word))
        tl.store(stats_ptr + REACH, reach.to(tl.float64))


@launched
@triton.jit
def race(
    logits_ptr,
    logits_stride,
    mask_ptr,
    b_row_ptr,
    b_position_ptr,
    words_ptr,
    counts_ptr,
    edit_id_ptr,
    edit_value_ptr,
    best_ptr,
    stats_ptr,
    fitness_ptr,
    winner_ptr,
    winner_score_ptr,
    found_ptr,
    candidate_ptr,
    vocab_size,
    MOST_EDITS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Rows that sample: the split's winner, or its tokens that may survive the cuts."""
    split, b, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(b_row_ptr + b).to(tl.int64)
    words_ptr += row * WORDS
    flags = tl.load(words_ptr + FLAGS)
    stats_ptr += b * STATS
    peak = tl.load(stats_ptr + PEAK).to(tl.float32)
    if ((flags & DRAWS) == 0) | (tl.abs(peak) == float("inf")):
        return
    temperature = temperature_of(words_ptr, flags)
    out = b * splits + split
    best = tl.div_rn(tl.load(best_ptr + out) - peak, temperature)
    if flags & CUTS:
        hopeless = best < tl.load(stats_ptr + LEAST).to(tl.float32)
    else:
        hopeless = best + MOST_LUCK < tl.load(stats_ptr + REACH).to(tl.float32)
        tl.store(fitness_ptr + out, -float("inf"))
    if hopeless:
        return
    first = split * SPLIT
    ids = first + tl.arange(0, SPLIT)
    position = tl.load(b_position_ptr + b)
    scores = read_scores(
        logits_ptr + b.to(tl.int64) * logits_stride, mask_ptr, b, ids, first,
        position, row, words_ptr, counts_ptr,
        edit_id_ptr, edit_value_ptr, vocab_size, MOST_EDITS, SPLIT,
    )  # fmt: skip
    s = tl.div_rn(scores - peak, temperature)
    if flags & CUTS:
        hopeful = (s >= tl.load(stats_ptr + LEAST).to(tl.float32)) & (s > -float("inf"))
        _collect(s, ids, hopeful, found_ptr + b, candidate_ptr + b.to(tl.int64) * vocab_size)
    else:
        seed, stream = tl.load(words_ptr + SEED), tl.load(words_ptr + STREAM)
        words = span_words(seed, first, position, stream, SPLIT)
        fitness = s - precise_log(exponential(words))
        fittest = tl.max(fitness, axis=0)
        winner = tl.min(tl.where(fitness == fittest, ids, NOBODY), axis=0)
        tl.store(fitness_ptr + out, fittest)
        tl.store(winner_ptr + out, winner)
        tl.store(winner_score_ptr + out, tl.sum(tl.where(ids == winner, s, 0.0), axis=0))


@triton.jit
def _collect(s, ids, hopeful, found_ptr, candidate_ptr):
    """Append these tokens to the row's candidates, whose order means nothing."""
    one = hopeful.to(tl.int32)
    start = tl.atomic_add(found_ptr, tl.sum(one, axis=0))
    at = start + tl.cumsum(one, axis=0) - 1
    tl.store(candidate_ptr + at, falling_key(s, ids), mask=hopeful)


@launched
@triton.jit
def finish(
    b_row_ptr,
    b_position_ptr,
    words_ptr,
    counts_ptr,
    edit_id_ptr,
    edit_value_ptr,
    stats_ptr,
    fitness_ptr,
    winner_ptr,
    winner_score_ptr,
    found_ptr,
    candidate_ptr,
    token_ptr,
    logprob_ptr,
    vocab_size,
    splits,
    MOST_EDITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    NOTE: tl.constexpr,
):
    """Rows that sample: the winner of all splits, or of what the cuts leave. NOTE: as above."""
    b = tl.program_id(0)
    row = tl.load(b_row_ptr + b).to(tl.int64)
    words_ptr += row * WORDS
    flags = tl.load(words_ptr + FLAGS)
    stats_ptr += b * STATS
    peak = tl.load(stats_ptr + PEAK)
    if ((flags & DRAWS) == 0) | (tl.abs(peak) == float("inf")):
        return
    mass = tl.load(stats_ptr + MASS)
    if flags & CUTS:
        candidate_ptr += b.to(tl.int64) * vocab_size
        found = tl.load(found_ptr + b)
        limit, nearest, centre = cut(
            words_ptr,
            candidate_ptr,
            found,
            tl.load(stats_ptr + LEAST).to(tl.float32),
            mass,
            tl.load(stats_ptr + MEAN),
            BLOCK,
            PIVOTS,
        )
        tl.store(stats_ptr + LIMIT, limit.to(tl.float64))
        tl.store(stats_ptr + NEAREST, nearest.to(tl.float64))
        tl.store(stats_ptr + CENTRE, centre)
        token, score, log_mass = draw_survivor(
            words_ptr,
            tl.load(b_position_ptr + b),
            candidate_ptr,
            found,
            limit,
            nearest,
            centre,
            BLOCK,
        )
    else:
        split = tl.arange(0, SPLITS)
        at = b * splits + split
        fitness = tl.load(fitness_ptr + at, mask=split < splits, other=-float("inf"))
        best = (fitness == tl.max(fitness, axis=0)) & (split < splits)
        winner = tl.load(winner_ptr + at, mask=best, other=NOBODY)
        token = tl.min(winner, axis=0)
        scores = tl.load(winner_score_ptr + at, mask=best & (winner == token), other=0.0)
        score = tl.sum(scores, axis=0)
        log_mass = precise_log(mass.to(tl.float32))
    tl.store(token_ptr + b, token.to(tl.int64))
    tl.store(logprob_ptr + b, score - log_mass)
    tl.store(stats_ptr + LOG_MASS, log_mass.to(tl.float64))
    if NOTE:  # noqa: SIM102
        if (flags & PROCESSED_TOPS) == 0:
            counts_ptr += row * vocab_size
            note(words_ptr, counts_ptr, row, edit_id_ptr, edit_value_ptr, token, MOST_EDITS)
