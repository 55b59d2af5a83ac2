"""The receiving end of a request: what a router's HTTP handler would read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from router.records import FinishReason, GeneratedText, Sampling, TokenRun


class GenerationError(Exception):
    """The step that this request was in failed (HTTP 424)."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a user of the router asks for. `input_length` is in tokens, special ones included."""

    text: str
    input_length: int
    max_new_tokens: int
    #: The tokens themselves, where known: the router shares the blocks of equal beginnings.
    ids: tuple[int, ...] = ()
    truncate: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_sequences: tuple[str, ...] = ()
    ignore_eos_token: bool = False
    prefill_logprobs: bool = False
    top_n_tokens: int = 0


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
        self._ended = False
        self.closed = False

    def drop(self) -> None:
        """Hang up, as a client does that goes away."""
        self.closed = True

    async def result(self) -> Result:
        """Read to the end.

        Raises:
            GenerationError: a step failed.
            RouterPanic: the router died.
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
    def started(self) -> bool:
        return bool(self._tokens)

    @property
    def over(self) -> bool:
        """Whether nothing more will come, or nobody listens."""
        return self._ended or self.closed

    def put_prefill(self, run: TokenRun) -> None:
        self._prefill = run

    def put_token(self, token: Token) -> None:
        self._tokens.append(token)
        self._events.put_nowait(token)

    def finish(self, text: GeneratedText, reason: FinishReason) -> None:
        self._end(
            Result(
                tuple(self._tokens),
                self._prefill,
                text.text,
                text.generated_tokens,
                reason,
                text.seed,
            )
        )

    def fail(self, error: BaseException) -> None:
        self._end(error)

    def _end(self, event: Result | BaseException) -> None:
        if self._ended:
            raise AssertionError("a stream ended twice")
        self._ended = True
        self._events.put_nowait(event)
