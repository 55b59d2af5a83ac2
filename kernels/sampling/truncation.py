"""Cutting a row's candidates exactly, without sorting them.

A candidate is one integer, its key: the bits of -s (its score less the highest, over temperature;
bits of numbers that are not negative rise with them), then its id. Keys rise as scores fall, the
lowest id first in ties, and no two are equal, so every cut is "up to this key" and is found by
narrowing a bracket of keys. Masses are sums of fixed-point integers: their order, and so the
candidates', changes no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.sampling.noise import exponential, precise_log, token_words
from tokenpod.kernels.sampling.sampling_rows import (
    LOG_MIN_P,
    SEED,
    STREAM,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    real,
)
from tokenpod.kernels.sampling.selection import highest, of_rising, rising_bits

_ID_BITS = tl.constexpr(20)
_ID_MASK = tl.constexpr((1 << 20) - 1)
#: Above every key.
_BEYOND = tl.constexpr(1 << 52)
#: The bits of infinity.
_INFINITE = tl.constexpr(0x7F800000)
#: Of the fixed point. 2^18 masses of at most 1 fit.
_UNIT = tl.constexpr(2.0**44)
#: log's hardware error and float32 sums, with room to spare.
_SLACK = tl.constexpr(0.01)


@triton.jit
def falling_key(s, ids):
    """Int64 keys of scores that are at most 0."""
    bits = tl.abs(s).to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << _ID_BITS) | ids


@triton.jit
def _score_of(key):
    return -(key >> _ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _mass_of(key):
    return (tl.exp(_score_of(key)) * _UNIT).to(tl.int64)


@triton.jit
def _order_of(key, centre, TYPICAL: tl.constexpr):
    """The key by which a cut takes candidates: falling scores, or rising distance to `centre`."""
    if TYPICAL:
        distance = tl.abs(_score_of(key).to(tl.float64) - centre).to(tl.float32)
        return falling_key(distance, key & _ID_MASK)
    else:
        return key


@triton.jit
def _between(low, high, rank, PIVOTS: tl.constexpr):
    """Pivots that divide the scores of a bracket evenly, or its keys once scores hardly differ."""
    near, far = tl.maximum(low, 0) >> _ID_BITS, high >> _ID_BITS
    wide = (far - near > 64) & (far < _INFINITE)
    start = near.to(tl.int32).to(tl.float32, bitcast=True)
    end = tl.minimum(far, _INFINITE).to(tl.int32).to(tl.float32, bitcast=True)
    share = rank.to(tl.float32) / (PIVOTS + 1)
    by_score = falling_key(tl.where(wide, start + (end - start) * share, 0.0), _ID_MASK)
    by_key = low + (high - low + PIVOTS) // (PIVOTS + 1) * rank
    # Whatever rounding does, each pivot divides the bracket.
    return tl.maximum(tl.minimum(tl.where(wide, by_score, by_key), high - 1), low + 1)


@triton.jit
def _border(
    candidate_ptr,
    found,
    limit,
    target,
    centre,
    BY_MASS: tl.constexpr,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The least order key up to which candidates reach `target`; the last one's if they don't.

    Args:
        limit: candidates with keys above this are out.
        target: a count (at least 1), or a mass.
    """
    at = tl.arange(0, BLOCK)
    rank = tl.arange(0, PIVOTS) + 1
    # Up to `low` the target is not reached, up to `high` it is.
    low = tl.cast(-1, tl.int64)
    high = tl.cast(_BEYOND, tl.int64)
    if not TYPICAL:
        high = tl.minimum(limit, high)
    while high - low > 1:
        pivots = _between(low, high, rank, PIVOTS)
        sums = tl.zeros((BLOCK, PIVOTS), tl.int64)
        nearest = tl.full((BLOCK,), _BEYOND, tl.int64)
        farthest = tl.full((BLOCK,), -1, tl.int64)
        for start in range(0, found, BLOCK):
            key = tl.load(candidate_ptr + start + at, mask=start + at < found, other=_BEYOND)
            order = tl.where(key <= limit, _order_of(key, centre, TYPICAL), _BEYOND)
            weight = _mass_of(key) if BY_MASS else at.to(tl.int64) * 0 + 1
            sums += tl.where(order[:, None] <= pivots[None, :], weight[:, None], 0)
            inside = (order > low) & (order <= high) & (order < _BEYOND)
            nearest = tl.minimum(nearest, tl.where(inside, order, _BEYOND))
            farthest = tl.maximum(farthest, tl.where(inside, order, -1))
        reached = tl.sum(sums, axis=0) >= target
        new_high = tl.min(tl.where(reached, pivots, high), axis=0)
        new_low = tl.max(tl.where(reached, low, pivots), axis=0)
        high = tl.minimum(new_high, tl.max(farthest, axis=0))
        low = tl.maximum(new_low, tl.min(nearest, axis=0) - 1)
    return high


@triton.jit
def _sums(candidate_ptr, found, limit, BLOCK: tl.constexpr):
    """Mass, and mass times s, of the candidates up to `limit`: int64, fixed point."""
    at = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.int64)
    moment = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, found, BLOCK):
        key = tl.load(candidate_ptr + start + at, mask=start + at < found, other=_BEYOND)
        s = _score_of(key)
        e = tl.exp(s)
        mass += tl.where(key <= limit, (e * _UNIT).to(tl.int64), 0)
        moment += tl.where((key <= limit) & (e > 0), (e * s * _UNIT).to(tl.int64), 0)
    return tl.sum(mass, axis=0), tl.sum(moment, axis=0)


@triton.jit
def _target(share, mass):
    return tl.maximum(tl.ceil(share * mass).to(tl.int64), 1)


@triton.jit
def _falling_limit(
    words_ptr, candidate_ptr, found, least, mass, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """The last key that top_k, top_p and min_p keep."""
    limit = falling_key(least, _ID_MASK)
    top_k = tl.load(words_ptr + TOP_K)
    if top_k > 0:
        kth = _border(candidate_ptr, found, limit, top_k, 0.0, False, False, BLOCK, PIVOTS)
        limit = kth | _ID_MASK  # all its ties stay
    kept = limit
    top_p = real(words_ptr, TOP_P)
    if top_p < 1.0:
        if top_k > 0:
            fixed, _ = _sums(candidate_ptr, found, limit, BLOCK)
            mass = fixed.to(tl.float64)
        target = _target(top_p, mass)
        kept = _border(candidate_ptr, found, limit, target, 0.0, True, False, BLOCK, PIVOTS)
    floor = real(words_ptr, LOG_MIN_P).to(tl.float32)
    return tl.minimum(kept, falling_key(floor, _ID_MASK))


@triton.jit
def least_survivor(
    words_ptr,
    group_best_ptr,
    peak,
    temperature,
    mass,
    mean,
    vocab_size,
    groups,
    GROUPS: tl.constexpr,
):
    """Float32: a score over temperature below which no token survives; -inf where none is sure.

    If k groups have a token of at least x, then so has the vocabulary k tokens: the k-th best group
    bounds top_k. Tokens below x have at most vocab * exp(x) of the mass: where that is no more than
    what top_p may lose, they are lost. typical_p takes tokens by |s - mean s|. The tokens from x to
    2 * mean - x come before all below x; if x is at most 2 * mean that is all from x up, and the
    argument of top_p holds again.
    """
    least = tl.cast(-float("inf"), tl.float32)
    top_k = tl.load(words_ptr + TOP_K)
    if top_k > 0 and top_k <= groups:
        at = tl.arange(0, GROUPS)
        best = tl.load(group_best_ptr + at, mask=at < groups, other=-float("inf"))
        kth = highest(rising_bits(best).to(tl.int64), at < groups, top_k)
        least = tl.div_rn(of_rising(kth.to(tl.int32)) - peak, temperature)
    whole = mass.to(tl.float32)
    top_p = real(words_ptr, TOP_P)
    if top_p < 1.0 and top_k == 0:
        lost = (1.0 - top_p).to(tl.float32) * whole / vocab_size
        least = tl.maximum(least, tl.log(lost) - _SLACK)
    floor = real(words_ptr, LOG_MIN_P).to(tl.float32)
    if top_p >= 1.0 or top_k == 0:  # top_p measures the mass of all that top_k leaves
        least = tl.maximum(least, floor)
    typical_p = real(words_ptr, TYPICAL_P)
    if typical_p < 1.0 and top_k == 0 and top_p >= 1.0 and floor == -float("inf"):
        lost = (1.0 - typical_p).to(tl.float32) * whole / vocab_size
        mirror = 2.0 * mean.to(tl.float32)
        least = tl.minimum(tl.log(lost), mirror - _SLACK * (tl.abs(mirror) + 1)) - _SLACK
    return least


@triton.jit
def cut(
    words_ptr,
    candidate_ptr,
    found,
    least,
    mass,
    mean,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Where the row's cuts fall, as `survives` takes it: the limit, the nearest, the centre.

    Args:
        found: how many candidates there are, at least 1.
        least: float32; none has a lower score.
        mass, mean: of the whole vocabulary, float64.
    """
    limit = _falling_limit(words_ptr, candidate_ptr, found, least, mass * _UNIT, BLOCK, PIVOTS)
    typical_p = real(words_ptr, TYPICAL_P)
    nearest = tl.cast(_BEYOND - 1, tl.int64)
    if typical_p < 1.0:
        weight = mass * _UNIT
        whole = (tl.load(words_ptr + TOP_K) == 0) & (real(words_ptr, TOP_P) >= 1.0)
        if not (whole & (real(words_ptr, LOG_MIN_P) == -float("inf"))):
            fixed, moment = _sums(candidate_ptr, found, limit, BLOCK)
            weight = fixed.to(tl.float64)
            mean = moment.to(tl.float64) / weight
        target = _target(typical_p, weight)
        nearest = _border(candidate_ptr, found, limit, target, mean, True, True, BLOCK, PIVOTS)
    return limit, nearest, mean


@triton.jit
def survives(key, limit, nearest, centre):
    """Whether keys are up to `limit` and not farther from `centre` than `nearest`."""
    return (key <= limit) & (_order_of(key, centre, True) <= nearest)


@triton.jit
def draw_survivor(
    words_ptr, position, candidate_ptr, found, limit, nearest, centre, BLOCK: tl.constexpr
):
    """Race what survives: the winner's id, its score, and the log of the survivors' mass."""
    seed, stream = tl.load(words_ptr + SEED), tl.load(words_ptr + STREAM)
    at = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.int64)
    fitness = tl.full((BLOCK,), -float("inf"), tl.float32)
    winner = tl.full((BLOCK,), _BEYOND, tl.int64)
    for start in range(0, found, BLOCK):
        key = tl.load(candidate_ptr + start + at, mask=start + at < found, other=_BEYOND)
        alive = survives(key, limit, nearest, centre)
        words = token_words(seed, (key & _ID_MASK).to(tl.int32), position, stream)
        fit = tl.where(alive, _score_of(key) - precise_log(exponential(words)), -float("inf"))
        mass += tl.where(alive, _mass_of(key), 0)
        better = (fit > fitness) | ((fit == fitness) & ((key & _ID_MASK) < (winner & _ID_MASK)))
        better = better & alive
        fitness = tl.where(better, fit, fitness)
        winner = tl.where(better, key, winner)
    fittest = tl.max(fitness, axis=0)
    # The lowest id in ties.
    rank = ((winner & _ID_MASK) << 32) | (winner >> _ID_BITS)
    first = tl.min(tl.where((fitness == fittest) & (winner < _BEYOND), rank, 1 << 62), axis=0)
    score = -(first & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    total = tl.sum(mass, axis=0).to(tl.float64) / _UNIT
    return (first >> 32).to(tl.int32), score, precise_log(total.to(tl.float32))
