"""One request that generates text, from its first token to its last: samples and their texts.

A `Generation` is the engine client's sink for a request. It takes tokens as they come (detokenises
them, looks for stop sequences) and keeps what the stream has not sent yet, so a slow reader costs
memory in proportion to what it lags behind, and a stop sequence ends a sample at once. A reader
that lags behind by more than `UNREAD_BYTES` loses its stream, so that others keep their memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenpod.core.outputs import Drafted, Failure, FailureCode, FinishCode, Started, Top
from tokenpod.core.requests import Request
from tokenpod.service.rpc.errors import (
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    engine_failure,
)
from tokenpod.service.serving.deltas import Delta, Unread
from tokenpod.service.serving.turns import Turn
from tokenpod.service.text.decoding import Detokenizer
from tokenpod.service.text.parsers.parts import Kind, Part
from tokenpod.service.text.stops import StopMatcher

#: Bytes that may wait for a stream's reader. What gRPC holds for it (a message being sent, its
#: write buffer of 64 kB) comes on top; together it stays under 256 kB.
UNREAD_BYTES = 128 * 1024
#: How often a call's memory is counted while its reader keeps up, in messages of the engine.
_COUNT_EVERY = 32


class Abort(Protocol):
    """Ends sequences in the engine; `stopped`: their outputs are complete."""

    def __call__(self, sequence_ids: list[int], *, stopped: bool = False) -> None:
        """End these; unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sample ended."""

    reason: FinishCode
    stop_sequence: str | None = None
    stop_token_id: int | None = None


class Sample:
    """One sequence's text and tokens.

    Args:
        index: which sample of the request.
        sequence_id: its name in the engine.
        detokenizer: fresh, with the prompt's end as context; None: nobody reads the text.
        stops: fresh, with the request's stop sequences.
        min_new_tokens: stop sequences count from this many tokens on.
        streamed: hand out what comes in pages; else the whole output as one.
        offsets: note where each token's text begins.
        keep_text: the whole text is wanted at the end.
        turn: tells reasoning and calls from the text; None: all of it is text.
    """

    def __init__(
        self,
        *,
        index: int,
        sequence_id: int,
        detokenizer: Detokenizer | None,
        stops: StopMatcher,
        min_new_tokens: int,
        streamed: bool,
        offsets: bool = False,
        keep_text: bool = True,
        turn: Turn | None = None,
    ) -> None:
        self.turn = turn
        #: Tokens of reasoning, its marks included.
        self.reasoning_tokens = 0
        self.index = index
        self.sequence_id = sequence_id
        self.generated = 0
        self.cumulative_logprob = 0.0
        #: Tokens that were drafted, and those of them that are its output.
        self.drafted = self.accepted = 0
        #: How many of the tokens that come next were drafted.
        self.drafts_to_come = 0
        self.ending: Ending | None = None
        #: It has no ending: the model failed.
        self.failed = False
        #: Whether the text conforms to its constraint; None: it has none, or a stop cut it.
        self.satisfied: bool | None = None
        self.first_token_at = 0
        self.last_token_at = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_new_tokens = min_new_tokens
        #: Code points that the detokenizer has brought; None: nobody asks for them.
        self._written = 0 if offsets else None
        self._keep_text = keep_text
        self._text = bytearray()
        self._unread = Unread(paged=streamed)

    @property
    def text(self) -> str:
        """All text that is safe to send; empty if it is not kept."""
        return self._text.decode()

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of the tokens: what `best_of` ranks by."""
        return self.cumulative_logprob / max(self.generated, 1)

    def score(self, length_penalty: float) -> float:
        """What the results of a beam search are ranked by."""
        divisor: float = float(self.generated) ** length_penalty
        return self.cumulative_logprob / divisor

    def push(
        self, token_id: int, logprob: float, finish: FinishCode, top: Top | None, at: int
    ) -> None:
        """Take one token, or none (-1). Sets `ending` when the sample is over."""
        if not finish:
            self._note(token_id, logprob, top, at)
            self._read(token_id)
            if self._stops.matched is not None:
                self._end(Ending(FinishCode.STOP_TOKEN, stop_sequence=self._stops.matched))
            elif self.turn is not None and self.turn.over:
                self._end(Ending(FinishCode.EOS))
            return
        self._push_last(token_id, logprob, finish, top, at)

    def take(self) -> Delta:
        """The oldest page of what has come and was not taken yet."""
        return self._unread.take()

    @property
    def has_news(self) -> bool:
        """Whether `take` would bring anything."""
        return bool(self._unread)

    @property
    def unread_bytes(self) -> int:
        """Bytes that wait to be taken."""
        return self._unread.size

    @property
    def kept_bytes(self) -> int:
        """Bytes of the text so far, which ends the stream, and of what waits to be taken."""
        kept = self._unread.size + len(self._text)
        return kept if self.turn is None else kept + self.turn.kept_bytes

    def drop(self) -> None:
        """Forget what was not taken."""
        self._unread.clear()

    def _push_last(
        self, token_id: int, logprob: float, finish: FinishCode, top: Top | None, at: int
    ) -> None:
        if token_id >= 0:
            self._note(token_id, logprob, top, at)
        if token_id >= 0 and finish not in (FinishCode.EOS, FinishCode.STOP_TOKEN):
            self._read(token_id)
        if self._stops.matched is None and self._detokenizer is not None:
            self._emit(self._stops.push(self._detokenizer.finish()))
        if self._stops.matched is not None:
            self._end(Ending(FinishCode.STOP_TOKEN, stop_sequence=self._stops.matched))
        else:
            self._emit(self._stops.finish())
            stop_token = token_id if finish is FinishCode.STOP_TOKEN else None
            self._end(Ending(finish, stop_token_id=stop_token))

    def _end(self, ending: Ending) -> None:
        """The text is whole."""
        if self.turn is not None:
            self._tell(self.turn.finish())
        self.ending = ending

    def _read(self, token_id: int) -> None:
        """Emit what a token brings of the text."""
        if self._detokenizer is None:
            return
        text = self._detokenizer.push(token_id)
        if self._written is not None:
            self._written += len(text)
        active = self.generated >= self._min_new_tokens
        reasoned = self.turn is not None and self.turn.reasons
        self._emit(self._stops.push(text, active=active))
        if self.turn is not None and (reasoned or self.turn.reasons):
            self.reasoning_tokens += 1

    def _note(self, token_id: int, logprob: float, top: Top | None, at: int) -> None:
        self.generated += 1
        if self.drafts_to_come:
            self.drafts_to_come -= 1
            self.accepted += 1
        self.cumulative_logprob += logprob
        self.first_token_at = self.first_token_at or at
        self.last_token_at = at
        self._unread.add_token(token_id, logprob, top, self._written)

    def _emit(self, text: str) -> None:
        if self.turn is not None:
            self._tell(self.turn.push(text))
        elif text:
            encoded = text.encode()
            if self._keep_text:
                self._text += encoded
            self._unread.add_text(encoded)

    def _tell(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.kind is Kind.TEXT and self._keep_text:
                self._text += part.text.encode()
            self._unread.add_part(part)


class Generation:
    """All samples of one request, as the engine brings them.

    Args:
        request: what the engine was asked.
        samples: one per sequence id of the request, in order.
        streamed: the reader is to keep up, or loses its stream.
        failures_last: a sample that fails ends the call after the other samples.
        step_at: CLOCK_MONOTONIC nanoseconds at which the step being handed over settled.
        abort: stops sequences in the engine.
        on_begin: called once, when the prompt has been computed.
        on_size: called now and then with the bytes of the answer that are kept.
        constraint_field: where the client put the constraint, for what the engine says of it.
    """

    def __init__(
        self,
        request: Request,
        samples: Sequence[Sample],
        *,
        streamed: bool,
        failures_last: bool = False,
        step_at: Callable[[], int],
        abort: Abort,
        on_begin: Callable[[], None],
        on_size: Callable[[int], None] = lambda size: None,
        constraint_field: str = "constraint",
    ) -> None:
        self.request = request
        self.samples = samples
        self.started: Started | None = None
        self.failure: ServiceError | None = None
        #: What the call ends with once its other samples have ended.
        self.late_failure: ServiceError | None = None
        self._failures_last = failures_last
        self._streamed = streamed
        self._step_at = step_at
        self._abort = abort
        self._on_begin = on_begin
        self._on_size = on_size
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
            self._abort(running)

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
            self._on_begin()

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
        sample.push(token_id, logprob, finish, top, self._step_at())
        if sample.ending is not None and not finish:
            # A stop sequence: the engine does not know yet.
            self._abort([sequence_id], stopped=True)

    def on_satisfied(self, sequence_id: int, *, whole: bool) -> None:
        """Whether a sequence that ends conforms to its constraint."""
        self._by_id[sequence_id].satisfied = whole

    def on_failure(self, failure: Failure) -> None:
        """A failure of one sample is the call's: there is no partial answer to a request.

        Where the call is to go on with the others, it does unless none of them is left.
        """
        error = engine_failure(failure)
        if self.request.constraint is not None and isinstance(error, InvalidArgument):
            problem = failure.message.removeprefix("constraint: ")
            error = InvalidArgument(self._constraint_field, problem)
        if self._failures_last and failure.code is FailureCode.DATA_LOSS:
            self._by_id[failure.sequence_id].failed = True
            if not all(sample.failed for sample in self.samples):
                self.late_failure = error
                return
        self.failure = error

    def wake(self) -> None:
        """All of a message of the engine has been handed over: wake the reader."""
        # The reader has not yet taken what came before: only then can much be unread.
        if self._fresh and self._streamed and self.unread_bytes > UNREAD_BYTES:
            self._give_up_reader()
        self._wakes += 1
        if self._fresh or self._wakes % _COUNT_EVERY == 0:
            self._on_size(sum(sample.kept_bytes for sample in self.samples))
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
