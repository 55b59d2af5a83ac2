"""Random inputs, weights and states of a gated delta net."""

from __future__ import annotations

import torch

from support.kernels.attention_steps import Spec, lay_out
from tokenpod.kernels.mixers.convolution import plan_recurrent
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaInputs,
    DeltaWeights,
    MemoryShape,
    RecurrentStates,
)

SMALL = MemoryShape(key_heads=2, value_heads=4, key_dim=8, value_dim=12, width=4)
EPSILON = 1e-5


def drawn_states(shape: MemoryShape, batch: ForwardBatch, dtype=torch.float32) -> RecurrentStates:
    """Of every row of the batch what its positions before the step have left; NaN of others."""
    device, rows = batch.t_slot.device, len(batch.row_table)
    generator = torch.Generator(device).manual_seed(2)

    def draw(*sizes):
        return torch.randn(sizes, generator=generator, device=device)

    seen = torch.zeros((rows, shape.value_heads), dtype=torch.int32, device=device)
    inputs = draw(rows, shape.channels, shape.width).to(dtype)
    memory = draw(rows, shape.value_heads, shape.key_dim, shape.value_dim)
    used = {}
    for i, row in enumerate(batch.b_row):
        used[row] = batch.b_context[i] - (batch.b_start[i + 1] - batch.b_start[i])
    for row in range(rows):
        if row not in used:
            inputs[row], memory[row] = float("nan"), float("nan")
        elif used[row] <= 0:
            inputs[row], memory[row] = 0, 0
        else:
            seen[row] = used[row]
            inputs[row, :, used[row] :] = 0
    return RecurrentStates(inputs, memory, seen)


def drawn_weights(shape: MemoryShape, dtype=torch.float32, device="cpu") -> DeltaWeights:
    generator = torch.Generator(device).manual_seed(1)

    def draw(*sizes):
        return torch.randn(sizes, generator=generator, device=device)

    conv = (draw(shape.channels, shape.width) / 2).to(dtype)
    rates, shifts = draw(2, shape.value_heads)
    norm = (1 + draw(shape.value_dim) / 4).to(dtype)
    return DeltaWeights(conv, rates, shifts, RowNorm(norm, EPSILON))


def drawn_inputs(shape: MemoryShape, tokens: int, dtype=torch.float32, device="cpu") -> DeltaInputs:
    """Parts of one tensor, as products leave them."""
    generator = torch.Generator(device).manual_seed(tokens)
    sizes = [shape.channels, shape.value_heads * shape.value_dim, *[shape.value_heads] * 2]
    drawn = torch.randn((tokens, sum(sizes)), generator=generator, device=device)
    return DeltaInputs(*torch.split(drawn.to(dtype), sizes, dim=1))


def some(inputs: DeltaInputs, first: int, end: int) -> DeltaInputs:
    return DeltaInputs(*(x[first:end] for x in inputs))


def step_of(specs: list[Spec], device="cpu") -> ForwardBatch:
    return lay_out(specs, torch.device(device)).batch


def one_row(batch: ForwardBatch, state: int) -> ForwardBatch:
    """A step of one row, which has this state."""
    from dataclasses import replace

    paged = batch.paged
    return replace(
        batch,
        b_row=[state],
        paged=replace(
            paged,
            b_row=torch.full_like(paged.b_row, state),
            t_row=torch.full_like(paged.t_row, state),
        ),
    )


def copied(states: RecurrentStates) -> RecurrentStates:
    return RecurrentStates(*(x.clone() for x in states))


def run(form, inputs, weights, shape, states, batch, plan=plan_recurrent):
    return form.gated_delta(inputs, weights, shape, states, plan(batch))
