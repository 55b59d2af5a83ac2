"""What a model has made of texts, as clients want it: vectors, scores, probabilities."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenpod.core.task import VectorFacts
from tokenpod.service.calls.embedding import ReadCall, ReadLimits, VectorFormat
from tokenpod.service.calls.pooled import Floats


def shown(vectors: Floats, call: ReadCall, limits: ReadLimits) -> Floats:
    """Vectors [n, width] as a client wants them: cut, and divided by their length."""
    normalized = limits.facts.normalized if call.normalize is None else call.normalize
    if call.dimensions is not None:
        vectors = vectors[:, : call.dimensions]
    if normalized and (call.dimensions is not None or not limits.facts.normalized):
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, 1e-12)
    return vectors


def written(vectors: Floats, call: ReadCall, limits: ReadLimits) -> tuple[bytes, list[float]]:
    """The same as bytes of their numbers, and scales of int8."""
    vectors = shown(vectors, call, limits)
    if call.format is VectorFormat.FLOAT32:
        return vectors.astype("<f4", copy=False).tobytes(), []
    if call.format is VectorFormat.BFLOAT16:
        # To the nearest, of two that are as near to the even one.
        bits = np.ascontiguousarray(vectors, np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return rounded.astype("<u2").tobytes(), []
    scales = np.abs(vectors).max(1) / 127
    numbers = np.rint(vectors / np.where(scales, scales, 1)[:, None]).astype(np.int8)
    return numbers.tobytes(), scales.astype(np.float32).tolist()


class SparseVector(NamedTuple):
    """The numbers of a vector that are not 0, by tokens of the vocabulary."""

    #: [n] rising.
    indices: npt.NDArray[np.int64]
    #: [n]
    values: Floats


def nonzero(vector: Floats) -> SparseVector:
    """Of a vector [vocabulary]."""
    there = np.flatnonzero(vector)
    return SparseVector(there, vector[there])


def of_words(weights: Floats, ids: Sequence[int], special: Collection[int]) -> SparseVector:
    """Of the weights [n] of a text's tokens: of each the highest; special ones have none."""
    counts = (weights > 0) & ~np.isin(ids, [*special])
    indices, which = np.unique(np.asarray(ids, np.int64)[counts], return_inverse=True)
    values = np.zeros(len(indices), np.float32)
    np.maximum.at(values, which, weights[counts])
    return SparseVector(indices, values)


def scores(vectors: Sequence[Floats], *, raw: bool) -> Floats:
    """[n] of the only number of each text [1, 1]; from 0 to 1, unless `raw`."""
    numbers = np.concatenate(vectors)[:, 0]
    return numbers if raw else sigmoid(numbers)


def probabilities(numbers: Floats, facts: VectorFacts) -> Floats:
    """Of the labels' numbers [n, labels]: of one label each, or where there may be several."""
    if facts.several_labels:
        return sigmoid(numbers)
    weights = np.exp(numbers - numbers.max(1, keepdims=True))
    found: Floats = weights / weights.sum(1, keepdims=True)
    return found


def sigmoid(numbers: Floats) -> Floats:
    """From 0 to 1."""
    # By tanh: no number is too large for it.
    found: Floats = 0.5 * (np.tanh(0.5 * numbers) + 1)
    return found
