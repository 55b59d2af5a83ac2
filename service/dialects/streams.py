"""For protocols that stream text: the name of a request, and the order of its events."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from tokenpod.service.calls.call import GenerateCall
from tokenpod.service.calls.generation import Generation
from tokenpod.service.calls.limits import check_request_id
from tokenpod.service.calls.sample import Delta, Sample
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

#: Metadata of a call, and of its answer: the request's name.
REQUEST_ID_KEY = "x-request-id"


class StreamWriter(Protocol):
    """Makes the messages of a stream, one at a time."""

    generation: Generation

    @property
    def done(self) -> bool:
        """Whether every message has been handed out."""

    async def prepare(self) -> None:
        """Make what takes long of the first message; called once, when there is one."""

    def next(self) -> Any:
        """The next message; None: nothing yet, or nothing more."""


class SampleWriter(ABC):
    """Turns what a generation brings into a protocol's messages, in the order that all promise:

    a first one, then the tokens of every sample, and the end of each after its last tokens.

    Args:
        call: what the client asked for.
        generation: where tokens arrive.
        tokenizer: names tokens.
        model_id, request_id: what the first message tells, where a protocol's does.
    """

    def __init__(
        self,
        call: GenerateCall,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        model_id: str = "",
        request_id: str = "",
    ) -> None:
        self.call = call
        self.generation = generation
        self.tokenizer = tokenizer
        self.model_id = model_id
        self.request_id = request_id
        self._opened = False
        self._completed = False
        self._closed: set[int] = set()
        #: The sample that is asked first: a slow reader must not hear of one sample alone.
        self._turn = 0

    @property
    def done(self) -> bool:
        """Whether every message has been handed out."""
        return self._completed

    async def prepare(self) -> None:
        """Make what takes long of the first message; called once, when there is one."""
        return

    def next(self) -> Any:
        """The next message; None: nothing yet, or nothing more.

        One at a time, and made when it can be sent: what waits for a slow reader stays packed.
        Raises what a sample has failed with, once the others have ended.
        """
        generation = self.generation
        if not self._opened and (generation.started or generation.finished):
            self._opened = True
            if (message := self.started()) is not None:
                return message
        if self.call.output.stream:
            return self._next_of(generation.samples)
        if generation.finished:
            return self._next_of(generation.best(self.call.sampling.n or 1))
        return None

    def _next_of(self, samples: Sequence[Sample]) -> Any:
        """The next message about `samples`, those first that have waited longest."""
        count = len(samples)
        for offset in range(count):
            index = (self._turn + offset) % count
            if index in self._closed:
                continue
            sample = samples[index]
            if sample.has_news:
                # Of a search all have ended: one after the other.
                self._turn = index + (self.call.beam is None)
                return self.tokens(sample.take(), index)
            if sample.ending is not None:
                self._closed.add(index)
                return self.finished(sample, index)
            if sample.failed:
                self._closed.add(index)
        if len(self._closed) == count and not self._completed:
            if (failure := self.generation.late_failure) is not None:
                raise failure
            self._completed = True
            return self.completed()
        return None

    # -- a protocol's own ----------------------------------------------------------------------

    @abstractmethod
    def started(self) -> Any:
        """The first message: the prompt has been computed. None: there is none."""

    @abstractmethod
    def tokens(self, delta: Delta, index: int) -> Any:
        """A message with a run of a sample's output."""

    @abstractmethod
    def finished(self, sample: Sample, index: int) -> Any:
        """The last message of a sample."""

    def completed(self) -> Any:
        """The last message of the call; None: there is none."""
        return None

    # -- shared --------------------------------------------------------------------------------

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone."""
        return [self.tokenizer.token_text(token) for token in ids]

    def special(self, ids: Sequence[int]) -> list[bool]:
        """Whether each token is one of the model's special ones."""
        special = self.tokenizer.special_ids
        return [token in special for token in ids]


def request_id_of(named: str, context: Any, key: str = REQUEST_ID_KEY) -> str:
    """The name of a request: what its message says, else its metadata (`key`), else a new one.

    Raises InvalidArgument for a name in metadata that is too long or not printable ASCII.
    """
    if named:
        return named
    for name, value in context.invocation_metadata() or ():
        if name == key and value:
            found = value if isinstance(value, str) else value.decode("ascii", "replace")
            check_request_id(found, f"metadata {key}")
            return found
    return uuid.uuid4().hex


async def write_all(writer: StreamWriter, context: Any) -> None:
    """Write a stream to its end. Raises what the generation fails with.

    It writes where a generator would yield: each layer around a generator costs every token one
    more switch of coroutines.
    """
    generation, prepared = writer.generation, False
    while not writer.done:
        await generation.news()
        if not prepared and (generation.started or generation.finished):
            prepared = True
            await writer.prepare()
        while (message := writer.next()) is not None:
            await context.write(message)
