"""The short convolution in torch: rows of one token together, others row by row."""

from __future__ import annotations

import torch

from tokenpod.kernels.mixers.convolution import convolve_rows, convolve_run, convolve_token
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.recurrent_ops import RecurrentStates


def short_convolution(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: RecurrentStates,
    plan: ForwardBatch,
) -> torch.Tensor:
    """`ShortConvolution` says what."""
    let_in, let_out, values = mixed.chunk(3, dim=1)
    given, single, device = let_in * values, plan.single_rows, mixed.device
    made = []
    if single:
        rows, contexts = (
            torch.tensor(each[:single], device=device) for each in (plan.b_row, plan.b_context)
        )
        made.append(convolve_rows(given[:single], rows, contexts - 1, weight, bias, states.inputs))
    for row in range(single, plan.rows):
        own = given[plan.b_start[row] : plan.b_start[row + 1]]
        ring = states.inputs[plan.b_row[row]]
        made.append(convolve_run(own, ring, plan.b_context[row], weight, bias))
    return torch.cat(made).to(mixed.dtype) * let_out


def one_by_one(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: RecurrentStates,
    plan: ForwardBatch,
) -> torch.Tensor:
    """The same, one token after the other: `ShortConvolution` as plainly as possible."""
    let_in, let_out, values = mixed.chunk(3, dim=1)
    given, out = let_in * values, torch.empty_like(values)
    for row, state in enumerate(plan.b_row):
        start, end = plan.b_start[row], plan.b_start[row + 1]
        for token in range(start, end):
            position = plan.b_context[row] - (end - token)
            made = convolve_token(given[token], states.inputs[state], position, weight, bias)
            out[token] = made.to(out.dtype) * let_out[token]
    return out
