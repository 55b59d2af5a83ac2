"""What a step does before the model and after it: tokens that only the device knows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launcher import launched

#: Tokens or rows that one program handles.
BLOCK = 128


def resolve(
    t_token: torch.Tensor,
    t_row: torch.Tensor,
    t_place: torch.Tensor,
    t_slot: torch.Tensor,
    row_table: torch.Tensor,
    last_token: torch.Tensor,
    t_window: torch.Tensor | None = None,
    window_table: torch.Tensor | None = None,
    row_shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens and positions [T] int64, and each token's slot entered in the row table.

    Args:
        t_token: [T] int64; negative: the one that the token's row sampled last.
        t_row, t_place, t_slot: [T] int64.
        row_table: [rows, places] int32.
        last_token: [rows] int64.
        t_window, window_table: the same as `t_slot` and `row_table`, of window slots if there are
            any.
        row_shift: [rows] int64, by how much positions are further on than places; None: they are
            the same, and none are returned.
    """
    tokens = torch.empty_like(t_token)
    positions = None if row_shift is None else torch.empty_like(t_place)
    _resolve[(triton.cdiv(len(t_token), BLOCK),)](
        t_token,
        t_row,
        t_place,
        t_slot,
        row_table,
        row_table.stride(0),
        last_token,
        tokens,
        t_window,
        window_table,
        row_shift,
        positions,
        len(t_token),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return tokens, positions


def remember(tokens: torch.Tensor, rows: torch.Tensor, last_token: torch.Tensor) -> None:
    """last_token[rows] = tokens [n] int64, but for a row for which none was drawn: -1."""
    _remember[(triton.cdiv(len(tokens), BLOCK),)](
        tokens, rows, last_token, len(tokens), BLOCK=BLOCK, num_warps=4
    )


def accept(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    t_token: torch.Tensor,
    last_token: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """Note how many drafts of m rows are right, and the last token that was drawn of each.

    A draft is right if those before it are and it equals what was drawn before it.

    Args:
        rows: [1 + 2n, m] int64: each row; at which of `tokens` its up to n samples are, -1: there
            are no more; and which of `t_token` each is behind.
        tokens: [samples] int64; negative: none was drawn.
        t_token: [T] int64, drafts among them.
        last_token, accepted: [rows] int64, which are written.
    """
    m = rows.shape[1]
    _accept[(triton.cdiv(m, BLOCK),)](
        rows,
        rows.stride(0),
        tokens,
        t_token,
        last_token,
        accepted,
        len(rows) // 2,
        m,
        BLOCK=BLOCK,
        num_warps=4,
    )


# None overlaps with its neighbours (`launch`): kernels that do may read a row table or a token
# before they wait.


@launched
@triton.jit(do_not_specialize=["count"])
def _resolve(
    t_token,
    t_row,
    t_place,
    t_slot,
    row_table,
    table_stride,
    last_token,
    tokens,
    t_window,
    window_table,
    row_shift,
    positions,
    count,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = t < count
    row = tl.load(t_row + t, mask=is_token, other=0)
    place = tl.load(t_place + t, mask=is_token, other=0)
    slot = tl.load(t_slot + t, mask=is_token, other=0)
    tl.store(row_table + row * table_stride + place, slot.to(tl.int32), mask=is_token)
    if window_table is not None:
        own = tl.load(t_window + t, mask=is_token, other=0).to(tl.int32)
        tl.store(window_table + row * table_stride + place, own, mask=is_token)
    if row_shift is not None:
        shift = tl.load(row_shift + row, mask=is_token, other=0)
        tl.store(positions + t, place + shift, mask=is_token)
    token = tl.load(t_token + t, mask=is_token, other=0)
    last = tl.load(last_token + row, mask=is_token & (token < 0), other=0)
    tl.store(tokens + t, tl.where(token < 0, last, token), mask=is_token)


@launched
@triton.jit(do_not_specialize=["count"])
def _remember(tokens, rows, last_token, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < count, other=0)
    token = tl.load(tokens + i, mask=i < count, other=0)
    tl.store(last_token + row, token, mask=(i < count) & (token >= 0))


@launched
@triton.jit(do_not_specialize=["stride", "samples", "count"])
def _accept(
    rows, stride, tokens, t_token, last_token, accepted, samples, count, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < count, other=0)
    at = tl.load(rows + stride + i, mask=i < count, other=-1)
    last = tl.load(tokens + at, mask=at >= 0, other=-1)
    right = last >= 0
    number = tl.zeros((BLOCK,), tl.int64)
    for place in range(1, samples):
        at = tl.load(rows + (1 + place) * stride + i, mask=i < count, other=-1)
        token = tl.load(tokens + at, mask=at >= 0, other=-1)
        behind = tl.load(rows + (1 + samples + place) * stride + i, mask=at >= 0, other=0)
        draft = tl.load(t_token + behind, mask=at >= 0, other=-1)
        right = right & (token >= 0) & (last == draft)
        last = tl.where(right, token, last)
        number += right.to(tl.int64)
    tl.store(last_token + row, last, mask=(i < count) & (last >= 0))
    tl.store(accepted + row, number, mask=i < count)
