"""The receiving end of a request: what a router's HTTP handler would read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from router.records import FinishReason, GeneratedText, GrammarType, Sampling, TokenRun

#: The OpenAI `model` that a router does not take for an adapter.
OWN_MODEL = "tgi"


class GenerationError(Exception):
    """The step that this request was in failed (HTTP 424)."""


class HungUp(Exception):
    """The reader itself left."""


class RouterStopped(Exception):
    """The router was stopped while the request was open: the connection breaks."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a user of the router asks for."""

    text: str
    #: In tokens, special ones included; a router with a tokenizer counts for itself.
    input_length: int
    #: None: as many as fit.
    max_new_tokens: int | None
    #: The tokens themselves, where known: the router shares the blocks of equal beginnings.
    ids: tuple[int, ...] = ()
    truncate: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_sequences: tuple[str, ...] = ()
    #: No router lets its users ask for this; tests do, for texts of a known length.
    ignore_eos_token: bool = False
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    model: str = OWN_MODEL
    #: A regular expression: JSON schemas and tools reach a shard as such.
    grammar: str = ""

    @property
    def adapter_id(self) -> str | None:
        return None if self.model == OWN_MODEL else self.model

    @property
    def chooser(self) -> Sampling:
        """The sampling parameters that a shard is sent."""
        if not self.grammar:
            return self.sampling
        return self.sampling.constrained(self.grammar, GrammarType.REGEX)


@dataclass(frozen=True)
class Token:
    id: int
    text: str
    logprob: float
    is_special: bool
    top: TokenRun | None


@dataclass(frozen=True)
class Result:
    """A finished request."""

    tokens: tuple[Token, ...]
    prefill: TokenRun | None
    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int | None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


class Stream:
    """The tokens of one request as they come. Dropping it is the only way to cancel."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Token | Result | BaseException] = asyncio.Queue()
        self._tokens: list[Token] = []
        self._prefill: TokenRun | None = None
        self._texts: list[str] = []
        #: How it ended, once it has and unless its reader left before.
        self.outcome: Result | BaseException | None = None
        self.closed = False

    def drop(self) -> None:
        """Hang up, as a client does that goes away."""
        if not self.over:
            self._events.put_nowait(HungUp())
        self.closed = True

    async def result(self) -> Result:
        """Read to the end.

        Raises:
            GenerationError: a step failed.
            HungUp: the stream was dropped.
            RequestLost: the shard forgot the request.
            RouterPanic, BrokenPromise: the router died.
            RouterStopped: it was stopped.
        """
        while True:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Result):
                return event

    async def __aiter__(self) -> AsyncIterator[Token]:
        while True:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Result):
                return
            yield event

    # --- the router's side --------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    @property
    def over(self) -> bool:
        """Whether nothing more will come, or nobody listens."""
        return self.outcome is not None or self.closed

    def put_prefill(self, run: TokenRun) -> None:
        self._prefill = run

    def put_token(self, token: Token) -> None:
        self._tokens.append(token)
        self._events.put_nowait(token)

    def put_text(self, text: str) -> None:
        """The text of one generation; a request that is sent again has several."""
        self._texts.append(text)

    def finish(self, last: GeneratedText) -> None:
        """End with what was put, for the reason of the last generation.

        A router counts the tokens itself only where it sent a request again.
        """
        again = len(self._texts) > 1
        self._end(
            Result(
                tuple(self._tokens),
                self._prefill,
                "".join(self._texts),
                len(self._tokens) if again else last.generated_tokens,
                FinishReason(last.finish_reason),
                last.seed,
            )
        )

    def fail(self, error: BaseException) -> None:
        self._end(error)

    def _end(self, event: Result | BaseException) -> None:
        if self.outcome is not None:
            raise AssertionError("a stream ended twice")
        self.outcome = event
        self._events.put_nowait(event)
