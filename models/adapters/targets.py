"""Which products of a model adapters can change, by the names that the base's modules have.

A family's table of weights says of each tensor of the checkpoint which rows of which product it is.
An adapter names the same modules, fused or apart, with or without the prefix: all layouts count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from tokenpod.models.families.family import Family
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.specs.weight_table import weights_of
from tokenpod.models.weights.names import head_name
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import HEAD, Division, Source, Weight

_ALIGNMENT = 16
EMBEDDING = "embedding"

_EXPERTS = "experts are adapted only if an adapter is fused into the base at load (--lora-fuse)"


@dataclass(frozen=True, slots=True)
class Place:
    """A module, or a part of it, as a part of a product."""

    #: The product's weight, by our name, and which of its sources.
    weight: str
    part: int
    source: Source


@dataclass(frozen=True, slots=True)
class Product:
    """A product that adapters can change; of a rank, its part of it."""

    name: str
    inputs: int
    #: Outputs of each part.
    rows: tuple[int, ...]
    has_bias: bool = False
    #: Whether ranks divide its inputs, and sum what each makes.
    divided: bool = False

    @property
    def outputs(self) -> int:
        """Of all parts."""
        return sum(self.rows)

    @property
    def numbers(self) -> int:
        """Numbers of each rank, those of the first factor before those of the second."""
        return aligned(len(self.rows) * self.inputs) + aligned(self.outputs)


@dataclass(frozen=True, slots=True)
class Targets:
    """What an adapter's modules are in the model."""

    architecture: str
    #: By the base's name of a module.
    places: dict[str, list[Place]] = field(default_factory=dict)
    #: The embedding and the head, to which an adapter may add factors; by the base's names.
    tables: dict[str, Weight] = field(default_factory=dict)
    #: Those of them of which it may bring its own.
    copied: dict[str, Weight] = field(default_factory=dict)
    #: Names that the checkpoint may have for them, by ours.
    stored: dict[str, list[str]] = field(default_factory=dict)
    #: Whether the base's head is its embedding.
    tied: bool = False
    #: Why a module can't be adapted.
    refused: dict[str, str] = field(default_factory=dict)


def targets_of(family: Family, spec: ModelSpec) -> Targets:
    """Of a whole model, whatever ranks divide it."""
    found = Targets(spec.architecture, tied=spec.head.tied)
    for names in family.names_of(spec):
        for prefix in family.prefixes:
            weights = weights_of(spec, names, prefix)
            for module, weight in _tables(weights, head_name(names, prefix)).items():
                found.tables.setdefault(module, weight)
                found.stored.setdefault(weight.name, []).append(weight.sources[0].name)
                if weight.name != HEAD or not spec.head.bias:
                    found.copied.setdefault(module, weight)
            own = _places(weights)
            for module, places in own.items():
                found.places.setdefault(module, places)
            for weight in weights:
                for source in weight.sources:
                    module = source.name.removesuffix(".weight")
                    if module not in own:
                        found.refused.setdefault(module, _reason(weight))
    for module in found.places:
        found.refused.pop(module, None)
    return found


def copied_shapes(weights: Iterable[Weight], shard: Shard) -> dict[str, tuple[int, ...]]:
    """Of a rank's embedding and head, by our names; a head that is the embedding has its shape."""
    found = {weight.name: weight for weight in weights if weight.name in (EMBEDDING, HEAD)}
    embedding = found[EMBEDDING]
    return {name: shard.shape(found.get(name, embedding).sources[0]) for name in (EMBEDDING, HEAD)}


def copied_numbers(weights: Iterable[Weight], shard: Shard) -> int:
    """Numbers of one adapter's embedding and head, on one rank of the model."""
    return sum(math.prod(shape) for shape in copied_shapes(weights, shard).values())


def vocabulary_products(weights: Iterable[Weight], shard: Shard) -> dict[str, Product]:
    """What adapters may add to a rank's embedding and head, by our names, as products.

    The embedding's inputs are rows of its table, of which a token has one.
    """
    shapes = copied_shapes(weights, shard)
    (rows, width), (outputs, inputs) = shapes[EMBEDDING], shapes[HEAD]
    return {EMBEDDING: Product(EMBEDDING, rows, (width,)), HEAD: Product(HEAD, inputs, (outputs,))}


def vocabulary_numbers(weights: Iterable[Weight], shard: Shard, rank: int) -> int:
    """Numbers that a slot has for both, of that rank, on one rank of the model."""
    return rank * sum(each.numbers for each in vocabulary_products(weights, shard).values())


def _tables(weights: Iterable[Weight], head: str) -> dict[str, Weight]:
    """The embedding and the head by their modules' names, where they are used as stored."""
    by_name = {weight.name: weight for weight in weights}
    embedding = by_name[EMBEDDING]
    found = {
        embedding.sources[0].name.removesuffix(".weight"): embedding,
        head: replace(by_name.get(HEAD, embedding), name=HEAD),
    }
    return {
        module: weight
        for module, weight in found.items()
        if weight.sources[0].function is None and not weight.sources[0].transposed
    }


def products_of(weights: Iterable[Weight], shard: Shard) -> list[Product]:
    """The products of a rank's decoder that can be adapted, in the model's order."""
    weights = list(weights)
    names = {weight.name for weight in weights}
    return [
        Product(
            weight.name,
            inputs=shard.length(weight.sources[0].axes[1]),
            rows=tuple(shard.length(source.axes[0]) for source in weight.sources),
            has_bias=f"{weight.name}_bias" in names,
            divided=weight.sources[0].axes[1].division is not Division.WHOLE,
        )
        for weight in weights
        if _adapted(weight)
    ]


def slot_numbers(weights: Iterable[Weight], shard: Shard, rank: int) -> int:
    """Numbers of one slot for adapters of that rank, on one rank of the model."""
    return slot_shape(products_of(weights, shard), rank).numel()


def slot_shape(products: Iterable[Product], rank: int) -> torch.Size:
    """Of a slot: what belongs to biases, if any can change, then to each rank, in all products."""
    products = list(products)
    biases = any(product.has_bias for product in products)
    return torch.Size((rank + biases, sum(product.numbers for product in products)))


def scaled_order(products: Iterable[Product]) -> list[Product]:
    """The order in which outputs have scales: those that ranks sum are the last."""
    return sorted(products, key=lambda product: product.divided)


def scale_numbers(weights: Iterable[Weight], shard: Shard) -> tuple[int, int]:
    """Outputs of a rank's products, each with a scale per slot; and those of them that are sums."""
    products = products_of(weights, shard)
    summed = [product.outputs for product in products if product.divided and shard.world > 1]
    return sum(product.outputs for product in products), sum(summed)


def aligned(numbers: int) -> int:
    """So many, and up to the next multiple of 16: kernels read whole lines."""
    return -(-numbers // _ALIGNMENT) * _ALIGNMENT


def _adapted(weight: Weight) -> bool:
    return weight.multiplied and weight.experts is None


def _places(weights: Iterable[Weight]) -> dict[str, list[Place]]:
    places: dict[str, list[Place]] = {}
    changed = set()
    for weight in weights:
        if _adapted(weight):
            for part, source in enumerate(weight.sources):
                module = source.name.removesuffix(".weight")
                places.setdefault(module, []).append(Place(weight.name, part, source))
                if source.function is not None:
                    changed.add(module)
    return {module: each for module, each in places.items() if module not in changed}


def _reason(weight: Weight) -> str:
    if weight.experts is not None or ".experts." in weight.name:
        return _EXPERTS
    if weight.name in (EMBEDDING, HEAD):
        return f"the model's {weight.name} is not adapted while serving"
    if any(source.function is not None for source in weight.sources):
        return "its weights are multiplied as config.json says, which an adapter's are not"
    return "no product that can be adapted is made with it"
