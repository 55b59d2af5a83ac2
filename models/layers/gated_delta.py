"""Gated delta nets: as data, their weights, their division, and made of them.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, as Qwen3.5 has them: a convolution of
queries, keys and values, a memory of each head that tokens read and correct, and a gated norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tokenpod.kernels.cache.state_pool import StateLayout
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaInputs,
    DeltaWeights,
    MemoryShape,
)
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layers.layer_tensors import LayerTensors
from tokenpod.models.layers.mixer import Cache, MixerParts
from tokenpod.models.layers.normed import normed_product
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.recurrent import RecurrentMixer, states_of
from tokenpod.models.layers.step import Step
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division, Weight


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(RecurrentMixer):
    """A mixer whose memory is as large whatever the text's length."""

    shape: MemoryShape
    #: Of the norm of what each head reads.
    epsilon: float

    def __post_init__(self) -> None:
        """Raise ModelError for heads that can't be."""
        shape = self.shape
        if shape.value_heads % shape.key_heads:
            raise ModelError(
                f"gated delta net: {shape.value_heads} value heads can't share"
                f" {shape.key_heads} key heads"
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
        # Besides its inputs a token says of each head what is written, and the decay.
        layout = StateLayout((shape.channels, shape.width), memory, beside=2 * shape.value_heads)
        return Cache(None, None, layout)

    @property
    def _axes(self) -> tuple[Axis, Axis, Axis]:
        """Of keys, of values, and of numbers that each value head has one of."""
        shape = self.shape
        return (
            Axis(shape.key_heads * shape.key_dim, Division.EVEN, unit=shape.key_dim),
            Axis(shape.value_heads * shape.value_dim, Division.EVEN, unit=shape.value_dim),
            Axis(shape.value_heads, Division.EVEN),
        )

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """One product of all that a token says, the convolution, decays, the norm, and `output`."""
        names, hidden = tensors.names.delta, tensors.hidden
        keys, values, each = self._axes
        if names.by_heads is None:
            others = ((names.gate, values), (names.write, each), (names.decay, each))
            rest = (tensors.source(stored, axis, hidden, None) for stored, axis in others)
            sources = (*tensors.cut(f"{names.qkv}.weight", (keys, keys, values), hidden), *rest)
        else:
            most, scalars = names.by_heads
            heads = self.shape.key_heads
            sources = (
                *tensors.cut(f"{most}.weight", (keys, keys, values, values), hidden, groups=heads),
                *tensors.cut(f"{scalars}.weight", (each, each), hidden, groups=heads),
            )
        yield Weight("delta_in", sources, multiplied=True)
        width = Axis(1), Axis(self.shape.width)
        yield Weight("conv", tensors.cut(f"{names.conv}.weight", (keys, keys, values), *width))
        yield replace(tensors.single("log_rate", names.log_rate, each), dtype=torch.float32)
        yield replace(tensors.single("shift", names.shift, each), dtype=torch.float32)
        norm = Norm("rms", self.epsilon)
        yield from tensors.norm("delta_norm", norm, names.norm, Axis(self.shape.value_dim))
        yield from tensors.product("output", names.output, tensors.hidden, values, False)

    def problem(self, world: int) -> str | None:
        """Ranks divide heads of keys, and those of values with them."""
        if self.shape.key_heads % world:
            return f"{self.shape.key_heads} key heads can't be divided among {world} ranks"
        return None

    def on_rank(self, shard: Shard) -> GatedDeltaNet:
        """With a rank's heads."""
        shape, world = self.shape, shard.world
        own = shape._replace(
            key_heads=shape.key_heads // world, value_heads=shape.value_heads // world
        )
        return replace(self, shape=own)

    def make(self, parts: MixerParts, norm: Norm | None) -> GatedDeltaLayer:
        """With the layer's weights."""
        return GatedDeltaLayer(self, parts, norm)


class GatedDeltaLayer:
    """One layer's net: from the stream to what its heads read, normed and gated, [T, H · D]."""

    def __init__(self, spec: GatedDeltaNet, parts: MixerParts, norm: Norm | None) -> None:
        products, shape = parts.products, spec.shape
        self._ops, self._shape, self._cache = products.ops, shape, parts.state
        self._in = normed_product(
            products, parts.named("delta_in"), norm, parts.named("attention_in")
        )
        values = shape.value_heads * shape.value_dim
        self._parts = [shape.channels, values, shape.value_heads, shape.value_heads]
        conv = products.tensor(parts.named("conv"))[:, 0].contiguous()
        log_rate, shift, scale = (
            products.tensor(parts.named(name)) for name in ("log_rate", "shift", "delta_norm")
        )
        self._weights = DeltaWeights(conv, log_rate, shift, RowNorm(scale, spec.epsilon))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The states of the step's rows have gone on afterwards."""
        states, plan = states_of(step, self._cache)
        inputs = DeltaInputs(*torch.split(self._in(x, step.batch), self._parts, dim=1))
        return self._ops.gated_delta(inputs, self._weights, self._shape, states, plan)
