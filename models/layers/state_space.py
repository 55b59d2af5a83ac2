"""State spaces (Mamba-2): as data, their weights, their division, and made of them.

Dao and Gu, "Transformers are SSMs", 2024, as Granite 4, Nemotron-H and Falcon-H1 have them: a
convolution of queries (C), keys (B) and values (x), a memory of each head that decays and that
tokens write, and a gate and a norm over groups of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tokenpod.kernels.cache.state_pool import StateLayout
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.operations.recurrent_ops import (
    MemoryShape,
    SpaceInputs,
    SpaceWeights,
)
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layers.layer_tensors import LayerTensors, times
from tokenpod.models.layers.mixer import Cache, MixerParts
from tokenpod.models.layers.normed import normed_product
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.recurrent import RecurrentMixer, states_of
from tokenpod.models.layers.step import Step
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division, Source, Weight


class Multipliers(NamedTuple):
    """Of parts of the product of the stream, and of what the mixer adds to it (Falcon-H1)."""

    gate: float = 1.0
    values: float = 1.0
    keys: float = 1.0
    queries: float = 1.0
    steps: float = 1.0
    output: float = 1.0


UNSCALED = Multipliers()


@dataclass(frozen=True, slots=True)
class StateSpace(RecurrentMixer):
    """A mixer whose memory is as large whatever the text's length."""

    shape: MemoryShape
    #: Of the norm of what is found; None: it is only gated.
    epsilon: float | None
    #: What is found is normed over so many equal parts.
    norm_groups: int = 1
    #: What is found is normed, then gated.
    norm_first: bool = False
    #: The norm goes over what all ranks find.
    norm_shared: bool = False
    conv_bias: bool = True
    #: Of both products.
    bias: bool = False
    multipliers: Multipliers = UNSCALED

    def __post_init__(self) -> None:
        """Raise ModelError for heads that can't be."""
        shape = self.shape
        if shape.value_heads % shape.key_heads:
            raise ModelError(
                f"state space: {shape.value_heads} heads can't share {shape.key_heads} groups"
            )
        if shape.values % self.norm_groups:
            raise ModelError(
                f"state space: {shape.values} values can't be normed in {self.norm_groups} groups"
            )

    @property
    def heads(self) -> int:
        """Heads of values."""
        return self.shape.value_heads

    @property
    def cache(self) -> Cache:
        """Nothing of a token: the convolution's last inputs, and a memory of each head."""
        shape = self.shape
        memory = (shape.value_heads, shape.key_dim, shape.value_dim)
        layout = StateLayout((shape.channels, shape.width), memory, beside=shape.value_heads)
        return Cache(None, None, layout)

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """One product of all that a token says, the convolution, rates, the norm, and `output`."""
        names, hidden, shape = tensors.names.space, tensors.hidden, self.shape
        keys = Axis(shape.key_heads * shape.key_dim, Division.KEY, unit=shape.key_dim)
        values = Axis(shape.values, Division.EVEN, unit=shape.value_dim)
        each = Axis(shape.value_heads, Division.EVEN)
        said, taps = (values, values, keys, keys, each), (Axis(1), Axis(shape.width))
        yield Weight("space_in", self._said(tensors, said, hidden), multiplied=True)
        if self.bias:
            yield Weight("space_in_bias", self._said(tensors, said))
        x, b, c = tensors.cut(f"{names.conv}.weight", (values, keys, keys), *taps)
        yield Weight("conv", (c, b, x))
        if self.conv_bias:
            x, b, c = tensors.cut(f"{names.conv}.bias", (values, keys, keys))
            yield Weight("conv_bias", (c, b, x))
        for name in ("log_rate", "shift", "skip"):
            weight = tensors.single(name, getattr(names, name), each)
            yield replace(weight, dtype=torch.float32)
        if self.epsilon is not None:
            yield from tensors.norm("space_norm", Norm("rms", self.epsilon), names.norm, values)
        output = names.output, hidden, values
        yield from tensors.product("output", *output, self.bias, self.multipliers.output)

    def _said(
        self, tensors: LayerTensors, parts: tuple[Axis, ...], *inputs: Axis
    ) -> tuple[Source, ...]:
        """The first product's weight, or without `inputs` its bias, in the order of `SpaceInputs`.

        The checkpoint has gates, values, keys, queries and steps.
        """
        stored, by = tensors.names.space.inputs, self.multipliers
        ending = "weight" if inputs else "bias"
        gate, x, b, c, steps = tensors.cut(f"{stored}.{ending}", parts, *inputs)
        return (
            times(c, by.queries),
            times(b, by.keys),
            times(x, by.values),
            times(gate, by.gate),
            times(steps, by.steps),
        )

    def problem(self, world: int) -> str | None:
        """Ranks divide heads, and groups of keys or those among them."""
        heads, groups = self.shape.value_heads, self.shape.key_heads
        if heads % world:
            return f"{heads} heads of a state space can't be divided among {world} ranks"
        if groups % world and world % groups:
            return (
                f"{groups} groups of a state space can't be divided among {world} ranks, "
                f"nor {world} ranks among them"
            )
        if self._shares_norm(world) and (self.norm_first or self.norm_groups > 1):
            return f"{self.norm_groups} groups of a norm can't be divided among {world} ranks"
        return None

    def _shares_norm(self, world: int) -> bool:
        return self.epsilon is not None and self.norm_groups % world != 0

    def on_rank(self, shard: Shard) -> StateSpace:
        """With a rank's heads."""
        shape, world = self.shape, shard.world
        own = shape._replace(
            key_heads=max(shape.key_heads // world, 1), value_heads=shape.value_heads // world
        )
        shared = self._shares_norm(world)
        groups = 1 if shared or self.epsilon is None else self.norm_groups // world
        return replace(self, shape=own, norm_groups=groups, norm_shared=shared)

    def make(self, parts: MixerParts, norm: Norm | None) -> StateSpaceLayer:
        """With the layer's weights."""
        return StateSpaceLayer(self, parts, norm)


class StateSpaceLayer:
    """One layer's state space: from the stream to what its heads find, [T, H · D]."""

    def __init__(self, spec: StateSpace, parts: MixerParts, norm: Norm | None) -> None:
        products, shape = parts.products, spec.shape
        self._ops, self._shape, self._cache = products.ops, shape, parts.state
        self._in = normed_product(
            products, parts.named("space_in"), norm, parts.named("attention_in")
        )
        self._parts = [shape.channels, shape.values, shape.value_heads]
        conv = products.tensor(parts.named("conv"))[:, 0].contiguous()
        bias = products.optional(parts.named("conv_bias"))
        rate, shift, skip = (
            products.tensor(parts.named(name)) for name in ("log_rate", "shift", "skip")
        )
        row_norm, self._after = None, None
        if spec.epsilon is not None:
            row_norm = RowNorm(products.tensor(parts.named("space_norm")), spec.epsilon)
            if spec.norm_shared:
                assert products.ops.group is not None, "several ranks have a group"
                self._after, row_norm = SharedNorm(row_norm, products.ops.group), None
        self._weights = SpaceWeights(
            conv, bias, rate, shift, skip, row_norm, spec.norm_groups, spec.norm_first
        )

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The states of the step's rows have gone on afterwards."""
        states, plan = states_of(step, self._cache)
        inputs = SpaceInputs(*torch.split(self._in(x, step.batch), self._parts, dim=1))
        found = self._ops.state_space(inputs, self._weights, self._shape, states, plan)
        return found if self._after is None else self._after(found)


@dataclass(frozen=True, slots=True)
class SharedNorm:
    """An rms norm over what all ranks have, of which `norm` has the weights of this one's."""

    norm: RowNorm
    group: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n] -> [T, n]; ranks call it together."""
        wide = x.float()
        squares = wide.square().mean(-1, keepdim=True)
        self.group.sum(squares)
        scale = torch.rsqrt(squares / self.group.world + self.norm.epsilon)
        return (wide * scale).to(x.dtype) * self.norm.weight
