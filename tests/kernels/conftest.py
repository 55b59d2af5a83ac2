"""Random inputs of many shapes for the operations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tokenpod.kernels.operations.batch import ForwardBatch, Run


@pytest.fixture
def draw():
    """Normal numbers, the same in every run."""
    generator = torch.Generator().manual_seed(11)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return make


@dataclass(frozen=True)
class Row:
    """Tokens of this step, tokens in all, and the lengths of the runs that hold them."""

    tokens: int
    runs: tuple[int, ...]


def build(rows: list[Row], slots: int) -> ForwardBatch:
    """A step over these rows (those with one token first), their runs strewn over the pool."""
    generator = torch.Generator().manual_seed(5)
    pieces = [(row, length) for row, spec in enumerate(rows) for length in spec.runs]
    order = torch.randperm(len(pieces), generator=generator).tolist()
    firsts: dict[int, int] = {}
    cursor = 3
    for piece in order:
        firsts[piece] = cursor
        cursor += pieces[piece][1] + 2  # a gap, so that runs never join
    assert cursor <= slots
    table = torch.full((len(rows), 512), -1, dtype=torch.int32)
    b_runs: list[list[Run]] = [[] for _ in rows]
    starts, positions, written = [0], [], []
    for piece, (row, length) in enumerate(pieces):
        b_runs[row].append((firsts[piece], firsts[piece] + length))
    for row, spec in enumerate(rows):
        every = [slot for start, end in b_runs[row] for slot in range(start, end)]
        table[row, : len(every)] = torch.tensor(every)
        written += every[len(every) - spec.tokens :]
        positions += range(len(every) - spec.tokens, len(every))
        starts.append(starts[-1] + spec.tokens)
    return ForwardBatch(
        t_token=torch.zeros(starts[-1], dtype=torch.int64),
        t_place=torch.tensor(positions),
        t_slot=torch.tensor(written),
        b_start=starts,
        b_context=[sum(spec.runs) for spec in rows],
        b_runs=b_runs,
        b_row=list(range(len(rows))),
        row_table=table,
        single_rows=sum(spec.tokens == 1 for spec in rows),
        logit_index=torch.tensor([end - 1 for end in starts[1:]]),
    )


@pytest.fixture(scope="session")
def row():
    return Row


@pytest.fixture(scope="session")
def step_over():
    return build
