"""Parts of rows as rows of a tile, so that few tokens and few rows are work for many warps.

The matrix unit takes 8 columns or more, and few rows are few programs. So PARTS of a row's inputs
are rows of the tile, below each other, and the same parts of a token are columns beside each other.
Of all their products those of equal parts are kept, and summed in the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: The matrix unit's fewest columns.
LEAST_COLUMNS = 8


@triton.jit
def sum_parts(
    sums,
    row_part,
    part,
    GATES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """[GATES · PARTS · BLOCK_N, columns] float32 -> [GATES, BLOCK_N, BLOCK_T].

    Args:
        sums: rows as `row_part` says, columns [parts, BLOCK_T] and some that are nothing.
        row_part: [rows], which part each row is.
        part: [columns], which part each column is; beyond PARTS: none.
        GATES: 2 where rows are gates and what they open, else 1.
        PARTS: of a row's inputs.
        BLOCK_N: rows of a program.
        BLOCK_T: tokens of a program.
    """
    PLACES: tl.constexpr = sums.shape[1] // BLOCK_T
    if PLACES > 1:
        sums = tl.where(row_part[:, None] == part[None, :], sums, 0.0)
        sums = tl.sum(tl.reshape(sums, (GATES * PARTS * BLOCK_N, PLACES, BLOCK_T)), axis=1)
    out = tl.reshape(sums, (GATES, PARTS, BLOCK_N, BLOCK_T))
    return tl.sum(out, axis=1)


@triton.jit
def write_tile(out, y, first_row, first_token, ADD: tl.constexpr):
    """Round [rows, tokens] float32 and write it, or add it, to the tile of descriptor y [T, n].

    The tensor memory engine takes it from shared memory as it is there: threads that turned a tile
    around for stores of their own would wait for each other some thirty times.
    """
    out = out.to(y.dtype)
    if ADD:
        before = tl.trans(y.load([first_token, first_row]))
        out = (out.to(tl.float32) + before.to(tl.float32)).to(y.dtype)
    y.store([first_token, first_row], tl.trans(out))
