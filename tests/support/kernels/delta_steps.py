"""Random inputs, weights and states of a gated delta net."""

from __future__ import annotations

import sys
from dataclasses import replace

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
from tokenpod.models.layers.gated_delta import GatedDeltaNet

SMALL = MemoryShape(key_heads=2, value_heads=4, key_dim=8, value_dim=12, width=4)
#: Each key head has one value head, and each number of a key a decay of its own.
KIMI = MemoryShape(key_heads=3, value_heads=3, key_dim=8, value_dim=12, width=4)
EPSILON = 1e-5


def decays_of(shape: MemoryShape) -> int:
    """Of each head: where each key head has one value head, as many as a key has numbers."""
    return shape.key_dim if shape.key_heads == shape.value_heads else 1


def net_of(shape: MemoryShape) -> GatedDeltaNet:
    return GatedDeltaNet(shape, EPSILON, gate_rank=None if decays_of(shape) == 1 else 4)


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
    decays = decays_of(shape)
    rates, shifts = draw(shape.value_heads), draw(shape.value_heads * decays)
    norm = (1 + draw(shape.value_dim) / 4).to(dtype)
    return DeltaWeights(conv, rates, shifts, RowNorm(norm, EPSILON), sigmoid_gate=decays > 1)


def drawn_inputs(shape: MemoryShape, tokens: int, dtype=torch.float32, device="cpu") -> DeltaInputs:
    """Parts of one tensor, as products leave them."""
    generator = torch.Generator(device).manual_seed(tokens)
    heads = shape.value_heads
    sizes = [shape.channels, heads * shape.value_dim, heads, heads * decays_of(shape)]
    drawn = torch.randn((tokens, sum(sizes)), generator=generator, device=device)
    return DeltaInputs(*torch.split(drawn.to(dtype), sizes, dim=1))


def some(inputs, first: int, end: int):
    return type(inputs)(*(x[first:end] for x in inputs))


def step_of(specs: list[Spec], device="cpu") -> ForwardBatch:
    return lay_out(specs, torch.device(device)).batch


def one_row(batch: ForwardBatch, state: int) -> ForwardBatch:
    """A step of one row, which has this state."""
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


#: How rows go on: tokens of each step, and how many of the last ones are drafts that are wrong.
WALKS = {
    "all right": [(9, 0), (4, 0), (4, 0), (4, 0)],
    "all wrong": [(9, 0), (4, 3), (4, 3), (4, 3)],
    "some right": [(2, 0), (4, 1), (3, 2), (4, 0), (2, 1), (4, 3)],
    "none for a while": [(1, 0), (4, 0), (1, 0), (1, 0), (4, 1), (1, 0)],
    "a piece of a prompt behind": [(6, 0), (4, 2), (70, 0), (4, 1), (2, 0)],
}
#: Steps of a walk have drafts from the second on, in rows of two to four tokens.
MOST_DRAFTS = 3


def with_ring(
    states: RecurrentStates, shape: MemoryShape, drafts: int, beside: int | None = None
) -> RecurrentStates:
    """The same of a pool in which drafts may be wrong: of positions before its width none.

    `beside`: numbers of a head that are kept besides; None: a delta net's.
    """
    beside = 1 + decays_of(shape) if beside is None else beside
    rows, channels, width = states.inputs.shape
    ring = width + drafts
    inputs = states.inputs.new_zeros(rows, channels + beside * shape.value_heads, ring)
    for row in range(rows):
        seen = int(states.seen[row, 0])
        for position in range(max(seen - width, 0), seen):
            inputs[row, :channels, position % ring] = states.inputs[row, :, position % width]
    return states._replace(inputs=inputs)


class Delta:
    """A gated delta net in one of its forms."""

    def __init__(self, form, shape, device="cpu"):
        self.form, self.shape, self.device = form, shape, device
        self.weights = drawn_weights(shape, device=device)
        self.layout = net_of(shape).cache.state

    def inputs(self, tokens):
        return drawn_inputs(self.shape, tokens, device=self.device)

    def run(self, given, states, plan):
        return self.form.gated_delta(given, self.weights, self.shape, states, plan)


def walk(net, steps, plan=plan_recurrent):
    """Serve one text by a `Delta`, or what is like it, with drafts and without.

    Returns for both what was found of tokens that count, and the states [as `RecurrentStates`] once
    their memories have been through all.
    """
    device, n = net.device, sum(count - wrong for count, wrong in steps)
    given, noise = (net.inputs(n + more) for more in (1, 7))

    def at(first, count, wrong):
        """Inputs from `first` on, the last ones those of tokens that never come."""
        right = some(given, first, first + count - wrong)
        other = some(noise, first, first + wrong)
        return type(given)(
            *torch.split(
                torch.cat([torch.cat(right, 1), torch.cat(other, 1)]),
                [x.shape[1] for x in right],
                1,
            )
        )

    def fresh(drafts):
        layout = net.layout.with_drafts(drafts)
        sizes = (4, *layout.inputs), (4, *layout.memory)
        inputs, memory = (torch.zeros(size, device=device) for size in sizes)
        return RecurrentStates(inputs, memory, memory[:, :, 0, 0].int())

    def served(states, steps):
        first, found = 0, []
        for i, (count, wrong) in enumerate(steps):
            drafted = states.takes_back(net.shape.width) and 0 < i < len(steps) and 1 < count <= 4
            batch = one_row(step_of([Spec(count, first + count)], device), 2)
            batch = replace(batch, b_drafts=[count - 1] if drafted else None)
            own = at(first, count, wrong)
            out = net.run(own, states, plan(batch))
            found.append(out[: count - wrong])
            first += count - wrong
        # One token more, so that nothing is left to go through.
        batch = one_row(step_of([Spec(1, first + 1)], device), 2)
        found.append(net.run(some(given, n, n + 1), states, plan(batch)))
        return torch.cat(found), states

    plain = [(count - wrong, 0) for count, wrong in steps]
    return served(fresh(MOST_DRAFTS), steps), served(fresh(0), plain)


def let_memories_come_late(monkeypatch, form, kernels) -> None:
    """Let `_catch_up` end when `step_memories` waits for what was launched before, as a GPU may.

    Args:
        form: the module that launches both.
        kernels: that of `step_memories`, interpreted.
    """
    real, late = form.catch_up, []

    def catch_up(weights, shape, states, *rest, **how):
        before = states.memory.clone()
        real(weights, shape, states, *rest, **how)
        late.append((states.memory, states.memory != before, states.memory.clone()))
        states.memory.copy_(before)

    def wait(overlap):
        if sys._getframe(1).f_code.co_name == "step_memories":
            for memory, written, after in late:
                memory[written] = after[written]
            late.clear()

    monkeypatch.setattr(form, "catch_up", catch_up)
    monkeypatch.setattr(kernels, "await_inputs", wait)


def copied(states: RecurrentStates) -> RecurrentStates:
    return RecurrentStates(*(x.clone() for x in states))


def run(form, inputs, weights, shape, states, batch, plan=plan_recurrent):
    return form.gated_delta(inputs, weights, shape, states, plan(batch))
