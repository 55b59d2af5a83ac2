"""Weights as data: our name, the checkpoint's, how they are merged and how ranks share them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter

from tokenpod.models.config import DecoderConfig


class Dim(Enum):
    """An axis of a tensor, named by the path in the config to its length."""

    VOCABULARY = "vocab_size"
    HIDDEN = "hidden_size"
    INTERMEDIATE = "intermediate_size"
    QUERY = "query_width"
    KEY = "key_width"
    HEAD = "head_dim"
    EXPERTS = "experts.count"
    EXPERT_INTERMEDIATE = "experts.intermediate_size"

    def length(self, config: DecoderConfig) -> int:
        """Its length in a model."""
        length: int = attrgetter(self.value)(config)
        return length


class Split(Enum):
    """Which axis of each source tensor parallel ranks divide among themselves."""

    #: None: every rank has all of it.
    WHOLE = None
    #: The output features, or an embedding's tokens: each rank computes some.
    OUTPUT = 0
    #: The input features: ranks' results are summed.
    INPUT = 1


class Merge(Enum):
    """How several sources become one tensor."""

    #: One after the other along the output features, so that one product computes them all.
    STACK = "stack"


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint; `{i}` in its name is the layer, `{e}` the expert."""

    name: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the decoder; `{i}` in its name is the layer.

    With `experts`, every source is there for each of so many: the tensor is [experts, out, in].
    """

    name: str
    sources: tuple[Source, ...]
    split: Split = Split.WHOLE
    merge: Merge = Merge.STACK
    #: The layers that have one, if it is not all of them.
    layers: frozenset[int] | None = None
    experts: int | None = None

    @property
    def per_layer(self) -> bool:
        """Layers have one each."""
        return "{i}" in self.name

    def of_layer(self, layer: int) -> Weight:
        """The same with the layer's number filled in, and the experts' in sources."""
        sources = tuple(
            Source(source.name.format(i=layer, e=expert), source.shape)
            for expert in range(self.experts or 1)
            for source in self.sources
        )
        return replace(self, name=self.name.format(i=layer), sources=sources)


def expand(table: tuple[Weight, ...], layers: int) -> list[Weight]:
    """The table with every layer's weights written out, layer by layer."""
    shared = [weight for weight in table if not weight.per_layer]
    layered = [weight for weight in table if weight.per_layer]
    return shared + [
        weight.of_layer(layer)
        for layer in range(layers)
        for weight in layered
        if weight.layers is None or layer in weight.layers
    ]
