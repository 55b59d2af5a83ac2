"""The tokens of one step of a router's batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from tokenpod.core.messages import Failure, FailureCode, FinishCode, Started, Top
from tokenpod.service.rpc.errors import ServiceError, engine_failure
from tokenpod.service.serving.calls import ShardGeneration
from tokenpod.service.serving.routed import RoutedSequence

log = logging.getLogger("tokenpod.shard")


class StepSink:
    """Gathers one step's tokens for the sequences of a batch."""

    def __init__(self, sequences: Iterable[RoutedSequence]) -> None:
        self.generations: list[ShardGeneration] = []
        #: The engine is lost.
        self.failure: ServiceError | None = None
        self._by_id = {sequence.sequence_id: sequence for sequence in sequences}
        self._started: dict[int, Started] = {}
        self._news = asyncio.Event()

    async def over(self) -> None:
        """Wait until every sequence has stopped, or the engine is lost."""
        while self.failure is None and not all(s.stopped for s in self._by_id.values()):
            self._news.clear()
            await self._news.wait()

    def on_started(self, started: Started) -> None:
        """A prompt is complete."""
        self._started[started.sequence_id] = started

    def on_token(
        self, sequence_id: int, token_id: int, logprob: float, finish: FinishCode, top: Top | None
    ) -> None:
        """The one token of a sequence in this step."""
        sequence = self._by_id[sequence_id]
        started = self._started.get(sequence_id)
        self.generations.append(sequence.push(token_id, logprob, finish, top, started))

    def on_failure(self, failure: Failure) -> None:
        """A sequence that fails ends alone; without an engine the rpc fails."""
        if failure.code is FailureCode.UNAVAILABLE:
            self.failure = engine_failure(failure)
            return
        sequence = self._by_id[failure.sequence_id]
        extra = {"request": sequence.request_id, "reason": failure.message}
        log.warning("a router's request has failed: it ends with no text", extra=extra)
        self.generations.append(sequence.give_up())

    def wake(self) -> None:
        """All of a message has been handed over."""
        self._news.set()
