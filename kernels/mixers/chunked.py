"""Rows through memories by products: rows of one token together, others in chunks of their own.

What gated delta nets and state spaces have in common, drafts and what is behind them included; each
says by a `Net` what it makes of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from tokenpod.kernels.mixers.convolution import (
    batch_of,
    convolve_rows,
    convolve_run,
    convolve_seen,
    has_drafts,
    keep_run,
)
from tokenpod.kernels.operations.recurrent_ops import MemoryShape, RecurrentPlan, RecurrentStates

#: Tokens of a chunk.
CHUNK = 64
#: Numbers of memories that rows of one token copy at a time.
AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class Net:
    """Of one layer; n are tokens, H its value heads, and memories [H, key_dim, value_dim]."""

    shape: MemoryShape
    conv: torch.Tensor
    bias: torch.Tensor | None
    #: What tokens say besides inputs [n, numbers] -> logarithms of what is kept of memories [n, H,
    #: decays], and how much is written [n, H]; both float32.
    gates: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    #: One token of each row: what is convolved [n, channels], what is kept, how much is written,
    #: and memories [n, ...], which go on -> what heads find [n, H, value_dim].
    singles: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    #: At most CHUNK tokens of one row: the same, of logarithms of what is kept, and one memory.
    chunk: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def chunks(
        self, made: torch.Tensor, falls: torch.Tensor, written: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """Any number of tokens of one row -> [n, H, value_dim] float32; its memory goes on."""
        some = (slice(at, at + CHUNK) for at in range(0, len(made), CHUNK))
        return torch.cat([self.chunk(made[x], falls[x], written[x], memory) for x in some])


def go_through(
    net: Net,
    mixed: torch.Tensor,
    said: torch.Tensor,
    states: RecurrentStates,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """What heads find of inputs [T, channels] and what is said besides: [T, H, value_dim]."""
    batch, shape = batch_of(plan), net.shape
    out = mixed.new_empty((len(mixed), shape.value_heads, shape.value_dim))
    falls, written = net.gates(said)
    inputs, beside = states.inputs.tensor_split([shape.channels], dim=1)
    keeps = states.takes_back(shape.width)
    for i, state in enumerate(batch.b_row) if keeps else ():
        tokens = batch.b_start[i + 1] - batch.b_start[i]
        _catch_up(net, batch.b_context[i] - tokens, state, states)
    many = max(AT_ONCE // states.memory[0].numel(), 1)
    rows, contexts = (
        torch.tensor(each[: batch.single_rows], device=mixed.device)
        for each in (batch.b_row, batch.b_context)
    )
    for first in range(0, batch.single_rows, many):
        own = slice(first, min(first + many, batch.single_rows))
        row, positions = rows[own], contexts[own] - 1
        made = convolve_rows(mixed[own], row, positions, net.conv, net.bias, inputs)
        if keeps:
            beside[row, :, positions % states.ring] = said[own]
        # Where the memory has been through the position, nothing decays and nothing is written.
        fresh = (positions >= states.seen[row, 0])[:, None]
        kept, memory = (falls[own] * fresh[:, None]).exp(), states.memory.index_select(0, row)
        found = net.singles(_rounded(made, mixed), kept, written[own] * fresh, memory)
        out[own] = found.to(out.dtype)
        states.memory.index_copy_(0, row, memory)
        states.seen[row] = positions.int()[:, None] + 1
    for i in range(batch.single_rows, batch.rows):
        own = slice(batch.b_start[i], batch.b_start[i + 1])
        state, end = batch.b_row[i], batch.b_context[i]
        made = convolve_run(mixed[own], inputs[state], end, net.conv, net.bias)
        if keeps:
            keep_run(said[own], beside[state], end)
        memory, drafts = states.memory[state], has_drafts(batch, i)
        if drafts:
            memory = memory.clone()
        known = max(int(states.seen[state, 0]) - (end - len(made)), 0)
        falls[own][:known], written[own][:known] = 0, 0
        found = net.chunks(_rounded(made, mixed), falls[own], written[own], memory)
        out[own] = found.to(out.dtype)
        if not drafts:
            states.seen[state] = end
    return out


def _catch_up(net: Net, first: int, state: int, states: RecurrentStates) -> None:
    """Let a memory go through the positions before `first` that it has not been through."""
    width, channels = net.shape.width, net.shape.channels
    seen = states.known(state, first, width)
    if seen >= first:
        return
    ring = states.inputs[state]
    window = ring[:, torch.arange(seen - width + 1, first, device=ring.device) % states.ring]
    made = convolve_seen(window[:channels], net.conv, net.bias)
    gates = net.gates(window[channels:, width - 1 :].T)
    net.chunks(_rounded(made, ring), *gates, states.memory[state])
    states.seen[state] = first


def _rounded(made: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """What is convolved, activated, and rounded as inputs are."""
    return functional.silu(made).to(inputs.dtype)
