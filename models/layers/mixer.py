"""The interface of what mixes a token with those before it: attention, or another kind.

A kind is a class of data that says what it keeps of a sequence, what its weights are, how ranks
divide it, and which operations compute it. Nothing else of a model knows which kinds there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tokenpod.core.model_size import Expansion
from tokenpod.kernels.cache.kv_pool import KVLayout
from tokenpod.kernels.cache.state_pool import StateLayout
from tokenpod.kernels.operations.attention_ops import Heads
from tokenpod.kernels.operations.batch import ForwardBatch, MixerPlan, TileKind
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.layers.layer_tensors import LayerTensors
from tokenpod.models.layers.linear import Products
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.positions import Alibi, Rope
from tokenpod.models.layers.step import Step
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Weight


class Cache(NamedTuple):
    """What a layer keeps of a sequence."""

    #: Of each token, in its slot of the pool; None: nothing.
    kv: KVLayout | None
    #: So many of the last tokens are read again; None: all.
    window: int | None
    #: Of the row, whatever its length; None: nothing.
    state: StateLayout | None = None


class Turned(NamedTuple):
    """What is rotated: by which angles, and how many numbers a head of it has."""

    positions: Rope | Alibi | None
    dim: int


@dataclass(frozen=True, slots=True)
class MixerParts:
    """What a mixer of one layer is made of."""

    products: Products
    #: Its weights begin with it, and a dot.
    layer: int
    #: Which of the pool's caches of keys and values it reads, if one.
    cache: int
    #: Which of the pool's states it has, if one.
    state: int
    #: Which of the step's rotations turns it, if one does.
    rotation: int
    #: Of a second mixer of the layer: what its weights' names begin with behind the layer's.
    beside: str = ""

    def named(self, weight: str) -> str:
        """The name of one of the layer's weights."""
        return f"{self.layer}.{self.beside}{weight}"


class Mix(Protocol):
    """A mixer with its weights."""

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The stream [T, hidden] -> what the product reads that ends in the stream."""
        ...


class Mixer(Protocol):
    """What mixes tokens, as data; it can be hashed."""

    @property
    def heads(self) -> int:
        """Query heads."""
        ...

    @property
    def cache(self) -> Cache:
        """What is kept of a sequence."""
        ...

    @property
    def reads_layer(self) -> int | None:
        """The number of the layer whose cache it reads, and does not write; None: its own."""
        ...

    @property
    def turned(self) -> Turned | None:
        """What positions do to queries and keys; None: nothing is turned."""
        ...

    @property
    def expansion(self) -> Expansion | None:
        """What is made of the cache of long rows, for some heads at a time; None: nothing is."""
        ...

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """Its weights, up to and including the product that ends in the stream, `output`."""
        ...

    def idle_names(self, tensors: LayerTensors) -> tuple[str, ...]:
        """Beginnings of names of the layer's tensors that may be there, and are not read."""
        ...

    def problem(self, world: int) -> str | None:
        """Why so many ranks can't divide it, as the beginning of a sentence."""
        ...

    def on_rank(self, shard: Shard) -> Mixer:
        """A rank's part."""
        ...

    @property
    def plan_key(self) -> Hashable:
        """Mixers of equal keys share one plan of a step."""
        ...

    def plan(self, ops: Operations, batch: ForwardBatch) -> MixerPlan:
        """What all layers of this kind share of a step."""
        ...

    def captured(self, dtype: torch.dtype, device: torch.device) -> Heads | TileKind | None:
        """What captured steps must know to describe rows of several tokens; None: nothing."""
        ...

    def make(self, parts: MixerParts, norm: Norm | None) -> Mix:
        """With its weights, behind the norm `attention_in` of the stream."""
        ...
