"""Attention of rows of several tokens over views of contiguous KV runs, and of rare kinds.

A row's KV is one run most of the time (a cached prefix adds one or two), so keys and values are
read where they lie: no gather, no repeated heads. Softmax over several runs is exact: each part
comes with the logarithm of its sum, by which parts are weighted together. Rows whose KV is
scattered are gathered, which costs 3 to 7 times more. Of a pool of int8 what a row reads is first
made float, layer by layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tokenpod.kernels.attention.partial_attention import attend_part, merged
from tokenpod.kernels.attention.reference_attention import attend
from tokenpod.kernels.operations.attention_ops import AttentionOptions, KVScales
from tokenpod.kernels.operations.batch import ForwardBatch, Run, is_mutual

#: Gathering a row is cheaper than visiting more runs than this one by one.
MAX_PARTS = 4

#: Attention by the definition has so many scores of a row at a time, at most: those of 4,096 tokens
#: that see 16,384 would be gigabytes.
SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class Pools:
    """A layer's keys and values, read as numbers of `dtype`: views where they are held so."""

    #: [slots + 1, K, D] and [slots + 1, K, V]
    keys: torch.Tensor
    values: torch.Tensor
    scales: KVScales | None
    dtype: torch.dtype

    def run(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [end - start, K, D or V] of slots `start` to `end`."""
        keys, values, scales = self.keys[start:end], self.values[start:end], self.scales
        if scales is None:
            return keys, values
        own = KVScales(scales.keys[start:end], scales.values[start:end])
        return self._widened(keys, own.keys), self._widened(values, own.values)

    def gather(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, K, D or V] of the slots in `index` [n]."""
        keys, values = (pool.index_select(0, index) for pool in (self.keys, self.values))
        if self.scales is None:
            return keys, values
        own = KVScales(*(scale.index_select(0, index) for scale in self.scales))
        return self._widened(keys, own.keys), self._widened(values, own.values)

    def _widened(self, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (numbers * scale[..., None]).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Extend:
    """A row's tokens `start` to `end`: all see `prefix`, and among `own`, if any, the past."""

    start: int
    end: int
    prefix: list[Run]
    own: list[Run]
    #: Slots to gather, if prefix and own are to be gathered together and masked.
    index: torch.Tensor | None
    #: [end - start, len(index)]: 0 where visible, else minus infinity.
    mask: torch.Tensor | None


def plan_extends(batch: ForwardBatch, window: int | None) -> list[Extend]:
    """What to read for each row of several tokens."""
    return [_plan_extend(batch, row, window) for row in range(batch.single_rows, batch.rows)]


def visible_runs(batch: ForwardBatch, row: int, queries: int, window: int | None) -> list[Run]:
    """Where the positions lie that any of the last `queries` tokens of `row` sees."""
    return last_runs(batch.b_runs[row], _seen(batch.b_context[row], queries, window))


def are_fast(options: AttentionOptions) -> bool:
    """Whether flash attention, which knows a scale only, can do it."""
    slow = options.softcap, options.alibi_slopes, options.sinks
    return all(option is None for option in slow)


def attend_rows(
    q: torch.Tensor,
    pools: Pools,
    batch: ForwardBatch,
    window: int | None,
    options: AttentionOptions,
    *,
    rows: int | None = None,
) -> torch.Tensor:
    """Attention of q [T, H, D] over the pool: [T, H · V].

    Row by row by the definition, what a window hides left out. `rows`: of the first rows alone,
    whose tokens q has; None: of all.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:2], pools.values.shape[2]))
    out[batch.tokens :] = 0
    for row in range(batch.rows if rows is None else rows):
        start, end = batch.b_start[row], batch.b_start[row + 1]
        if is_mutual(batch, row):
            runs = visible_runs(batch, row, end - start, window)
            k, v = (read.to(exact) for read in pools.gather(_slots(runs)))
            own = attend(q[start:end].to(exact), k, v, window, options, causal=False)
            out[start:end] = own.to(q.dtype)
            continue
        at_once = max(SCORES_AT_ONCE // max(q.shape[1] * batch.b_context[row], 1), 1)
        for first in range(start, end, at_once):
            last = min(first + at_once, end)
            runs = _drop(batch.b_runs[row], end - last)
            context = batch.b_context[row] - (end - last)
            slots = _slots(last_runs(runs, _seen(context, last - first, window)))
            k, v = (read.to(exact) for read in pools.gather(slots))
            out[first:last] = attend(q[first:last].to(exact), k, v, window, options).to(q.dtype)
    return out.flatten(1)


def attend_extends(
    extends: list[Extend],
    q: torch.Tensor,
    pools: Pools,
    out: torch.Tensor,
    scale: float | None = None,
) -> None:
    """Write the rows of several tokens, of q [T, H, D], to `out` [T, H, V]."""
    grouped, grouped_out = _grouped(q, pools.keys), _grouped(out, pools.keys)
    for extend in extends:
        rows = slice(extend.start, extend.end)
        # The heads of a group share keys and values: groups are the batch, stride 0 repeats.
        queries = grouped[rows].permute(1, 2, 0, 3)
        grouped_out[rows] = _attend_extend(extend, queries, pools, scale).permute(2, 0, 1, 3)


def _grouped(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[T, H, D] -> a view [T, K, H/K, D]."""
    kv_heads = keys.shape[1]
    return q.view(q.shape[0], kv_heads, q.shape[1] // kv_heads, q.shape[2])


def _seen(context: int, queries: int, window: int | None) -> int:
    """How many of the last positions any of the last `queries` tokens sees."""
    return context if window is None else min(context, window + queries - 1)


def last_runs(runs: list[Run], length: int) -> list[Run]:
    """The last `length` positions of `runs`."""
    if len(runs) == 1:
        end = runs[0][1]
        return [(end - length, end)]
    kept: list[Run] = []
    for start, end in reversed(runs):
        if length <= 0:
            break
        kept.append((max(start, end - length), end))
        length -= end - start
    return kept[::-1]


def _length(runs: list[Run]) -> int:
    return sum(end - start for start, end in runs)


def _slots(runs: list[Run]) -> torch.Tensor:
    return torch.cat([torch.arange(start, end) for start, end in runs])


def _plan_extend(batch: ForwardBatch, row: int, window: int | None) -> Extend:
    start, end = batch.b_start[row], batch.b_start[row + 1]
    context = batch.b_context[row]
    queries = end - start
    seen = _seen(context, queries, window)
    runs = visible_runs(batch, row, queries, window)
    own = last_runs(runs, queries)
    prefix = _drop(runs, queries)
    windowed = window is not None and context > window
    mutual = is_mutual(batch, row)
    if mutual and not windowed:
        index = _slots(runs) if len(runs) > MAX_PARTS else None
        return Extend(start, end, runs, [], index, None)
    if windowed or len(own) > 1 or len(prefix) > MAX_PARTS:
        mask = _mask(queries, seen, window, causal=not mutual)
        return Extend(start, end, prefix, own, _slots(runs), mask)
    return Extend(start, end, prefix, own, None, None)


def _drop(runs: list[Run], length: int) -> list[Run]:
    """`runs` without their last `length` positions."""
    kept = list(runs)
    while length:
        start, end = kept.pop()
        if end - start > length:
            kept.append((start, end - length))
            break
        length -= end - start
    return kept


def _mask(queries: int, seen: int, window: int | None, *, causal: bool) -> torch.Tensor:
    """[queries, seen] float32: the queries are the last of the positions seen."""
    asked_at = torch.arange(seen - queries, seen)[:, None]
    seen_at = torch.arange(seen)
    hidden = (seen_at > asked_at) & causal
    if window is not None:
        hidden |= seen_at <= asked_at - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _attend_extend(
    extend: Extend,
    q: torch.Tensor,
    pools: Pools,
    scale: float | None,
) -> torch.Tensor:
    """Q [K, H/K, n, D] -> [K, H/K, n, V]."""
    group = q.shape[1]

    if extend.index is not None:
        k, v = (_spread(read, group) for read in pools.gather(extend.index))
        mask = None if extend.mask is None else extend.mask.to(q.dtype)
        return attend_part(q, k, v, mask=mask, scale=scale).out
    parts = [
        attend_part(q, *(_spread(read, group) for read in pools.run(*run)), scale=scale)
        for run in extend.prefix
    ]
    for run in extend.own:
        k, v = (_spread(read, group) for read in pools.run(*run))
        parts.append(attend_part(q, k, v, causal=True, scale=scale))
    return functools.reduce(merged, parts).out


def _spread(run: torch.Tensor, group: int) -> torch.Tensor:
    """[n, K, D] -> a view [K, group, n, D]: every query head of a group reads the same."""
    return run.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
