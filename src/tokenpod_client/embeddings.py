"""Requests for vectors, scores and labels from arguments, and their answers as numbers."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, TypedDict

from tokenpod_client.protos.tokenpod.v1 import embedding_service_pb2 as pb

#: A text, or token ids.
TextInput = str | Sequence[int]
#: The numbers of a vector.
Vector = Sequence[float]


class ReadOptions(TypedDict, total=False):
    """Fields that requests for vectors, scores and labels share. None is as if not given."""

    #: "end", "start", or None: a text that is too long is refused.
    truncation: str | None
    model: str | None
    request_id: str | None
    priority: int | None


class EmbedOptions(ReadOptions, total=False):
    """Fields of `EmbedRequest`."""

    prompt_name: str | None
    dimensions: int | None
    normalize: bool | None
    #: "float32", "bfloat16" or "int8": how numbers travel.
    format: str | None


class LabelScores(dict[str, float]):
    """A number for each label of a text."""

    @property
    def best(self) -> str:
        """The label with the largest."""
        return max(self, key=lambda label: self[label])


def embed_request(texts: Sequence[TextInput], options: EmbedOptions) -> pb.EmbedRequest:
    """A request for vectors. Raises TypeError for what is none."""
    return pb.EmbedRequest(inputs=_inputs(texts), **_fields(options))


def score_request(
    query: str, documents: Sequence[str], options: ReadOptions, **more: Any
) -> pb.ScoreRequest:
    """A request for scores."""
    return pb.ScoreRequest(query=query, documents=documents, **more, **_fields(options))


def classify_request(
    texts: Sequence[TextInput], options: ReadOptions, **more: Any
) -> pb.ClassifyRequest:
    """A request for labels."""
    return pb.ClassifyRequest(inputs=_inputs(texts), **more, **_fields(options))


def vectors_of(response: pb.EmbedResponse) -> list[list[Vector]]:
    """The vectors of each text: one, or one for each of its tokens."""
    return [
        [
            _numbers(each, at, response.dimensions, response.format)
            for at in range(each.vector_count)
        ]
        for each in response.embeddings
    ]


def sparse_of(response: pb.EmbedResponse) -> list[dict[int, float]]:
    """The sparse vector of each text: a number for each token of the vocabulary that has one."""
    return [
        dict(zip(each.sparse_indices, each.sparse_values, strict=True))
        for each in response.embeddings
    ]


def labels_of(response: pb.ClassifyResponse) -> list[LabelScores]:
    """A number for each label, of each text."""
    return [
        LabelScores(zip(response.labels, each.scores, strict=True)) for each in response.results
    ]


def _numbers(embedding: pb.Embedding, at: int, width: int, form: Any) -> Vector:
    size = {pb.VECTOR_FORMAT_BFLOAT16: 2, pb.VECTOR_FORMAT_INT8: 1}.get(form, 4)
    data = embedding.values[at * width * size : (at + 1) * width * size]
    if form == pb.VECTOR_FORMAT_INT8:
        scale = embedding.scales[at]
        return array("f", (scale * x for x in struct.unpack(f"{width}b", data)))
    if form == pb.VECTOR_FORMAT_BFLOAT16:
        # The first half of a float32.
        widened = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        return array("f", struct.unpack(f"<{width}f", widened))
    return array("f", struct.unpack(f"<{width}f", data))


def _inputs(texts: Sequence[TextInput]) -> list[pb.TextInput]:
    if isinstance(texts, str):
        raise TypeError("texts is one text; a list of texts, or of lists of token ids, is expected")
    return [
        pb.TextInput(text=text)
        if isinstance(text, str)
        else pb.TextInput(tokens=pb.TextTokens(ids=text))
        for text in texts
    ]


def _fields(options: Any) -> dict[str, Any]:
    fields = {name: value for name, value in options.items() if value is not None}
    for name, prefix, kind in (
        ("truncation", "TRUNCATION", pb.Truncation),
        ("format", "VECTOR_FORMAT", pb.VectorFormat),
    ):
        if name in fields:
            known = [key.removeprefix(f"{prefix}_").lower() for key in kind.keys()[1:]]
            if fields[name] not in known:
                raise TypeError(f"{name} is {fields[name]!r}; expected one of {', '.join(known)}")
            fields[name] = kind.Value(f"{prefix}_{fields[name].upper()}")
    return fields
