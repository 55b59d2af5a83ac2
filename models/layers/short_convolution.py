"""Short convolutions: as data, their weights, their division, and made of them.

LFM2 (Liquid AI, 2025) has them in place of attention: a convolution over a few tokens, between two
gates that a token sets itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tokenpod.kernels.cache.state_pool import StateLayout
from tokenpod.models.layers.layer_tensors import LayerTensors
from tokenpod.models.layers.mixer import Cache, MixerParts
from tokenpod.models.layers.normed import normed_product
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.recurrent import RecurrentMixer, states_of
from tokenpod.models.layers.step import Step
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division, Weight


@dataclass(frozen=True, slots=True)
class ShortConvolution(RecurrentMixer):
    """A mixer that sees a few tokens back."""

    channels: int
    #: Tokens that it sees, a token itself included.
    width: int
    #: Of both products and of the convolution.
    bias: bool = False

    @property
    def heads(self) -> int:
        """It has none: as one."""
        return 1

    @property
    def cache(self) -> Cache:
        """The last inputs, and no memory."""
        return Cache(None, None, StateLayout((self.channels, self.width), (0,), beside=0))

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """One product of all that a token says, the convolution, and `output`."""
        names, hidden = tensors.names.short, tensors.hidden
        channels = Axis(self.channels, Division.EVEN)
        parts = (channels,) * 3
        yield Weight(
            "short_in", tensors.cut(f"{names.inputs}.weight", parts, hidden), multiplied=True
        )
        if self.bias:
            yield Weight("short_in_bias", tensors.cut(f"{names.inputs}.bias", parts))
        yield tensors.single("conv", f"{names.conv}.weight", channels, Axis(1), Axis(self.width))
        if self.bias:
            yield tensors.single("conv_bias", f"{names.conv}.bias", channels)
        yield from tensors.product("output", names.output, hidden, channels, self.bias)

    def problem(self, world: int) -> str | None:
        """Ranks divide channels."""
        if self.channels % world:
            return f"{self.channels} channels can't be divided among {world} ranks"
        return None

    def on_rank(self, shard: Shard) -> ShortConvolution:
        """With a rank's channels."""
        return replace(self, channels=self.channels // shard.world)

    def make(self, parts: MixerParts, norm: Norm | None) -> ShortConvolutionLayer:
        """With the layer's weights."""
        return ShortConvolutionLayer(self, parts, norm)


class ShortConvolutionLayer:
    """One layer's convolution: from the stream to what it says, [T, channels]."""

    def __init__(self, spec: ShortConvolution, parts: MixerParts, norm: Norm | None) -> None:
        products = parts.products
        self._ops, self._cache = products.ops, parts.state
        self._in = normed_product(
            products, parts.named("short_in"), norm, parts.named("attention_in")
        )
        self._weight = products.tensor(parts.named("conv"))[:, 0].contiguous()
        self._bias = products.optional(parts.named("conv_bias"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The states of the step's rows have gone on afterwards."""
        states, plan = states_of(step, self._cache)
        said = self._in(x, step.batch)
        return self._ops.short_convolution(said, self._weight, self._bias, states, plan)
