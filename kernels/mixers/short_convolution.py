"""The short convolution in torch: rows of one token together, others row by row."""

from __future__ import annotations

import torch

from tokenpod.kernels.mixers.convolution import (
    batch_of,
    convolve_rows,
    convolve_run,
    convolve_token,
)
from tokenpod.kernels.operations.recurrent_ops import RecurrentPlan, RecurrentStates


def short_convolution(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: RecurrentStates,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """`ShortConvolution` says what."""
    batch, (let_in, let_out, values) = batch_of(plan), mixed.chunk(3, dim=1)
    given, single, device = let_in * values, batch.single_rows, mixed.device
    made = []
    if single:
        rows, contexts = (
            torch.tensor(each[:single], device=device) for each in (batch.b_row, batch.b_context)
        )
        made.append(convolve_rows(given[:single], rows, contexts - 1, weight, bias, states.inputs))
    for row in range(single, batch.rows):
        own = given[batch.b_start[row] : batch.b_start[row + 1]]
        ring = states.inputs[batch.b_row[row]]
        made.append(convolve_run(own, ring, batch.b_context[row], weight, bias))
    return torch.cat(made).to(mixed.dtype) * let_out


def one_by_one(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: RecurrentStates,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """The same, one token after the other: `ShortConvolution` as plainly as possible."""
    batch, (let_in, let_out, values) = batch_of(plan), mixed.chunk(3, dim=1)
    given, out = let_in * values, torch.empty_like(values)
    for row, state in enumerate(batch.b_row):
        start, end = batch.b_start[row], batch.b_start[row + 1]
        for token in range(start, end):
            position = batch.b_context[row] - (end - token)
            made = convolve_token(given[token], states.inputs[state], position, weight, bias)
            out[token] = made.to(out.dtype) * let_out[token]
    return out
