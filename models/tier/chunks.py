"""Attention in chunks of positions (Llama 4): a step's rows cut where chunks begin."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenpod.kernels.operations.batch import ForwardBatch, Run


def in_chunks(batch: ForwardBatch, size: int) -> ForwardBatch:
    """The same tokens in rows that see a chunk each: position p sees p // size · size to p.

    A row's tokens become a row for each chunk that they lie in, whose KV begins where the chunk
    does. Rows are read by their runs, or by a row table on the host; not by `paged`.
    """
    assert batch.paged is None, "chunks are cut on the host"
    starts, contexts = [0], list[int]()
    runs, rows = list[list[Run]](), list[int]()
    for row, context in enumerate(batch.b_context):
        end = batch.b_start[row + 1]
        position = context - (end - batch.b_start[row])
        while position < context:
            first = position // size * size
            last = min(first + size, context)
            starts.append(starts[-1] + last - position)
            contexts.append(last - first)
            runs.append(_between(batch.b_runs[row], first, last))
            rows.append(len(rows))
            position = last
    return replace(
        batch,
        b_start=starts,
        b_context=contexts,
        b_runs=runs,
        b_row=rows,
        row_table=_table(batch.row_table, runs, contexts),
    )


def _between(runs: list[Run], first: int, last: int) -> list[Run]:
    """The slots of positions [first, last)."""
    found, position = [], 0
    for start, end in runs:
        low, high = max(first - position, 0), min(last - position, end - start)
        if low < high:
            found.append((start + low, start + high))
        position += end - start
    return found


def _table(table: torch.Tensor, runs: list[list[Run]], contexts: list[int]) -> torch.Tensor:
    """Of the new rows, if there is one of the old."""
    if not table.numel():
        return table
    made = table.new_zeros((len(runs), max(contexts, default=0)))
    for row, pieces in enumerate(runs):
        slots = [slot for start, end in pieces for slot in range(start, end)]
        made[row, : len(slots)] = made.new_tensor(slots)
    return made
