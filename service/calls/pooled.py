"""The texts of one request for numbers, from the engine's first word of them to its last."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenpod.core.outputs import Drafted, Failure, FinishCode, Started, Top, Vectors
from tokenpod.core.requests import Request
from tokenpod.service.calls.errors import Internal, ServiceError, engine_failure

Floats = npt.NDArray[np.float32]


class Ender(Protocol):
    """Has handed texts to the engine."""

    def abort(self, sequence_ids: list[int]) -> None:
        """End these in the engine. Unknown ids: nothing."""

    def begun(self) -> None:
        """The last text has begun to be read."""


class PooledTexts:
    """The engine client's sink for the texts of one call: they end together.

    Args:
        requests: one for each text.
        ender: who has handed them to the engine.
    """

    def __init__(self, requests: Sequence[Request], ender: Ender) -> None:
        self.requests = requests
        self.failure: ServiceError | None = None
        self.started: list[Started] = []
        self._ender = ender
        #: By sequence, and whether they are weights of tokens.
        self._vectors: dict[tuple[int, bool], Vectors] = {}
        self._left = {request.sequence_ids[0] for request in requests}
        self._over = asyncio.Event()

    @property
    def tokens(self) -> int:
        """Of all texts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def began_at(self) -> int | None:
        """When the first step with any of them was planned, CLOCK_MONOTONIC ns; None: none was."""
        return min((each.began_at for each in self.started), default=None)

    async def all(self) -> list[Floats]:
        """[count, width] of each text, in order. Raises what the call fails with."""
        await self._over.wait()
        if self.failure is not None:
            raise self.failure
        return self._found(weights=False)

    @property
    def weights(self) -> list[Floats]:
        """[tokens, 1] of each text that has been read, in order, where they were asked for."""
        return self._found(weights=True)

    def _found(self, *, weights: bool) -> list[Floats]:
        found = (self._vectors[each.sequence_ids[0], weights] for each in self.requests)
        return [
            np.frombuffer(each.numbers, "<f4").reshape(each.count, each.width) for each in found
        ]

    def cancel(self) -> None:
        """Stop what still runs."""
        if self._left:
            self._ender.abort([*self._left])
            self._left.clear()

    # -- Sink ----------------------------------------------------------------------------------

    def on_started(self, started: Started) -> None:
        """A text has been read."""
        self.started.append(started)
        if len(self.started) == len(self.requests):
            self._ender.begun()

    def on_vectors(self, vectors: Vectors) -> None:
        """What was asked of a text."""
        self._vectors[vectors.sequence_id, vectors.weights] = vectors

    def on_drafted(self, drafted: Drafted) -> None:
        """Nothing is drafted."""

    def on_token(
        self, sequence_id: int, token_id: int, logprob: float, finish: FinishCode, top: Top | None
    ) -> None:
        """The end of a text."""
        if finish:
            self._left.discard(sequence_id)

    def on_satisfied(self, sequence_id: int, *, whole: bool) -> None:
        """Nothing is constrained."""

    def on_failure(self, failure: Failure) -> None:
        """The failure of one text is the call's: there is no partial answer."""
        self._left.discard(failure.sequence_id)
        self._fail(engine_failure(failure))

    def on_fault(self, sequence_id: int, fault: Internal) -> None:
        """Something here has raised."""
        self._left.discard(sequence_id)
        self._fail(fault)

    def wake(self) -> None:
        """All of a message of the engine has been handed over."""
        if not self._left:
            self._over.set()

    def _fail(self, error: ServiceError) -> None:
        if self.failure is None:
            self.failure = error
        self.cancel()
        self._over.set()
