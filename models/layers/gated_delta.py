"""Gated delta nets: as data, their weights, their division, and made of them.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, as Qwen3.5 has them: a convolution of
queries, keys and values, a memory of each head that tokens read and correct, and a gated norm. In
Kimi Linear (Kimi Team, 2025) each number of a key decays by itself.
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
from tokenpod.models.layers.linear import Product
from tokenpod.models.layers.mixer import Cache, MixerParts
from tokenpod.models.layers.normed import normed_product
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.recurrent import RecurrentMixer, states_of
from tokenpod.models.layers.step import Step
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division, Source, Weight


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(RecurrentMixer):
    """A mixer whose memory is as large whatever the text's length."""

    shape: MemoryShape
    #: Of the norm of what each head reads.
    epsilon: float
    #: Gates, and decays of each number of a key, are made in two products, by way of so many
    #: numbers, and gates open by sigmoid (Kimi Linear). None: a head has one decay.
    gate_rank: int | None = None

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
        # Besides its inputs a token says of each head what is written, and its decays.
        beside = shape.value_heads * (1 + self._decays)
        layout = StateLayout((shape.channels, shape.width), memory, beside)
        return Cache(None, None, layout)

    @property
    def _decays(self) -> int:
        """Of each value head."""
        return 1 if self.gate_rank is None else self.shape.key_dim

    @property
    def _axes(self) -> tuple[Axis, Axis, Axis, Axis]:
        """Of keys, values, numbers that each value head has one of, and decays."""
        shape, decays = self.shape, self._decays
        return (
            Axis(shape.key_heads * shape.key_dim, Division.EVEN, unit=shape.key_dim),
            Axis(shape.value_heads * shape.value_dim, Division.EVEN, unit=shape.value_dim),
            Axis(shape.value_heads, Division.EVEN),
            Axis(shape.value_heads * decays, Division.EVEN, unit=decays),
        )

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """Products of what a token says, the convolution, decays, the norm, and `output`."""
        names, hidden = tensors.names.delta, tensors.hidden
        keys, values, each, decays = self._axes
        if self.gate_rank is not None:
            rank, (gate, decay) = Axis(self.gate_rank), (names.gate_rank, names.decay_rank)
            apart = zip(names.apart, (keys, keys, values), strict=True)
            others = ((names.write, each), (gate, rank), (decay, rank))
            said = ((f"{stored}_proj", axis) for stored, axis in apart)
            sources = tuple(
                tensors.source(stored, axis, hidden, None) for stored, axis in (*said, *others)
            )
            yield from tensors.product("delta_gate", names.gate, values, rank, False)
            yield from tensors.product("delta_decay", names.decay, decays, rank, False)
        elif names.by_heads is None:
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
        channels = keys, keys, values
        rates: tuple[Axis, ...] = (each,)
        convolutions = tensors.cut(f"{names.conv}.weight", channels, *width)
        if self.gate_rank is not None:
            # Whole on every rank, which takes its own.
            rates = (Axis(1), Axis(1), Axis(each.length), Axis(1))
            apart = zip(names.apart, channels, strict=True)
            convolutions = tuple(
                Source(f"{tensors.at}{stored}_conv1d.weight", (axis, *width))
                for stored, axis in apart
            )
        yield Weight("conv", convolutions)
        yield replace(tensors.single("log_rate", names.log_rate, *rates), dtype=torch.float32)
        yield replace(tensors.single("shift", names.shift, decays), dtype=torch.float32)
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
        heads, rank = shape.value_heads, spec.gate_rank
        self._parts = [shape.channels, shape.values, heads, heads]
        #: Gates and decays of what the first product says of them; none: that is what they are.
        self._second: list[Product] = []
        if rank is not None:
            self._parts = [shape.channels, heads, rank, rank]
            self._second = [products.linear(parts.named(f"delta_{x}")) for x in ("gate", "decay")]
        conv = products.tensor(parts.named("conv"))[:, 0].contiguous()
        log_rate, shift, scale = (
            products.tensor(parts.named(name)) for name in ("log_rate", "shift", "delta_norm")
        )
        log_rate, group = log_rate.flatten(), products.ops.group
        if rank is not None and group is not None:
            own = Shard(group.rank, group.world).part(Axis(len(log_rate), Division.EVEN))
            log_rate = log_rate[own.start : own.stop].clone()
        norm_rows = RowNorm(scale, spec.epsilon)
        self._weights = DeltaWeights(
            conv, log_rate, shift, norm_rows, sigmoid_gate=rank is not None
        )

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The states of the step's rows have gone on afterwards."""
        states, plan = states_of(step, self._cache)
        said = torch.split(self._in(x, step.batch), self._parts, dim=1)
        if self._second:
            mixed, write, *inner = said
            gate, decay = (
                product(part.contiguous(), step.batch)
                for product, part in zip(self._second, inner, strict=True)
            )
            said = mixed, gate, write, decay
        return self._ops.gated_delta(DeltaInputs(*said), self._weights, self._shape, states, plan)
