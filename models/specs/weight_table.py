"""All weights of a model, from its spec and the names of a family's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from tokenpod.models.layers.layer_tensors import LayerTensors, norm_weights, plain_weight
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names
from tokenpod.models.weights.weights import HEAD, Axis, Division, Source, Weight


def weights_of(spec: ModelSpec, names: Names, prefix: str) -> list[Weight]:
    """All weights of a model, layer by layer."""
    table = list(_outer(spec, names, prefix))
    for i, layer in enumerate(spec.layers):
        at = prefix + names.layer.format(i=i)
        own = layer.weights(LayerTensors(spec.hidden_size, names, at, prefix))
        table += [replace(weight, name=f"{i}.{weight.name}") for weight in own]
    return table


def beyond_names(spec: ModelSpec, names: Names, prefix: str) -> tuple[str, ...]:
    """Beginnings of the names of tensors that a checkpoint has beyond its model's."""
    found = [prefix + name.format(layers=len(spec.layers)) for name in names.beyond]
    found += names.beside
    if names.predicting is not None:
        found.append(names.predicting.place(prefix, len(spec.layers)))
    for i, layer in enumerate(spec.layers):
        at = prefix + names.layer.format(i=i)
        tensors = LayerTensors(spec.hidden_size, names, at)
        found += [name for mixer in layer.mixers for name in mixer.idle_names(tensors)]
    return tuple(found)


def _outer(spec: ModelSpec, names: Names, prefix: str) -> Iterator[Weight]:
    """What is there once: embedding, positions, projections, norms and head."""
    hidden, width = Axis(spec.hidden_size), Axis(spec.embedding_width)
    vocabulary = Axis(spec.vocab_size, Division.VOCABULARY)
    embedding = spec.embedding
    yield plain_weight("embedding", prefix + names.embedding, vocabulary, width)
    if embedding.positions is not None:
        rows = Axis(embedding.positions.rows)
        yield plain_weight("positions", prefix + names.positions, rows, hidden)
    if embedding.token_types:
        types = Axis(embedding.token_types)
        yield plain_weight("token_types", prefix + names.token_types, types, hidden)
    if embedding.width is not None:
        yield plain_weight("project_in", prefix + names.project_in, hidden, width)
        yield plain_weight("project_out", prefix + names.project_out, width, hidden)
    yield from norm_weights("embedding_norm", embedding.norm, prefix + names.embedding_norm, hidden)
    if embedding.per_layer is not None:
        own, names_there = embedding.per_layer, names.per_layer
        rows = Axis(own.rows, Division.VOCABULARY)
        numbers = Axis(len(spec.layers) * own.width)
        yield plain_weight("per_layer_embedding", prefix + names_there.embedding, rows, numbers)
        projection = Source(f"{prefix}{names_there.projection}.weight", (numbers, hidden))
        yield Weight("per_layer_projection", (projection,), multiplied=True)
        stored = prefix + names_there.norm
        yield from norm_weights("per_layer_norm", own.norm, stored, Axis(own.width))
    yield from norm_weights("norm", spec.norm, prefix + names.norm, hidden)
    if not spec.head.tied:
        # In no format of fewer bits: here rounding shows at once.
        function = _rows_of_length_one if spec.head.normalised else None
        source = Source(f"{names.head}.weight", (vocabulary, width), function=function)
        yield Weight(HEAD, (source,))
    if spec.head.bias:
        yield Weight("head_bias", (Source(f"{names.head}.bias", (vocabulary,)),))


def _rows_of_length_one(x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(x.float())
