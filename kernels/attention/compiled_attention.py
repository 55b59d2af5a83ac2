"""Attention of rows that process one token, over their KV runs, in one loop for all of them.

Softmax goes block by block of positions (Milakov and Gimelshein 2018): keys and values are read
once, in the order in which they lie, all heads of a position together. Numbers of a pool of int8
are widened in registers; their scales meet the scores, and the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.attention.cpu_attention import (
    Extend,
    Pools,
    are_fast,
    attend_extends,
    attend_rows,
    last_runs,
    plan_extends,
)
from tokenpod.kernels.cache.kv_rounding import refuse_other_scales
from tokenpod.kernels.compiled.arithmetic import LOG2_E, exp2
from tokenpod.kernels.compiled.kinds import KINDS, tensor, wide
from tokenpod.kernels.compiled.loops import (
    END,
    FIRST,
    LINE,
    Loop,
    arguments,
    bits,
    fetch,
    floats,
    integers,
    loop,
    real,
    take,
)
from tokenpod.kernels.operations.attention_ops import (
    NO_OPTIONS,
    AttentionOptions,
    AttentionPlan,
    KVScales,
)
from tokenpod.kernels.operations.batch import ForwardBatch, Run

#: Positions whose scores are made before their values are read.
BLOCK = 64
#: Runs of a row, more than at first, that a noted step has room for.
_SPARE = 4

Ints = npt.NDArray[np.int64]

_F = np.float32
_LEAST = _F(-1e30)


@dataclass(frozen=True, slots=True)
class LoopPlan(AttentionPlan):
    """Leading rows of one token by their runs, the others as torch wants them."""

    single_rows: int
    #: [runs, 2]: first slot and end of each run.
    runs: Ints
    #: [single_rows + 1]: row b has runs b_first[b] to b_first[b + 1].
    b_first: Ints
    #: Where these two are.
    addresses: tuple[int, int]
    extends: list[Extend]
    batch: ForwardBatch
    window: int | None

    def refresh(self, b_runs: Sequence[list[Run]], b_context: Sequence[int]) -> bool:
        """See `Refreshed`; of steps in which every row has one token."""
        first, runs = _seen(b_runs, b_context, self.window)
        if len(runs) > len(self.runs):
            return False
        self.runs[: len(runs)] = runs
        self.b_first[:] = first
        return True


def plan_attention(batch: ForwardBatch, window: int | None) -> LoopPlan:
    """What layers with this window share of a step."""
    singles = batch.single_rows
    first, runs = _seen(batch.b_runs[:singles], batch.b_context, window)
    spare = 0 if Loop.tape is None else _SPARE * singles
    room, b_first = np.array(runs + [(0, 0)] * spare, np.int64), np.array(first, np.int64)
    plan = LoopPlan(
        single_rows=singles,
        runs=room,
        b_first=b_first,
        addresses=(room.ctypes.data, b_first.ctypes.data),
        extends=plan_extends(batch, window),
        batch=batch,
        window=window,
    )
    if Loop.tape is not None:
        Loop.tape.plans.append(plan)
    return plan


def _seen(
    b_runs: Sequence[list[Run]], b_context: Sequence[int], window: int | None
) -> tuple[list[int], list[Run]]:
    """Where each row's runs begin, and all that the last token of each sees."""
    firsts, runs = [0], []
    for row, context in zip(b_runs, b_context, strict=False):
        runs += last_runs(row, context if window is None else min(context, window))
        firsts.append(len(runs))
    return firsts, runs


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions = NO_OPTIONS,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attention of q [T, H, D] over the pool: [T, H · V].

    Raises:
        NotImplementedError: keys and values with scales that are not int8.
    """
    assert isinstance(plan, LoopPlan)
    refuse_other_scales(keys, scales)
    pools = Pools(keys, values, scales, q.dtype)
    tokens, heads, head_dim = q.shape
    slots, kv_heads, value_dim = values.shape
    rows, fast = plan.single_rows, are_fast(options)
    compiled = fast and all(map(_is_worth_compiling, (head_dim, value_dim)))
    if Loop.tape is not None and not compiled:
        Loop.tape.whole = False  # what is gathered differs from step to step
    if not fast:
        return attend_rows(q, pools, plan.batch, plan.window, options)
    out = q.new_empty((tokens, heads, value_dim))
    if tokens > plan.batch.tokens:
        out[plan.batch.tokens :] = 0
    if rows and not compiled:
        found = attend_rows(q[:rows], pools, plan.batch, plan.window, options, rows=rows)
        out[:rows] = found.view(rows, heads, value_dim)
    elif rows:
        # Sums are float32; where queries are too, they are made in place.
        queries, sums = q, out
        if q.dtype != torch.float32:
            queries, sums = q[:rows].float(), torch.empty(rows, heads, value_dim)
        # Few rows are shared out by their heads, so that every thread has something to do.
        threads = torch.get_num_threads()
        parts = 1 if threads == 1 or rows >= 2 * threads else kv_heads
        scale = options.scale_of(head_dim)
        _decode(heads // kv_heads, head_dim, value_dim, keys.dtype)(
            rows * parts,
            *(queries.data_ptr(), keys.data_ptr(), values.data_ptr(), sums.data_ptr()),
            *plan.addresses,
            *(rows, slots, kv_heads, parts, len(plan.runs), bits(float(scale * LOG2_E)), threads),
            *(scale.data_ptr() for scale in scales or ()),
        )
        if sums is not out:
            out[:rows] = sums
    if plan.extends:
        attend_extends(plan.extends, q, pools, out, options.scale)
    return out.view(tokens, heads * value_dim)


def _is_worth_compiling(numbers: int) -> bool:
    """Heads of other sizes are those of toy models, and a loop takes seconds to compile."""
    return numbers >= 32 and numbers % 8 == 0


@functools.cache
def _decode(group: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> Loop:
    """The loop for query heads in groups of `group`: constants, so that sums stay in registers."""
    kind, scaled = KINDS[dtype], dtype == torch.int8
    key_bytes, value_bytes = head_dim * dtype.itemsize, value_dim * dtype.itemsize

    def body(address):
        a = arguments(address)
        rows, slots, kv_heads, parts = a[FIRST + 6], a[FIRST + 7], a[FIRST + 8], a[FIRST + 9]
        queries = floats(a[FIRST], (rows, kv_heads, group, head_dim))
        keys = tensor(a[FIRST + 1], (slots, kv_heads, head_dim), kind)
        values = tensor(a[FIRST + 2], (slots, kv_heads, value_dim), kind)
        out = floats(a[FIRST + 3], (rows, kv_heads, group, value_dim))
        runs = integers(a[FIRST + 4], (a[FIRST + 10], 2))
        b_first = integers(a[FIRST + 5], (rows + 1,))
        scale = real(a, FIRST + 11)
        alone = a[FIRST + 12] == 1
        key_scales = floats(a[FIRST + 13], (slots, kv_heads))
        value_scales = floats(a[FIRST + 14], (slots, kv_heads))
        heads = kv_heads * group
        scores = np.empty((heads, BLOCK), np.float32)
        highest = np.empty(heads, np.float32)
        total = np.empty(heads, np.float32)
        item = take(a)
        while item < a[END]:
            row = item // parts
            first_head = kv_heads * (item % parts) // parts
            end_head = kv_heads * (item % parts + 1) // parts
            for k in range(first_head, end_head):
                for g in range(group):
                    highest[k * group + g] = _LEAST
                    total[k * group + g] = _F(0)
                    for d in range(value_dim):
                        out[row, k, g, d] = _F(0)
            # A thread that has all rows goes on with the one behind this one.
            last_run = b_first[rows if alone else row + 1] - 1
            for run in range(b_first[row], b_first[row + 1]):
                for start in range(runs[run, 0], runs[run, 1], BLOCK):
                    count = min(BLOCK, runs[run, 1] - start)
                    fours = count // 4 * 4
                    # The block behind this one.
                    after, after_end = start + BLOCK, runs[run, 1]
                    if after >= after_end and run < last_run:
                        after, after_end = runs[run + 1, 0], runs[run + 1, 1]
                    quarter, after_quarter = fours // 4, (min(BLOCK, after_end - after) + 3) // 4
                    for j in range(0, fours, 4):
                        at = start + j
                        for k in range(first_head, end_head):
                            for part in range(4):
                                there = (start + part * quarter + j // 4) * kv_heads + k
                                for byte in range(0, value_bytes, LINE):
                                    fetch(a[FIRST + 2] + there * value_bytes + byte)
                            for g in range(group):
                                h = k * group + g
                                s0, s1, s2, s3 = _F(0), _F(0), _F(0), _F(0)
                                for d in range(head_dim):
                                    x = queries[row, k, g, d]
                                    s0 += x * wide(keys[at, k, d])
                                    s1 += x * wide(keys[at + 1, k, d])
                                    s2 += x * wide(keys[at + 2, k, d])
                                    s3 += x * wide(keys[at + 3, k, d])
                                if scaled:
                                    s0 *= key_scales[at, k]
                                    s1 *= key_scales[at + 1, k]
                                    s2 *= key_scales[at + 2, k]
                                    s3 *= key_scales[at + 3, k]
                                scores[h, j], scores[h, j + 1] = s0 * scale, s1 * scale
                                scores[h, j + 2], scores[h, j + 3] = s2 * scale, s3 * scale
                    for j in range(fours, count):
                        for k in range(first_head, end_head):
                            for g in range(group):
                                score = _F(0)
                                for d in range(head_dim):
                                    score += queries[row, k, g, d] * wide(keys[start + j, k, d])
                                if scaled:
                                    score *= key_scales[start + j, k]
                                scores[k * group + g, j] = score * scale
                    for k in range(first_head, end_head):
                        for g in range(group):
                            h = k * group + g
                            top = highest[h]
                            for j in range(count):
                                top = scores[h, j] if scores[h, j] > top else top
                            fade = exp2(highest[h] - top)
                            highest[h] = top
                            added = _F(0)
                            for j in range(count):
                                weight = exp2(scores[h, j] - top)
                                scores[h, j] = weight
                                added += weight
                            total[h] = total[h] * fade + added
                            if scaled:
                                for j in range(count):
                                    scores[h, j] *= value_scales[start + j, k]
                            for d in range(value_dim):
                                out[row, k, g, d] *= fade
                    for j in range(0, fours, 4):
                        at = start + j
                        for k in range(first_head, end_head):
                            if j // 4 < after_quarter:
                                for part in range(4):
                                    there = (after + part * after_quarter + j // 4) * kv_heads + k
                                    for byte in range(0, key_bytes, LINE):
                                        fetch(a[FIRST + 1] + there * key_bytes + byte)
                            for g in range(group):
                                h = k * group + g
                                w0, w1 = scores[h, j], scores[h, j + 1]
                                w2, w3 = scores[h, j + 2], scores[h, j + 3]
                                for d in range(value_dim):
                                    out[row, k, g, d] += (
                                        w0 * wide(values[at, k, d])
                                        + w1 * wide(values[at + 1, k, d])
                                        + w2 * wide(values[at + 2, k, d])
                                        + w3 * wide(values[at + 3, k, d])
                                    )
                    for j in range(fours, count):
                        for k in range(first_head, end_head):
                            for g in range(group):
                                weight = scores[k * group + g, j]
                                for d in range(value_dim):
                                    out[row, k, g, d] += weight * wide(values[start + j, k, d])
            for k in range(first_head, end_head):
                for g in range(group):
                    whole = _F(1) / total[k * group + g]
                    for d in range(value_dim):
                        out[row, k, g, d] *= whole
            item = take(a)

    return loop(body)
