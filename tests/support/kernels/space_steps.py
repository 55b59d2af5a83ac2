"""Random inputs, weights and states of state spaces and of short convolutions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from support.kernels.delta_steps import drawn_states
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.operations.recurrent_ops import (
    MemoryShape,
    RecurrentStates,
    SpaceInputs,
    SpaceWeights,
)
from tokenpod.models.layers.state_space import StateSpace

SMALL = MemoryShape(key_heads=2, value_heads=4, key_dim=8, value_dim=12, width=4)
EPSILON = 1e-5
#: How what is found is normed: by groups, over all behind the gate or before it, or not at all.
NORMS = {
    "groups": {"norm_groups": 2},
    "first": {"norm_groups": 1, "norm_first": True},
    "none": {"norm": None},
}


def drawn_space(
    shape: MemoryShape, dtype=torch.float32, device="cpu", *, bias=True, norm="groups"
) -> SpaceWeights:
    generator = torch.Generator(device).manual_seed(1)

    def draw(*sizes):
        return torch.randn(sizes, generator=generator, device=device)

    conv, conv_bias = (draw(shape.channels, shape.width) / 2).to(dtype), draw(shape.channels)
    rates, shifts, skips = draw(3, shape.value_heads)
    scale = RowNorm((1 + draw(shape.values) / 4).to(dtype), EPSILON)
    made = SpaceWeights(conv, conv_bias.to(dtype) if bias else None, rates, shifts, skips, scale)
    return made._replace(**NORMS[norm])


def space_inputs(shape: MemoryShape, tokens: int, dtype=torch.float32, device="cpu"):
    """Parts of one tensor, as products leave them."""
    generator = torch.Generator(device).manual_seed(tokens)
    sizes = [shape.channels, shape.values, shape.value_heads]
    drawn = torch.randn((tokens, sum(sizes)), generator=generator, device=device)
    return SpaceInputs(*torch.split(drawn.to(dtype), sizes, dim=1))


class SpaceNet:
    """A state space in one of its forms, for `delta_steps.walk`."""

    def __init__(self, form, shape, device="cpu", norm="groups"):
        self.form, self.shape, self.device = form, shape, device
        self.weights = drawn_space(shape, device=device, norm=norm)
        self.layout = StateSpace(shape, EPSILON).cache.state

    def inputs(self, tokens):
        return space_inputs(self.shape, tokens, device=self.device)

    def run(self, given, states, plan):
        return self.form.state_space(given, self.weights, self.shape, states, plan)


class Convolution(NamedTuple):
    """A short convolution's weights."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def drawn_convolution(
    channels: int, width: int, dtype=torch.float32, device="cpu", *, bias=True
) -> Convolution:
    generator = torch.Generator(device).manual_seed(1)
    weight = torch.randn((channels, width), generator=generator, device=device).to(dtype)
    added = torch.randn(channels, generator=generator, device=device).to(dtype)
    return Convolution(weight, added if bias else None)


def convolution_inputs(channels: int, tokens: int, dtype=torch.float32, device="cpu"):
    generator = torch.Generator(device).manual_seed(tokens)
    return torch.randn((tokens, 3 * channels), generator=generator, device=device).to(dtype)


def convolution_states(
    channels: int, width: int, batch: ForwardBatch, dtype=torch.float32
) -> RecurrentStates:
    """As `drawn_states`, without memories."""
    shape = MemoryShape(1, 0, 0, 0, width)
    states = drawn_states(shape._replace(key_dim=channels // 2), batch, dtype)
    return states._replace(memory=states.memory[:, :, :0, :0])
