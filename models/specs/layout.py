"""A checkpoint's model, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tokenpod.models.checkpoints.checkpoint import Checkpoint, WeightReader, tensors_of
from tokenpod.models.specs.pooling_spec import PoolingSpec
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names
from tokenpod.models.weights.shard import WHOLE
from tokenpod.models.weights.weights import HEAD, Weight


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint's model, and the tensors that it is made of."""

    spec: ModelSpec
    weights: list[Weight]
    #: Of scales that the checkpoint may have, of each layer's keys, and values.
    scales: list[list[str]]
    #: Where its tensors lie.
    names: Names
    prefix: str
    #: Of weights that are quantised; None: none are.
    reader: WeightReader | None = None
    #: How many tensors belong to each other part of the checkpoint, which is not served.
    unused: Mapping[str, int] = field(default_factory=dict)
    #: How vectors of texts are made; None: the model generates.
    pooling: PoolingSpec | None = None

    @property
    def parameters(self) -> int:
        """Numbers of the whole model; a head that is the embedding does not count again."""
        tied = self.spec.head.tied
        return WHOLE.numbers(x for x in self.weights if not (tied and x.name == HEAD))


def stored_table(
    checkpoint: Checkpoint | None,
    layouts: list[tuple[Names, list[Weight]]],
    reader: WeightReader | None,
    *,
    packed: bool,
) -> tuple[Names, list[Weight]]:
    """The layout of which a checkpoint has all tensors; otherwise the first that is `packed`.

    Where several have the same names, it is the first of the same shapes.
    """
    declared = [
        {name: each for weight in weights for name, each in tensors_of(weight, reader).items()}
        for _, weights in layouts
    ]
    whole = [
        (pair, tensors)
        for pair, tensors in zip(layouts, declared, strict=True)
        if checkpoint and all(name in checkpoint for name in tensors)
    ]
    for pair, tensors in whole:
        assert checkpoint is not None
        if all(checkpoint.shape(name) in each.shapes for name, each in tensors.items()):
            return pair
    if whole:
        return whole[0][0]
    alike = (pair for pair in layouts if any(weight.packed for weight in pair[1]) == packed)
    return next(alike, layouts[0])


def embedding_of(weights: list[Weight]) -> str:
    """The name of the embedding's tensor."""
    return next(weight for weight in weights if weight.name == "embedding").sources[0].name


def heads_named(pooling: PoolingSpec, name: str) -> PoolingSpec:
    """The same, where rows of the tensor `name` stand for layers without a name of their own."""
    stem = name.removesuffix(".weight")
    layers = (replace(layer, name=layer.name or stem) for layer in pooling.layers)
    return replace(pooling, layers=tuple(layers))


def with_head(weights: list[Weight]) -> list[Weight]:
    """The same with a head of its own that is made of the embedding's tensor."""
    embedding = next(weight for weight in weights if weight.name == "embedding")
    return [*weights, replace(embedding, name=HEAD)]
