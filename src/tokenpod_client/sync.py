"""The client for programs without asyncio."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from tokenpod_client.answers import Answer
from tokenpod_client.channel import OPTIONS, metadata_of
from tokenpod_client.chats import Message
from tokenpod_client.embeddings import (
    EmbedOptions,
    LabelScores,
    ReadOptions,
    TextInput,
    Vector,
    classify_request,
    embed_request,
    labels_of,
    score_request,
    sparse_of,
    vectors_of,
)
from tokenpod_client.errors import ServerError
from tokenpod_client.patience import Patience
from tokenpod_client.protos.tokenpod.v1 import (
    adapter_pb2,
    adapter_service_pb2,
    chat_pb2,
    model_pb2,
)
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.adapter_service_pb2_grpc import AdapterServiceStub
from tokenpod_client.protos.tokenpod.v1.embedding_service_pb2_grpc import EmbeddingServiceStub
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub
from tokenpod_client.reading import Delta, Reading, StreamState
from tokenpod_client.requests import (
    GenerateOptions,
    Prompt,
    generate_request,
    messages_of,
    tokenize_request,
    whole_request,
)

Response = TypeVar("Response")


class Client:
    """A connection to a server; may be shared by threads. Calls raise ServerError.

    A call that the server can't take now is sent again when the server wants it; one whose answer
    has begun never is.

    Args:
        address: `host:port`, or `unix:/path`.
        token: bearer token.
        credentials: of TLS, from `grpc.ssl_channel_credentials`; None: plaintext.
        deadline: seconds of each call, tries included; None: no bound.
        attempts: how often a call is sent at most.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        deadline: float | None = None,
        attempts: int = 5,
    ) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(address, OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, OPTIONS)
        # The stubs' types are those of asyncio's channels.
        self._stub: Any = GenerationServiceStub(cast(Any, self._channel))
        self._adapters: Any = AdapterServiceStub(cast(Any, self._channel))
        self._embedding: Any = EmbeddingServiceStub(cast(Any, self._channel))
        self._metadata = metadata_of(token)
        self._deadline, self._attempts = deadline, attempts

    def generate(
        self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Generate, and read the text as it comes. Nothing is sent until the stream is read.

        Raises TypeError, which says where and which forms there are, for what is no request.

        Args:
            prompt: a text, token ids, or messages of a chat, as OpenAI's API has them.
            deadline: seconds of this call; None: the client's.
            options: fields of the request, by our names or by OpenAI's (`GenerateOptions`).
        """
        request = generate_request(prompt, **options)
        return Stream(self._stub.Generate, request, self._patience(deadline), self._metadata)

    def generate_once(
        self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """Generate, and return the whole answer. Raises TypeError as `generate` does."""
        request = whole_request(prompt, options)
        return Answer(self._call(self._stub.GenerateOnce, request, deadline))

    def chat(
        self,
        messages: Sequence[Message] | chat_pb2.Chat,
        *,
        deadline: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """The next turn of a chat, as a whole; `generate` streams it."""
        return self.generate_once(messages_of(messages), deadline=deadline, **options)

    def tokenize(self, prompt: Prompt, *, deadline: float | None = None) -> list[int]:
        """Ids of a text's or a chat's tokens, with those that a prompt gets."""
        request = tokenize_request(prompt)
        request.return_token_ids = True
        return list((self._call(self._stub.Tokenize, request, deadline)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, deadline: float | None = None) -> str:
        """The text of tokens."""
        request = service.DetokenizeRequest(token_ids=token_ids)
        return str(self._call(self._stub.Detokenize, request, deadline).text)

    def embed(
        self,
        texts: Sequence[TextInput],
        *,
        deadline: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> list[Vector]:
        """A vector of each text, of a model that makes these.

        Args:
            texts: each a text, or token ids.
            deadline: seconds of this call; None: the client's.
            options: fields of the request (`EmbedOptions`).
        """
        request = embed_request(texts, options)
        found = self._call(self._embedding.Embed, request, deadline)
        return [vectors[0] for vectors in vectors_of(found)]

    def embed_tokens(
        self,
        texts: Sequence[TextInput],
        *,
        deadline: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> list[list[Vector]]:
        """A vector of each token of each text, special tokens included."""
        request = embed_request(texts, options)
        request.token_vectors = True
        return vectors_of(self._call(self._embedding.Embed, request, deadline))

    def embed_sparse(
        self,
        texts: Sequence[TextInput],
        *,
        deadline: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> list[dict[int, float]]:
        """A sparse vector of each text, of a model that makes these: numbers by token."""
        request = embed_request(texts, options)
        request.sparse_vectors = True
        return sparse_of(self._call(self._embedding.Embed, request, deadline))

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        raw_scores: bool = False,
        instruction: str = "",
        deadline: float | None = None,
        **options: Unpack[ReadOptions],
    ) -> list[float]:
        """How well each document answers a query, from 0 to 1 unless `raw_scores`."""
        request = score_request(
            query, documents, options, raw_scores=raw_scores, instruction=instruction
        )
        return list((self._call(self._embedding.Score, request, deadline)).scores)

    def classify(
        self,
        texts: Sequence[TextInput],
        *,
        raw_scores: bool = False,
        deadline: float | None = None,
        **options: Unpack[ReadOptions],
    ) -> list[LabelScores]:
        """A probability for each label, of each text."""
        request = classify_request(texts, options, raw_scores=raw_scores)
        return labels_of(self._call(self._embedding.Classify, request, deadline))

    def model(self, *, deadline: float | None = None) -> model_pb2.Model:
        """What is served, and every limit in force."""
        found: model_pb2.Model
        found = self._call(self._stub.GetModel, service.GetModelRequest(), deadline).model
        return found

    def adapters(self, *, deadline: float | None = None) -> list[adapter_pb2.Adapter]:
        """The adapters that requests can name, by their names; `deadline` is of each page."""
        found: list[adapter_pb2.Adapter] = []
        request = adapter_service_pb2.ListAdaptersRequest()
        while True:
            page = self._call(self._adapters.ListAdapters, request, deadline)
            found += page.adapters
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    def load(self, *, deadline: float | None = None) -> service.GetLoadResponse:
        """What runs and waits."""
        found: service.GetLoadResponse
        found = self._call(self._stub.GetLoad, service.GetLoadRequest(), deadline)
        return found

    def close(self) -> None:
        """End the connection, and every call on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _patience(self, deadline: float | None) -> Patience:
        return Patience(self._attempts, self._deadline if deadline is None else deadline)

    def _call(
        self, method: Callable[..., Response], request: Any, deadline: float | None
    ) -> Response:
        patience = self._patience(deadline)
        while True:
            try:
                return method(request, timeout=patience.seconds, metadata=self._metadata)
            except grpc.RpcError as error:
                problem = ServerError.of(error)
            pause = patience.pause(problem)
            if pause is None:
                raise problem
            time.sleep(pause)


class Stream(StreamState):
    """The answer of `Client.generate`: iterate over it once. Raises ServerError.

    A stream that is closed, or that nobody reads any more, is cancelled on the server.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        request: pb.GenerateRequest,
        patience: Patience,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        super().__init__()
        self._deltas = _read(self._reading, method, request, patience, metadata)

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    def __next__(self) -> Delta:
        return next(self._deltas)

    def text(self) -> str:
        """Read to the end; the text of the first sample that was left."""
        return "".join(delta.text for delta in self._deltas if delta.sample_index == 0)

    def answer(self) -> Answer:
        """Read to the end; the whole answer, also of what was read before."""
        for _ in self._deltas:
            pass
        return self._whole()

    def close(self) -> None:
        """Cancel what has not come yet. May be called from another thread."""
        self._reading.close()
        # Another thread that reads finds the call at its end.
        with contextlib.suppress(ValueError):
            self._deltas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _read(
    reading: Reading,
    method: Callable[..., Any],
    request: pb.GenerateRequest,
    patience: Patience,
    metadata: tuple[tuple[str, str], ...],
) -> Generator[Delta, None, None]:
    begun = False
    while not reading.closed:
        reading.call = method(request, timeout=patience.seconds, metadata=metadata)
        try:
            for event in reading.call:
                begun = True
                if (delta := reading.take(event)) is not None:
                    yield delta
            return
        except grpc.RpcError as error:
            problem = ServerError.of(error)
        finally:
            reading.call.cancel()
        if reading.closed:
            return
        pause = None if begun else patience.pause(problem)
        if pause is None:
            raise problem
        time.sleep(pause)
