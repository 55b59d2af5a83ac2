"""Messages of `tei.v1` to plain values and back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from tokenpod.core.task import Task, VectorFacts
from tokenpod.service.calls.call import TokensCall
from tokenpod.service.calls.embedding import (
    MOST_VECTOR_BYTES,
    AskedText,
    ReadCall,
    ReadLimits,
    Truncation,
    pairs_of,
)
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.serving.numbers import probabilities, shown
from tokenpod.service.serving.reading import ReadText, ReadTimes, read_limits
from tokenpod.service.serving.serving import Serving
from tokenpod.service.text.encoder import Tokenised
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer
from tokenpod_client.protos.tei.v1 import tei_pb2 as pb

_TYPES = {
    Task.EMBED: pb.MODEL_TYPE_EMBEDDING,
    Task.SCORE: pb.MODEL_TYPE_RERANKER,
    Task.CLASSIFY: pb.MODEL_TYPE_CLASSIFIER,
}
#: Numbers of a sparse vector that are written at a time: some milliseconds.
_SPARSE_AT_ONCE = 4096
#: Tokens of a text, likewise.
_TOKENS_AT_ONCE = 1024
#: The field that makes long texts shorter.
TRUNCATES = "truncate"


def info(serving: Serving) -> pb.InfoResponse:
    """What is served. A model that generates has no type here: its own protocols say more."""
    ready, settings = serving.ready, serving.settings
    limits = read_limits(serving)
    return pb.InfoResponse(
        version=version("tokenpod"),
        model_id=serving.model_id,
        model_dtype=ready.dtype,
        model_type=_TYPES[ready.task],
        max_concurrent_requests=settings.resolved_concurrent_requests,
        max_input_length=limits.max_tokens,
        max_batch_tokens=ready.prefill_tokens,
        max_batch_requests=serving.limits.rows,
        max_client_batch_size=limits.max_texts,
        tokenization_workers=settings.text_workers,
    )


def embed_call(request: pb.EmbedRequest) -> ReadCall:
    """What is asked for. A vector is as long as it is, unless `normalize` is set."""
    return ReadCall(
        [AskedText("inputs", request.inputs)],
        _truncation(request),
        prompt_name=_prompt_name(request),
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=True if request.normalize else None,
        truncates=TRUNCATES,
    )


def embed_all_call(request: pb.EmbedAllRequest) -> ReadCall:
    """The same of each token."""
    return ReadCall(
        [AskedText("inputs", request.inputs)],
        _truncation(request),
        prompt_name=_prompt_name(request),
        token_vectors=True,
        truncates=TRUNCATES,
    )


def embed_sparse_call(request: pb.EmbedSparseRequest) -> ReadCall:
    """The numbers of a vector that are not 0."""
    return ReadCall(
        [AskedText("inputs", request.inputs)],
        _truncation(request),
        prompt_name=_prompt_name(request),
        sparse=True,
        truncates=TRUNCATES,
    )


def predict_call(request: pb.PredictRequest) -> ReadCall:
    """A text that is to be labelled."""
    text = AskedText("inputs", request.inputs)
    return ReadCall([text], _truncation(request), truncates=TRUNCATES)


def predict_pair_call(request: pb.PredictPairRequest) -> ReadCall:
    """One text, or two, that are to be labelled."""
    if len(request.inputs) not in (1, 2):
        raise InvalidArgument("inputs", f"has {len(request.inputs)} texts; must be 1 or 2")
    first, *second = request.inputs
    text = AskedText("inputs", first, next(iter(second), None))
    return ReadCall([text], _truncation(request), truncates=TRUNCATES)


def rerank_call(request: pb.RerankRequest, limits: ReadLimits) -> ReadCall:
    """A query, and texts that may answer it."""
    texts = pairs_of(limits, request.query, request.texts, "texts")
    return ReadCall(texts, _truncation(request), truncates=TRUNCATES)


def tokens_call(request: pb.EncodeRequest, facts: VectorFacts | None) -> TokensCall:
    """A text whose tokens are asked for."""
    text = request.inputs
    if request.HasField("prompt_name"):
        prompts = {} if facts is None else facts.prompts
        if request.prompt_name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            problem = f"is {request.prompt_name[:100]!r}; this model has {known}"
            raise InvalidArgument("prompt_name", problem)
        text = prompts[request.prompt_name] + text
    return TokensCall(
        text,
        add_special_tokens=request.add_special_tokens,
        return_ids=True,
        return_offsets=True,
    )


def embedded(
    call: ReadCall, limits: ReadLimits, read: Sequence[ReadText], times: ReadTimes
) -> pb.EmbedResponse:
    """A vector."""
    vectors = shown(read[0].vectors, call, limits)
    return pb.EmbedResponse(embeddings=vectors[0].tolist(), metadata=_metadata(call, read, times))


async def embedded_sparse(
    call: ReadCall, read: Sequence[ReadText], times: ReadTimes
) -> pb.EmbedSparseResponse:
    """The numbers of a vector that are not 0, by tokens of the vocabulary.

    A text may have very many: others take their turns in between.
    """
    sparse = read[0].sparse
    assert sparse is not None, "the call asks for it"
    response = pb.EmbedSparseResponse(metadata=_metadata(call, read, times))
    for first in range(0, len(sparse.indices), _SPARSE_AT_ONCE):
        some = slice(first, first + _SPARSE_AT_ONCE)
        pairs = zip(sparse.indices[some].tolist(), sparse.values[some].tolist(), strict=True)
        response.sparse_embeddings.extend(
            pb.SparseValue(index=index, value=value) for index, value in pairs
        )
        await asyncio.sleep(0)
    return response


def embedded_all(
    call: ReadCall, limits: ReadLimits, read: Sequence[ReadText], times: ReadTimes
) -> pb.EmbedAllResponse:
    """A vector for each token."""
    vectors = shown(read[0].vectors, call, limits).tolist()
    return pb.EmbedAllResponse(
        token_embeddings=[pb.TokenEmbedding(embeddings=vector) for vector in vectors],
        metadata=_metadata(call, read, times),
    )


def predicted(
    call: ReadCall, facts: VectorFacts, read: Sequence[ReadText], times: ReadTimes, *, raw: bool
) -> pb.PredictResponse:
    """Labels, the likeliest first."""
    numbers = read[0].vectors
    if not raw:
        numbers = probabilities(numbers, facts)
    order = np.argsort(-numbers[0], kind="stable").tolist()
    return pb.PredictResponse(
        predictions=[
            pb.Prediction(score=float(numbers[0, at]), label=facts.labels[at]) for at in order
        ],
        metadata=_metadata(call, read, times),
    )


def ranked(
    call: ReadCall,
    texts: Sequence[str],
    scores: Sequence[float],
    read: Sequence[ReadText],
    times: ReadTimes,
) -> pb.RerankResponse:
    """Texts by their scores, the best first; `texts` are those that are returned, if any are."""
    response = pb.RerankResponse(metadata=_metadata(call, read, times))
    for at in np.argsort(-np.asarray(scores), kind="stable").tolist():
        rank = response.ranks.add(index=at, score=scores[at])
        if texts:
            rank.text = texts[at]
    return response


async def encoded(tokenised: Tokenised, tokenizer: Tokenizer) -> pb.EncodeResponse:
    """Tokens, and where they stand in the text.

    A text may have very many: others take their turns in between. Raises InvalidArgument where they
    don't fit into an answer.
    """
    response, special, size = pb.EncodeResponse(), tokenizer.special_ids, 0
    for first in range(0, len(tokenised.ids), _TOKENS_AT_ONCE):
        for at, token in enumerate(tokenised.ids[first : first + _TOKENS_AT_ONCE], first):
            added = response.tokens.add(id=token, text=tokenizer.token_text(token))
            if token in special:
                added.special = True
            else:
                added.start, added.stop = tokenised.offsets[2 * at : 2 * at + 2]
            # A tag and a length of one byte, or of more.
            size += added.ByteSize() + 4
        if size > MOST_VECTOR_BYTES:
            raise InvalidArgument(
                "inputs",
                f"has {tokenised.count} tokens, of which {at + 1} take {size} bytes as they are"
                f" listed; at most {MOST_VECTOR_BYTES} fit into an answer: send a shorter text",
            )
        # Also before the answer is written, which is one piece of work.
        await asyncio.sleep(0)
    return response


def _metadata(call: ReadCall, read: Sequence[ReadText], times: ReadTimes) -> pb.Metadata:
    texts = [text for each in call.texts for text in (each.text, each.second) if text]
    return pb.Metadata(
        compute_chars=sum(map(len, texts)),
        compute_tokens=sum(each.tokens for each in read),
        total_time_ns=times.total_ns,
        tokenization_time_ns=times.tokenising_ns,
        queue_time_ns=times.queue_ns,
        inference_time_ns=times.computing_ns,
    )


def _prompt_name(request: Any) -> str | None:
    return request.prompt_name if request.HasField("prompt_name") else None


def _truncation(request: Any) -> Truncation:
    if not request.truncate:
        return Truncation.NONE
    left = request.truncation_direction == pb.TRUNCATION_DIRECTION_LEFT
    return Truncation.START if left else Truncation.END
