"""What a step does before the model and after it: tokens that only the device knows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Tokens or rows that one program handles.
BLOCK = 128


def resolve(
    t_token: torch.Tensor,
    t_row: torch.Tensor,
    t_position: torch.Tensor,
    t_slot: torch.Tensor,
    row_table: torch.Tensor,
    last_token: torch.Tensor,
) -> torch.Tensor:
    """[T] int64 tokens, and each token's slot entered in the row table.

    Args:
        t_token: [T] int64; negative: the one that the token's row sampled last.
        t_row, t_position, t_slot: [T] int64.
        row_table: [rows, positions] int32.
        last_token: [rows] int64.
    """
    tokens = torch.empty_like(t_token)
    _resolve[(triton.cdiv(len(t_token), BLOCK),)](
        t_token,
        t_row,
        t_position,
        t_slot,
        row_table,
        row_table.stride(0),
        last_token,
        tokens,
        len(t_token),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return tokens


def remember(tokens: torch.Tensor, rows: torch.Tensor, last_token: torch.Tensor) -> None:
    """last_token[rows] = tokens [n] int64, but for a row for which none was drawn: -1."""
    _remember[(triton.cdiv(len(tokens), BLOCK),)](
        tokens, rows, last_token, len(tokens), BLOCK=BLOCK, num_warps=4
    )


# Neither overlaps with its neighbours (`launch`): kernels that do may read a row table or a token
# before they wait.


@triton.jit(do_not_specialize=["count"])
def _resolve(
    t_token,
    t_row,
    t_position,
    t_slot,
    row_table,
    table_stride,
    last_token,
    tokens,
    count,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = t < count
    row = tl.load(t_row + t, mask=is_token, other=0)
    position = tl.load(t_position + t, mask=is_token, other=0)
    slot = tl.load(t_slot + t, mask=is_token, other=0)
    tl.store(row_table + row * table_stride + position, slot.to(tl.int32), mask=is_token)
    token = tl.load(t_token + t, mask=is_token, other=0)
    last = tl.load(last_token + row, mask=is_token & (token < 0), other=0)
    tl.store(tokens + t, tl.where(token < 0, last, token), mask=is_token)


@triton.jit(do_not_specialize=["count"])
def _remember(tokens, rows, last_token, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < count, other=0)
    token = tl.load(tokens + i, mask=i < count, other=0)
    tl.store(last_token + row, token, mask=(i < count) & (token >= 0))
