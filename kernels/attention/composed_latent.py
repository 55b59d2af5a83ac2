"""Attention over latent rows, made of a device's other attention.

A token may ask the rows themselves (absorbed: its queries are taken into their space, its results
out of it), or keys and values that are made of all rows it sees (expanded). Absorbed, a pair of
tokens costs more and there is nothing to make: right for few tokens of a row. Expanded, the rows
are read once, and each pair costs what it costs elsewhere: right for many.

What is made is as long as the context and as wide as all heads, so it is made for some heads at a
time, and of long contexts part by part, whose softmaxes are merged: no more memory is taken than
`expansion_of` says, whatever the context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from tokenpod.core.model_size import EXPANDED_AT_ONCE, LONGEST_EXPANDED, Expansion
from tokenpod.kernels.attention.partial_attention import Part, attend_part, merged
from tokenpod.kernels.operations.attention_ops import (
    Attend,
    AttendLatent,
    AttentionOptions,
    AttentionPlan,
    LatentPlan,
    LatentShape,
    PlanAttention,
    PlanLatent,
)
from tokenpod.kernels.operations.batch import ForwardBatch, PagedRows, RaggedRows

#: (queries [N, H, rank + rope], pool, rank, plan, scale) -> [N, H, rank]
Absorbed = Callable[[torch.Tensor, torch.Tensor, int, AttentionPlan, float], torch.Tensor]


#: Numbers of int32 to which the lines of a row table are rounded up.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Expanded:
    """One row whose keys and values are made for it."""

    tokens: slice
    #: [context] int64: where its rows of the pool are, in order of position.
    slots: torch.Tensor
    #: Of a pool that holds nothing but what is made; None: it is made part by part.
    plan: AttentionPlan | None


@dataclass(frozen=True, slots=True)
class RowsPlan(LatentPlan):
    """What all layers of a step share: which rows are asked in which way."""

    #: Of the tokens that are absorbed; None: there are none.
    absorbed: AttentionPlan | None
    #: [N] int64: which tokens these are; None: all.
    t_index: torch.Tensor | None
    expanded: list[Expanded]


def latent_of(
    plan_attention: PlanAttention,
    attention: Attend,
    plan_absorbed: Callable[[ForwardBatch], AttentionPlan] | None = None,
    absorbed: Absorbed | None = None,
) -> tuple[PlanLatent, AttendLatent]:
    """Both operations; without `absorbed` latents are keys and values of the same attention."""
    ask = absorbed or _by(attention)

    def plan(batch: ForwardBatch, shape: LatentShape) -> LatentPlan:
        many = [row for row in range(batch.single_rows, batch.rows) if _expands(batch, row, shape)]
        expanded = [_expanded(batch, row, plan_attention) for row in many]
        few = batch if not many else _without(batch, many)
        if plan_absorbed is not None:
            made = plan_absorbed(few) if few.tokens else None
        else:
            made = plan_attention(few, None) if few.tokens else None
        return RowsPlan(made, _index(batch, many), expanded)

    def attend(
        q: torch.Tensor,
        pool: torch.Tensor,
        up: torch.Tensor,
        shape: LatentShape,
        plan: LatentPlan,
        scale: float,
    ) -> torch.Tensor:
        assert isinstance(plan, RowsPlan)
        if not plan.expanded:
            assert plan.absorbed is not None, "a step has tokens"
            return _absorb(ask, q, pool, up, shape, plan.absorbed, scale).flatten(1)
        out = q.new_empty((*q.shape[:2], shape.value))
        if plan.absorbed is not None:
            assert plan.t_index is not None
            some = q.index_select(0, plan.t_index)
            got = _absorb(ask, some, pool, up, shape, plan.absorbed, scale)
            out.index_copy_(0, plan.t_index, got)
        for row in plan.expanded:
            tokens = min(len(row.slots), LONGEST_EXPANDED)
            at_once = max(EXPANDED_AT_ONCE[q.device.type] // tokens, 1)
            if row.plan is None:
                expand = functools.partial(_expand_in_parts, pool, row.slots)
            else:
                latents = pool[:, 0].index_select(0, row.slots)
                expand = functools.partial(_expand, attention, latents, row.plan)
            for first in range(0, q.shape[1], at_once):
                heads = slice(first, first + at_once)
                out[row.tokens, heads] = expand(q[row.tokens, heads], up[heads], shape, scale)
        return out.flatten(1)

    return plan, attend


def expansion_of(heads: int, shape: LatentShape) -> Expansion:
    """What is made for so many heads, in numbers."""
    made = shape.nope + shape.value
    return Expansion(heads, made + 2 * _width(shape), shape.rank + shape.rope)


def _expands(batch: ForwardBatch, row: int, shape: LatentShape) -> bool:
    """Whether the work that is saved with each pair of tokens outweighs making keys and values."""
    tokens = batch.b_start[row + 1] - batch.b_start[row]
    made = shape.rank * (shape.nope + shape.value)
    saved = 2 * shape.rank - shape.nope - shape.value
    # A captured step does not know its contexts.
    return batch.b_context[row] > 0 and tokens * saved > made


def _expanded(batch: ForwardBatch, row: int, plan_attention: PlanAttention) -> Expanded:
    start, end, context = batch.b_start[row], batch.b_start[row + 1], batch.b_context[row]
    device = batch.t_slot.device
    if batch.row_table.numel():
        slots = batch.row_table[batch.b_row[row], :context].long()
    else:
        slots = torch.cat([torch.arange(*run) for run in batch.b_runs[row]])
    if context > LONGEST_EXPANDED:
        return Expanded(slice(start, end), slots, None)
    b_row, b_start, b_context = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in ([0], [0, end - start], [context])
    )
    # Triton compiles a kernel once more for a table of another alignment, which takes a second.
    width = -(-context // _ALIGNMENT) * _ALIGNMENT
    alone = ForwardBatch(
        t_token=batch.t_token[start:end],
        t_place=batch.t_place[start:end],
        t_slot=batch.t_slot[start:end],
        b_start=[0, end - start],
        b_context=[context],
        b_runs=[[(0, context)]],
        b_row=[0],
        row_table=torch.arange(width, dtype=torch.int32, device=device)[None],
        single_rows=0,
        logit_index=None,
        paged=PagedRows(b_row, b_start, b_context),
    )
    return Expanded(slice(start, end), slots, plan_attention(alone, None))


def _without(batch: ForwardBatch, rows: list[int]) -> ForwardBatch:
    """The same without these rows of several tokens."""
    left = [row for row in range(batch.rows) if row not in rows]
    starts = [0]
    for row in left:
        starts.append(starts[-1] + batch.b_start[row + 1] - batch.b_start[row])
    t_index = _index(batch, rows)
    assert t_index is not None
    paged = batch.paged
    if paged is not None and paged.t_row is not None:
        paged = replace(paged, t_row=paged.t_row.index_select(0, t_index))
    kept = RaggedRows(
        starts,
        [batch.b_context[row] for row in left],
        [batch.b_runs[row] for row in left],
        [batch.b_row[row] for row in left],
        batch.single_rows,
    )
    return replace(
        batch,
        t_token=batch.t_token.index_select(0, t_index),
        t_place=batch.t_place.index_select(0, t_index),
        t_slot=batch.t_slot.index_select(0, t_index),
        b_start=kept.b_start,
        b_context=kept.b_context,
        b_runs=kept.b_runs,
        b_row=kept.b_row,
        paged=paged,
        t_own_position=None,  # queries are turned already
    )


def _index(batch: ForwardBatch, rows: list[int]) -> torch.Tensor | None:
    """[N] int64: the tokens of all rows but these; None: of all."""
    if not rows:
        return None
    spans = [
        torch.arange(batch.b_start[row], batch.b_start[row + 1])
        for row in range(batch.rows)
        if row not in rows
    ]
    index = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
    return index.to(batch.t_slot.device)


def _absorb(
    ask: Absorbed,
    q: torch.Tensor,
    pool: torch.Tensor,
    up: torch.Tensor,
    shape: LatentShape,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """Q [N, H, nope + rope] -> [N, H, value], by the latents themselves."""
    to_keys, to_values = up[:, : shape.nope], up[:, shape.nope :]
    inside = torch.bmm(q[..., : shape.nope].transpose(0, 1), to_keys).transpose(0, 1)
    queries = torch.cat((inside, q[..., shape.nope :]), dim=-1)
    found = ask(queries, pool, shape.rank, plan, scale)
    return torch.bmm(found.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1)


def _expand(
    attention: Attend,
    latents: torch.Tensor,
    plan: AttentionPlan,
    q: torch.Tensor,
    up: torch.Tensor,
    shape: LatentShape,
    scale: float,
) -> torch.Tensor:
    """Q [n, H, nope + rope] of one row -> [n, H, value], by its latents [context, rank + rope]."""
    keys, values = _made(latents, up, shape)
    width = keys.shape[2]
    queries = functional.pad(q, (0, width - q.shape[2])).contiguous()
    out = attention(queries, keys, values, plan, AttentionOptions(scale=scale))
    return out.view(len(q), -1, width)[..., : shape.value]


def _expand_in_parts(
    pool: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    up: torch.Tensor,
    shape: LatentShape,
    scale: float,
) -> torch.Tensor:
    """The same of a row whose latents are in `slots` [context] of the pool.

    Neither queries nor keys are more than LONGEST_EXPANDED at a time.
    """
    width, before = _width(shape), len(slots) - len(q)
    found = []
    for first in range(0, len(q), LONGEST_EXPANDED):
        asked = q[first : first + LONGEST_EXPANDED]
        queries = functional.pad(asked, (0, width - q.shape[2])).transpose(0, 1)[None]
        behind = before + first
        ends = [*range(LONGEST_EXPANDED, behind, LONGEST_EXPANDED), behind, behind + len(asked)]
        parts = _parts(queries, pool, slots, ends, up, shape, scale)
        found.append(functools.reduce(merged, parts).out[0].transpose(0, 1))
    return torch.cat(found)[..., : shape.value].to(q.dtype)


def _parts(
    queries: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    ends: list[int],
    up: torch.Tensor,
    shape: LatentShape,
    scale: float,
) -> Iterator[Part]:
    """What queries [1, H, n, width] find in the latents up to each of `ends`; the last are theirs.

    The results are float32, so that rounding does not grow with their number.
    """
    start = 0
    for end in ends:
        if start < end:
            latents = pool[:, 0].index_select(0, slots[start:end])
            made = (x.transpose(0, 1)[None] for x in _made(latents, up, shape))
            part = attend_part(queries, *made, causal=end == ends[-1], scale=scale)
            yield Part(part.out.float(), part.log_sums)
        start = end


def _made(
    latents: torch.Tensor, up: torch.Tensor, shape: LatentShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, H, width] of latents [n, rank + rope], as wide as one another."""
    heads, width = len(up), _width(shape)
    made = functional.linear(latents[:, : shape.rank], up.flatten(0, 1))
    made = made.view(len(latents), heads, -1)
    keys = latents.new_zeros((len(latents), heads, width))
    keys[..., : shape.nope] = made[..., : shape.nope]
    keys[..., shape.nope : shape.nope + shape.rope] = latents[:, None, shape.rank :]
    # Other attention has values as wide as keys.
    values = functional.pad(made[..., shape.nope :], (0, width - shape.value))
    return keys, values.contiguous()


def _width(shape: LatentShape) -> int:
    """Numbers of a key that is made, and of a value: as many as flash attention takes."""
    return -(-max(shape.nope + shape.rope, shape.value) // 8) * 8


def _by(attention: Attend) -> Absorbed:
    """Whole rows are values too: what the shared key adds to the result is left out."""

    def ask(
        q: torch.Tensor, pool: torch.Tensor, rank: int, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        out = attention(q.contiguous(), pool, pool, plan, AttentionOptions(scale=scale))
        return out.view(q.shape)[..., :rank]

    return ask
