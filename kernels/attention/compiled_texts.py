"""Attention of texts that a step reads as a whole, in one loop over all of them and their heads.

An item is a tile of queries of one head. Its keys are turned around, and values widened, a block at
a time, for all queries of the tile; softmax goes block by block (Milakov and Gimelshein 2018). Both
products are sums of rows, of heads of any size, that stay in vector registers for some queries.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.attention.text_tiles import cut_texts
from tokenpod.kernels.compiled.arithmetic import LOG2_E, exp2
from tokenpod.kernels.compiled.kinds import KINDS, narrow, tensor, wide
from tokenpod.kernels.compiled.loops import (
    END,
    FIRST,
    Loop,
    arguments,
    bits,
    floats,
    inlined,
    integers,
    loop,
    real,
    take,
)
from tokenpod.kernels.compiled.vectors import (
    BYTES,
    FEW,
    LANES,
    MANY,
    ROWS,
    add_rows,
    exponentials,
    highest,
)
from tokenpod.kernels.operations.attention_ops import NEAR_AND_FAR, TextOptions, TextPlan
from tokenpod.kernels.operations.batch import ForwardBatch

#: Queries of a tile, and keys of a block; these rows begin in other lines of a cache each.
QUERIES, KEYS = 512, 512
_APART = KEYS + LANES
#: Bytes between scores of two queries.
_STRIDE = _APART * 4

_F = np.float32
_LEAST = _F(-1e30)


@dataclass(frozen=True, slots=True)
class TextTiles(TextPlan):
    """A step's texts, cut."""

    #: Of all texts; tokens behind them belong to none.
    tokens: int
    #: [n, TEXT_FIELDS], see `cut_texts`.
    tiles: npt.NDArray[np.int64]
    t_index: torch.Tensor


def plan_texts(batch: ForwardBatch) -> TextTiles:
    """What all layers share of a step of texts."""
    tiles = cut_texts(batch.b_start, QUERIES).astype(np.int64)
    return TextTiles(batch.tokens, tiles, torch.arange(len(batch.t_token)))


def attend_texts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: TextPlan,
    options: TextOptions = NEAR_AND_FAR,
) -> torch.Tensor:
    """Attention of q [T, H, D] over keys and values [T, K, D] of each token's text: [T, H · D]."""
    assert isinstance(plan, TextTiles)
    (tokens, heads, head_dim), bias = q.shape, options.distance_bias
    assert all(x.stride()[1:] == (head_dim, 1) for x in (q, keys, values)), "heads lie apart"
    out = q.new_empty((tokens, heads * head_dim))
    out[plan.tokens :] = 0
    _loop(q.dtype)(
        len(plan.tiles) * heads,
        *(q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()),
        *(q.stride(0), keys.stride(0), values.stride(0)),
        *(plan.tiles.ctypes.data, len(plan.tiles)),
        *(tokens, heads, heads // keys.shape[1], head_dim),
        *(bits(float(options.scale_of(head_dim) * LOG2_E)), options.window or 0),
        *((0, 0) if bias is None else (bias.data_ptr(), bias.shape[1] // 2)),
    )
    return out


@inlined()
def _add(most, fresh, factors, factor_stride, rows, row_stride, many, sums, sum_stride, vectors):
    """`add_rows` of any number of vectors, `most` at a time where there are as many."""
    while vectors > 0:
        some = most if vectors >= most else 1
        if some == most:
            add_rows(most, fresh, factors, factor_stride, rows, row_stride, many, sums, sum_stride)
        else:
            add_rows(1, fresh, factors, factor_stride, rows, row_stride, many, sums, sum_stride)
        vectors -= some
        rows += some * BYTES
        sums += some * BYTES


@functools.cache
def _loop(dtype: torch.dtype) -> Loop:
    """The loop over heads of tiles, of numbers of `dtype`."""
    kind = KINDS[dtype]

    def body(address):
        a = arguments(address)
        tokens, heads, group, head_dim = a[FIRST + 9], a[FIRST + 10], a[FIRST + 11], a[FIRST + 12]
        q = tensor(a[FIRST], (tokens, a[FIRST + 4]), kind)
        keys = tensor(a[FIRST + 1], (tokens, a[FIRST + 5]), kind)
        values = tensor(a[FIRST + 2], (tokens, a[FIRST + 6]), kind)
        out = tensor(a[FIRST + 3], (tokens, heads * head_dim), kind)
        tiles = integers(a[FIRST + 7], (a[FIRST + 8], 4))
        scale, window, furthest = real(a, FIRST + 13), a[FIRST + 14], a[FIRST + 16]
        biased = a[FIRST + 15] != 0
        bias = floats(a[FIRST + 15], (heads, 2 * furthest + 1))
        across = -(-head_dim // LANES)
        wide_dim = across * LANES
        turned = np.empty((head_dim, _APART), np.float32)
        held = np.zeros((KEYS, wide_dim), np.float32)
        asked = np.empty((QUERIES, head_dim), np.float32)
        sums = np.empty((QUERIES, wide_dim), np.float32)
        scores = np.empty((ROWS, KEYS + LANES), np.float32)
        tops, total = np.empty(QUERIES, np.float32), np.empty(QUERIES, np.float32)
        item = take(a)
        while item < a[END]:
            tile, head = item // heads, item % heads
            token, count = tiles[tile, 0], tiles[tile, 1]
            low, high = tiles[tile, 2], tiles[tile, 3]
            if window > 0:
                low = max(token - window + 1, low)
                high = min(token + count + window - 1, high)
            column, kv_column = head * head_dim, head // group * head_dim
            for i in range((count + ROWS - 1) // ROWS * ROWS):
                tops[i], total[i] = _LEAST, _F(0)
                for d in range(wide_dim):
                    sums[i, d] = _F(0)
                query = q[token + min(i, count - 1), column : column + head_dim]
                for d in range(head_dim):
                    asked[i, d] = wide(query[d]) * scale
            for at in range(low, high, KEYS):
                n = min(KEYS, high - at)
                for j in range(n):
                    # A compiler knows of a view that no index is below 0.
                    key = keys[at + j, kv_column : kv_column + head_dim]
                    value = values[at + j, kv_column : kv_column + head_dim]
                    for d in range(head_dim):
                        turned[d, j] = wide(key[d])
                    for d in range(head_dim):
                        held[j, d] = wide(value[d])
                for j in range(n, min((n + LANES - 1) // LANES * LANES, KEYS)):
                    for d in range(head_dim):
                        turned[d, j] = _F(0)
                for i in range(0, count, ROWS):
                    begin, stop = 0, n
                    if window > 0:
                        begin = max(token + i - window + 1 - at, 0)
                        stop = min(token + min(i + ROWS, count) - 1 + window - at, n)
                        if begin >= stop:
                            continue
                    begin = begin // LANES * LANES
                    vectors = (stop - begin + LANES - 1) // LANES
                    above = scores.ctypes.data + begin * 4
                    of_keys = turned.ctypes.data + begin * 4
                    _add(
                        MANY,
                        1,
                        asked.ctypes.data + i * head_dim * 4,
                        head_dim * 4,
                        of_keys,
                        _APART * 4,
                        head_dim,
                        above,
                        _STRIDE,
                        vectors,
                    )
                    for r in range(ROWS):
                        own = token + i + r - at
                        for j in range(stop, begin + vectors * LANES):
                            scores[r, j] = _LEAST
                        if biased:
                            for j in range(begin, stop):
                                near = max(min(own - j, furthest), -furthest) + furthest
                                scores[r, j] += bias[head, near] * LOG2_E
                        if window > 0:
                            for j in range(begin, min(own - window + 1, stop)):
                                scores[r, j] = _LEAST
                            for j in range(max(own + window, begin), stop):
                                scores[r, j] = _LEAST
                        top = max(tops[i + r], highest(above + r * _STRIDE, vectors))
                        fade = exp2(tops[i + r] - top)
                        tops[i + r] = top
                        added = exponentials(above + r * _STRIDE, vectors, top)
                        total[i + r] = total[i + r] * fade + added
                        for d in range(wide_dim):
                            sums[i + r, d] *= fade
                    _add(
                        FEW,
                        0,
                        above,
                        _STRIDE,
                        held.ctypes.data + begin * wide_dim * 4,
                        wide_dim * 4,
                        stop - begin,
                        sums.ctypes.data + i * wide_dim * 4,
                        wide_dim * 4,
                        across,
                    )
            for i in range(count):
                whole, found = _F(1) / total[i], out[token + i, column : column + head_dim]
                for d in range(head_dim):
                    found[d] = narrow(sums[i, d] * whole, kind)
            item = take(a)
        _keep(turned, held, asked, sums, scores)

    return loop(body)


@inlined()
def _keep(turned, held, asked, sums, scores):
    """Use arrays once more: their memory is given back behind their last use."""
    return len(turned) + len(held) + len(asked) + len(sums) + len(scores)
