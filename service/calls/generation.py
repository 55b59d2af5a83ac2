"""One request that generates text, from its first token to its last: samples and their texts.

A `Generation` is the engine client's sink for a request. It takes tokens as they come (detokenises
them, looks for stop sequences) and keeps what the stream has not sent yet, so a slow reader costs
memory in proportion to what it lags behind, and a stop sequence ends a sample at once. A reader
that lags behind by more than `UNREAD_BYTES` loses its stream, so that others keep their memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from tokenpod.core.outputs import Drafted, Failure, FailureCode, FinishCode, Started, Top, Vectors
from tokenpod.core.requests import Request
from tokenpod.service.calls.errors import (
    Internal,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    engine_failure,
)
from tokenpod.service.calls.sample import Ending, Sample

#: Bytes that may wait for a stream's reader. What gRPC holds for it (a message being sent, its
#: write buffer of 64 kB) comes on top; together it stays under 256 kB.
UNREAD_BYTES = 128 * 1024
#: How often a call's memory is counted while its reader keeps up, in messages of the engine.
_COUNT_EVERY = 32


class Carrier(Protocol):
    """Has handed a generation's request to the engine, and counts what it holds."""

    @property
    def step_at(self) -> int:
        """CLOCK_MONOTONIC nanoseconds at which the step being handed over settled."""

    def abort(self, sequence_ids: list[int], *, stopped: bool = False) -> None:
        """End these in the engine; `stopped`: their outputs are complete. Unknown ids: nothing."""

    def begun(self) -> None:
        """The prompt has been computed; told once."""

    def keeps(self, size: int) -> None:
        """Of the answer so many bytes are kept; told now and then."""


class Generation:
    """All samples of one request, as the engine brings them.

    Args:
        request: what the engine was asked, without the constraint.
        samples: one per sequence id of the request, in order.
        carrier: who has handed the request to the engine.
        streamed: the reader is to keep up, or loses its stream.
        failures_last: a sample that fails ends the call after the other samples.
        constraint_field: where the client put the constraint, for what the engine says of it; "":
            there is none.
    """

    def __init__(
        self,
        request: Request,
        samples: Sequence[Sample],
        carrier: Carrier,
        *,
        streamed: bool,
        failures_last: bool = False,
        constraint_field: str = "",
    ) -> None:
        self.request = request
        self.samples = samples
        self.started: Started | None = None
        self.failure: ServiceError | None = None
        #: What the call ends with once its other samples have ended.
        self.late_failure: ServiceError | None = None
        self._failures_last = failures_last
        self._streamed = streamed
        self._carrier = carrier
        self._constraint_field = constraint_field
        self._wakes = 0
        #: Something has come since `news` has returned; and the reader that waits for more.
        self._fresh = False
        self._waiter: asyncio.Future[None] | None = None
        self._by_id = {sample.sequence_id: sample for sample in samples}

    @property
    def finished(self) -> bool:
        """Whether every sample has ended, or failed while others went on."""
        return all(sample.ending or sample.failed for sample in self.samples)

    @property
    def ran_seconds(self) -> float | None:
        """From the prompt's first step to the last token so far; None: there is no token yet."""
        if self.started is None:
            return None
        last = max(sample.last_token_at for sample in self.samples)
        return max(last - self.started.began_at, 0) / 1e9

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose keys and values were still in the cache."""
        return self.started.cached_tokens if self.started else 0

    @property
    def generated_tokens(self) -> int:
        """Tokens of all samples so far."""
        return sum(sample.generated for sample in self.samples)

    @property
    def reasoning_tokens(self) -> int:
        """Those of them that were reasoning."""
        return sum(sample.reasoning_tokens for sample in self.samples)

    @property
    def drafted_tokens(self) -> int:
        """Tokens that were drafted for all samples."""
        return sum(sample.drafted for sample in self.samples)

    @property
    def accepted_tokens(self) -> int:
        """Those of them that are output."""
        return sum(sample.accepted for sample in self.samples)

    def best(self, n: int) -> Sequence[Sample]:
        """The `n` samples of highest mean log probability; where they are all, in their order."""
        if len(self.samples) <= n:
            return self.samples
        return sorted(self.samples, key=lambda sample: -sample.mean_logprob)[:n]

    @property
    def unread_bytes(self) -> int:
        """Bytes that wait for the stream's reader."""
        return sum(sample.unread_bytes for sample in self.samples)

    async def news(self) -> None:
        """Wait until something has come; raises the failure, if that is what came.

        For one reader.
        """
        if not self._fresh:
            # A bare future: an Event costs twice as much, once a token.
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._fresh = False
        if self.failure is not None:
            raise self.failure

    def cancel(self) -> None:
        """Stop what still runs."""
        running = [s.sequence_id for s in self.samples if s.ending is None and not s.failed]
        if running:
            self._carrier.abort(running)

    def end(self) -> None:
        """End what still runs; what has come so far is the answer."""
        self.cancel()
        for sample in self.samples:
            if sample.ending is None and not sample.failed:
                sample.ending = Ending(FinishCode.ABORTED)
        self.wake()

    # -- Sink ----------------------------------------------------------------------------------

    def on_started(self, started: Started) -> None:
        """The first sample to start stands for the prompt."""
        if self.started is None:
            self.started = started
            self._carrier.begun()

    def on_drafted(self, drafted: Drafted) -> None:
        """A sample had drafts in the step whose tokens come next."""
        sample = self._by_id[drafted.sequence_id]
        sample.drafted += drafted.drafted
        sample.drafts_to_come = drafted.accepted

    def on_token(
        self, sequence_id: int, token_id: int, logprob: float, finish: FinishCode, top: Top | None
    ) -> None:
        """One token of one sample."""
        sample = self._by_id[sequence_id]
        if sample.ending is not None:
            return
        sample.push(token_id, logprob, finish, top, self._carrier.step_at)
        if sample.ending is not None and not finish:
            # A stop sequence: the engine does not know yet.
            self._carrier.abort([sequence_id], stopped=True)

    def on_vectors(self, vectors: Vectors) -> None:
        """A request for text has none."""

    def on_satisfied(self, sequence_id: int, *, whole: bool) -> None:
        """Whether a sequence that ends conforms to its constraint."""
        self._by_id[sequence_id].satisfied = whole

    def on_failure(self, failure: Failure) -> None:
        """A failure of one sample is the call's: there is no partial answer to a request.

        Where the call is to go on with the others, it does unless none of them is left.
        """
        error = engine_failure(failure)
        if self._constraint_field and isinstance(error, InvalidArgument):
            problem = failure.message.removeprefix("constraint: ")
            error = InvalidArgument(self._constraint_field, problem)
        if self._failures_last and failure.code is FailureCode.DATA_LOSS:
            self._by_id[failure.sequence_id].failed = True
            # Also of the last: who writes the stream may look at samples before it hears of it.
            self.late_failure = error
            if not all(sample.failed for sample in self.samples):
                return
        self.failure = error

    def on_fault(self, sequence_id: int, fault: Internal) -> None:
        """The code that reads a sample's text has raised: the whole call ends with `fault`."""
        del sequence_id
        self.failure = fault
        self.cancel()
        self._notify()

    def wake(self) -> None:
        """All of a message of the engine has been handed over: wake the reader."""
        # The reader has not yet taken what came before: only then can much be unread.
        if self._fresh and self._streamed and self.unread_bytes > UNREAD_BYTES:
            self._give_up_reader()
        self._wakes += 1
        if self._fresh or self._wakes % _COUNT_EVERY == 0:
            self._carrier.keeps(sum(sample.kept_bytes for sample in self.samples))
        # Who wants the answer as a whole has nothing to do before its end.
        if self._streamed or self._wakes == 1 or self.failure is not None or self.finished:
            self._notify()

    def _notify(self) -> None:
        self._fresh = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _give_up_reader(self) -> None:
        self.failure = ResourceExhausted(
            f"the client has left more than {UNREAD_BYTES // 1024} KiB of its stream unread",
            limit="unread_bytes",
        )
        self.cancel()
        for sample in self.samples:
            sample.drop()
