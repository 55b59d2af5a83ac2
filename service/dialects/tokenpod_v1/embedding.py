"""The rpcs of `tokenpod.v1.EmbeddingService`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenpod.core.task import Task
from tokenpod.service.calls.embedding import (
    AskedText,
    ReadCall,
    Truncation,
    VectorFormat,
    pairs_of,
)
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.limits import check_request_id
from tokenpod.service.dialects.fields import copied
from tokenpod.service.dialects.streams import REQUEST_ID_KEY, request_id_of
from tokenpod.service.rpc.interceptors import Context
from tokenpod.service.rpc.methods import PROMPT, Gate, Method, method_of
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.numbers import probabilities, scores, written
from tokenpod.service.serving.reading import ReadText, read_limits
from tokenpod_client.protos.tokenpod.v1 import embedding_service_pb2 as pb

_TRUNCATION = {
    pb.TRUNCATION_UNSPECIFIED: Truncation.NONE,
    pb.TRUNCATION_END: Truncation.END,
    pb.TRUNCATION_START: Truncation.START,
}
_FORMATS = {
    pb.VECTOR_FORMAT_UNSPECIFIED: VectorFormat.FLOAT32,
    pb.VECTOR_FORMAT_FLOAT32: VectorFormat.FLOAT32,
    pb.VECTOR_FORMAT_BFLOAT16: VectorFormat.BFLOAT16,
    pb.VECTOR_FORMAT_INT8: VectorFormat.INT8,
}
_WRITTEN = {
    VectorFormat.FLOAT32: pb.VECTOR_FORMAT_FLOAT32,
    VectorFormat.BFLOAT16: pb.VECTOR_FORMAT_BFLOAT16,
    VectorFormat.INT8: pb.VECTOR_FORMAT_INT8,
}


async def embed(backend: Backend, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
    """A vector for each text."""
    call = ReadCall(
        await _inputs(request.inputs),
        _chosen("truncation", _TRUNCATION, request.truncation),
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        token_vectors=request.token_vectors,
        sparse=request.sparse_vectors,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=request.normalize if request.HasField("normalize") else None,
        format=_chosen("format", _FORMATS, request.format),
        request_id=request.request_id,
        priority=request.priority,
    )
    found = await _read(backend, request.model, call, "inputs", context)
    limits = read_limits(backend.generate.serving)
    response = pb.EmbedResponse(
        dimensions=limits.width(call), format=_WRITTEN[call.format], token_count=_tokens(found)
    )
    # What has a number for each token of the vocabulary is sent once.
    dense = not call.sparse or limits.facts.word_weights
    for each in found:
        vectors = each.vectors if dense else each.vectors[:0]
        values, scales = written(vectors, call, limits) if dense else (b"", [])
        added = response.embeddings.add(
            values=values,
            vector_count=len(vectors),
            scales=scales,
            token_count=each.tokens,
            left_out_token_count=each.left_out,
        )
        if each.sparse is not None:
            added.sparse_indices.extend(each.sparse.indices.tolist())
            added.sparse_values.extend(each.sparse.values.tolist())
    return response


async def score(backend: Backend, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
    """How well each document answers a query."""
    limits = read_limits(backend.generate.serving)
    call = ReadCall(
        pairs_of(limits, request.query, request.documents, "documents", request.instruction),
        _chosen("truncation", _TRUNCATION, request.truncation),
        request_id=request.request_id,
        priority=request.priority,
    )
    found = await _read(backend, request.model, call, "documents", context)
    return pb.ScoreResponse(
        scores=scores([each.vectors for each in found], raw=request.raw_scores).tolist(),
        token_count=_tokens(found),
    )


async def classify(
    backend: Backend, request: pb.ClassifyRequest, context: Context
) -> pb.ClassifyResponse:
    """A probability for each label, of each text."""
    call = ReadCall(
        await _inputs(request.inputs),
        _chosen("truncation", _TRUNCATION, request.truncation),
        request_id=request.request_id,
        priority=request.priority,
    )
    found = await _read(backend, request.model, call, "inputs", context)
    facts = read_limits(backend.generate.serving).facts
    numbers = np.concatenate([each.vectors for each in found])
    if not request.raw_scores:
        numbers = probabilities(numbers, facts)
    return pb.ClassifyResponse(
        results=[pb.Classification(scores=row) for row in numbers.tolist()],
        labels=facts.labels,
        token_count=_tokens(found),
    )


async def _read(
    backend: Backend, model: str, call: ReadCall, field: str, context: Context
) -> list[ReadText]:
    """Have the texts of a call read."""
    remaining = context.time_remaining()
    with backend.reading.admit(remaining) as admitted:
        backend.generate.check_model(model)
        # Before it travels as metadata.
        check_request_id(call.request_id)
        request_id = request_id_of(call.request_id, context)
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        return await admitted.read(call, field, request_id, remaining)


async def _inputs(inputs: Sequence[pb.TextInput]) -> list[AskedText]:
    found = []
    for at, each in enumerate(inputs):
        kind = each.WhichOneof("input")
        field = f"inputs[{at}].{kind or 'input'}"
        if kind == "text":
            found.append(AskedText(field, each.text))
        else:
            ids = await copied(each.tokens.ids) if kind else ()
            found.append(AskedText(field, tokens=ids))
    return found


def _chosen(field: str, known: dict[Any, Any], value: Any) -> Any:
    if value not in known:
        raise InvalidArgument(field, f"is {value}; must be 0 to {max(known)}")
    return known[value]


def _tokens(found: Sequence[ReadText]) -> int:
    return sum(each.tokens for each in found)


def _row(name: str, serve: Any, task: Task) -> Method:
    service = pb.DESCRIPTOR.services_by_name["EmbeddingService"]
    return method_of(
        service, name, PROMPT, serve=serve, strict=True, gate=Gate.ROW, relayed=False, task=task
    )


METHODS = (
    _row("Embed", embed, Task.EMBED),
    _row("Score", score, Task.SCORE),
    _row("Classify", classify, Task.CLASSIFY),
)
