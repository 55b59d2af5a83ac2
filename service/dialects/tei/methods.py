"""The rpcs of `tei.v1`, of single texts and of streams of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from tokenpod.core.task import Task
from tokenpod.service.admission.admission import RequestStream
from tokenpod.service.calls.embedding import MOST_VECTOR_BYTES, ReadCall, ReadLimits
from tokenpod.service.calls.errors import FailedPrecondition, InvalidArgument
from tokenpod.service.dialects.fields import copied, field_names
from tokenpod.service.dialects.streams import request_id_of
from tokenpod.service.dialects.tei import codec
from tokenpod.service.rpc.interceptors import Context
from tokenpod.service.rpc.methods import NAMES, PROMPT, SMALL, Gate, Method, method_of
from tokenpod.service.rpc.wire import MethodLimits
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.numbers import scores
from tokenpod.service.serving.reading import ReadText, ReadTimes, read_limits
from tokenpod_client.protos.tei.v1 import tei_pb2 as pb

#: Requests of a stream that are answered at once.
_AT_ONCE = 64
#: All texts of a stream that is answered once may take so often what one message may have.
_LONGEST_MESSAGES = 8

#: (backend, request, context, and whose request it is) -> response
Answer = Callable[..., Awaitable[Any]]
#: None: the request is the call's only one.
Stream = RequestStream | None


async def info(backend: Backend, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
    """What is served."""
    if backend.ready.vectors is None:
        raise FailedPrecondition(
            "this server's model is made to generate: call tokenpod.v1.GenerationService/GetModel"
        )
    return codec.info(backend.generate.serving)


async def embed(
    backend: Backend, request: pb.EmbedRequest, context: Context, stream: Stream = None
) -> pb.EmbedResponse:
    """A vector."""
    call = codec.embed_call(request)
    return codec.embedded(call, *await _read(backend, call, "inputs", context, stream))


async def embed_all(
    backend: Backend, request: pb.EmbedAllRequest, context: Context, stream: Stream = None
) -> pb.EmbedAllResponse:
    """A vector for each token."""
    call = codec.embed_all_call(request)
    return codec.embedded_all(call, *await _read(backend, call, "inputs", context, stream))


async def embed_sparse(
    backend: Backend, request: pb.EmbedSparseRequest, context: Context, stream: Stream = None
) -> pb.EmbedSparseResponse:
    """The numbers of a vector that are not 0."""
    if why := read_limits(backend.generate.serving).facts.no_sparse:
        raise FailedPrecondition(f"{why}: call tei.v1.Embed/Embed")
    call = codec.embed_sparse_call(request)
    _, read, times = await _read(backend, call, "inputs", context, stream)
    return await codec.embedded_sparse(call, read, times)


async def predict(
    backend: Backend, request: pb.PredictRequest, context: Context, stream: Stream = None
) -> pb.PredictResponse:
    """Labels of a text."""
    return await _predicted(backend, codec.predict_call(request), request, context, stream)


async def predict_pair(
    backend: Backend, request: pb.PredictPairRequest, context: Context, stream: Stream = None
) -> pb.PredictResponse:
    """Labels of two texts."""
    return await _predicted(backend, codec.predict_pair_call(request), request, context, stream)


async def rerank(
    backend: Backend, request: pb.RerankRequest, context: Context
) -> pb.RerankResponse:
    """Texts, the best first."""
    call = codec.rerank_call(request, read_limits(backend.generate.serving))
    if request.return_text and (size := request.ByteSize()) > MOST_VECTOR_BYTES:
        problem = f"is set for a request of {size} bytes; at most {MOST_VECTOR_BYTES} fit into an"
        raise InvalidArgument("return_text", f"{problem} answer")
    _, read, times = await _read(backend, call, "texts", context)
    found = scores([each.vectors for each in read], raw=request.raw_scores).tolist()
    texts = request.texts if request.return_text else ()
    return codec.ranked(call, texts, found, read, times)


async def rerank_stream(
    backend: Backend, requests: AsyncIterator[pb.RerankStreamRequest], context: Context
) -> pb.RerankResponse:
    """The same of a stream: its texts are few enough for one call."""
    serving = backend.generate.serving
    most = read_limits(serving).max_texts
    most_bytes = _LONGEST_MESSAGES * serving.settings.max_message_bytes
    whole: pb.RerankRequest | None = None
    size = 0
    with contextlib.ExitStack() as held:
        async for each in requests:
            if whole is None:
                whole = pb.RerankRequest(
                    query=each.query,
                    truncate=each.truncate,
                    raw_scores=each.raw_scores,
                    return_text=each.return_text,
                    truncation_direction=each.truncation_direction,
                )
            size += each.ByteSize()
            if size > most_bytes:
                problem = f"comes in messages of {size} bytes together; this server takes"
                limit = f"{most_bytes} ({_LONGEST_MESSAGES} times --max-message-bytes)"
                raise InvalidArgument("text", f"{problem} {limit}")
            held.enter_context(backend.admission.memory.reserve(each.ByteSize()))
            whole.texts.append(each.text)
            if len(whole.texts) > most:
                problem = f"comes more than {most} times in a stream (--max-client-batch-size)"
                raise InvalidArgument("text", problem)
        if whole is None:
            raise InvalidArgument("text", "is missing: the stream has no message")
        return await rerank(backend, whole, context)


async def tokenize(
    backend: Backend, request: pb.EncodeRequest, context: Context, stream: Stream = None
) -> pb.EncodeResponse:
    """The tokens of a text."""
    serving = backend.generate.serving
    with field_names({"text": "inputs", "return_ids": "inputs"}):
        call = codec.tokens_call(request, serving.ready.vectors)
        tokenised = await backend.generate.tokens(call, stream)
    return await codec.encoded(tokenised, serving.tokenizer)


async def decode(
    backend: Backend, request: pb.DecodeRequest, context: Context, stream: Stream = None
) -> pb.DecodeResponse:
    """The text of tokens."""
    with field_names({"token_ids": "ids"}):
        ids = await copied(request.ids)
        text = await backend.generate.text_of(
            ids, skip_special=request.skip_special_tokens, stream=stream
        )
    return pb.DecodeResponse(text=text)


async def _predicted(
    backend: Backend, call: ReadCall, request: Any, context: Context, stream: Stream
) -> pb.PredictResponse:
    limits, read, times = await _read(backend, call, "inputs", context, stream)
    return codec.predicted(call, limits.facts, read, times, raw=request.raw_scores)


async def _read(
    backend: Backend, call: ReadCall, field: str, context: Context, stream: Stream = None
) -> tuple[ReadLimits, Sequence[ReadText], ReadTimes]:
    """Have the texts of a call read."""
    remaining = context.time_remaining()
    with backend.reading.admit(remaining, stream) as admitted:
        read = await admitted.read(call, field, request_id_of("", context), remaining)
        return admitted.limits, read, admitted.times


async def _each(
    answer: Answer, backend: Backend, requests: AsyncIterator[Any], context: Context
) -> None:
    """Answer the requests of a stream, in their order, some at once. The first error ends it."""
    stream = RequestStream()
    begun = asyncio.Queue[asyncio.Task[Any] | None](_AT_ONCE)
    under_way = set[asyncio.Task[Any]]()

    def ended(task: asyncio.Task[Any]) -> None:
        under_way.discard(task)
        if not task.cancelled():
            task.exception()  # an earlier one's may be the stream's

    async def begin() -> None:
        """Begin to answer each request; the last entry is None, also if reading them fails."""
        try:
            async for request in requests:
                one = functools.partial(answer, backend, request, context, stream)
                task = asyncio.ensure_future(stream.fitting(one))
                under_way.add(task)
                task.add_done_callback(ended)
                await begun.put(task)
        finally:
            await begun.put(None)

    beginning = asyncio.ensure_future(begin())
    try:
        while (task := await begun.get()) is not None:
            await context.write(await task)
        await beginning
    finally:
        for left in (beginning, *under_way):
            left.cancel()
        while not begun.empty():
            begun.get_nowait()


def _stream(answer: Answer) -> Answer:
    return functools.partial(_each, answer)


def _row(
    service: str,
    name: str,
    serve: Any,
    task: Task | None,
    limits: MethodLimits = PROMPT,
    **row: Any,
) -> Method:
    found = pb.DESCRIPTOR.services_by_name[service]
    gate = Gate.ROW if task is not None else Gate.QUEUE
    return method_of(found, name, limits, serve=serve, gate=gate, relayed=False, task=task, **row)


def _rows(service: str, name: str, answer: Answer, task: Task | None) -> tuple[Method, Method]:
    """Of an rpc, and of its stream."""
    return (
        _row(service, name, answer, task),
        _row(service, f"{name}Stream", _stream(answer), task),
    )


_INFO = pb.DESCRIPTOR.services_by_name["Info"]
METHODS = (
    method_of(_INFO, "Info", SMALL, serve=info, gate=Gate.READY, on_followers=True),
    *_rows("Embed", "Embed", embed, Task.EMBED),
    *_rows("Embed", "EmbedSparse", embed_sparse, Task.EMBED),
    *_rows("Embed", "EmbedAll", embed_all, Task.EMBED),
    *_rows("Predict", "Predict", predict, Task.CLASSIFY),
    *_rows("Predict", "PredictPair", predict_pair, Task.CLASSIFY),
    _row("Rerank", "Rerank", rerank, Task.SCORE),
    _row("Rerank", "RerankStream", rerank_stream, Task.SCORE),
    _row("Tokenize", "Tokenize", tokenize, None, on_followers=True),
    _row("Tokenize", "TokenizeStream", _stream(tokenize), None),
    _row("Tokenize", "Decode", decode, None, NAMES),
    _row("Tokenize", "DecodeStream", _stream(decode), None, NAMES),
)
