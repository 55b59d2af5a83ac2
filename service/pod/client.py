"""The asyncio side of the engine link: dispatches the engine's outputs to requests.

One message per step arrives for all sequences, and each request's `Sink` gets its part of it.
Nothing waits for a slow client: a sink only stores what has come, and is woken once per message. A
sink runs code that reads what a model wrote: detokenizers, stop sequences, parsers of calls.
Whatever that code raises ends its own request and nothing else, and is caught in `Sinks` alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol

import msgspec

from tokenpod.core.async_link import AsyncLink
from tokenpod.core.images import DropImages, EncodeImages, ImagesEncoded, PreparedImage
from tokenpod.core.messages import (
    Abort,
    AdapterDone,
    AdapterFacts,
    AdapterList,
    Advance,
    Ask,
    Broken,
    CacheEvents,
    FromEngine,
    LoadAdapter,
    Loading,
    Ready,
    UnloadAdapter,
)
from tokenpod.core.outputs import (
    Advanced,
    Drafted,
    Failure,
    FailureCode,
    FinishCode,
    Load,
    Started,
    StepOutputs,
    Top,
    Vectors,
)
from tokenpod.core.requests import Request
from tokenpod.service.calls.errors import RETRY_SECONDS, Internal, Unavailable

log = logging.getLogger("tokenpod")
_sink_log = logging.getLogger("tokenpod.client")

_LOST = "the model's engine was lost; retry"
#: The load of an engine that has not reported one yet.
NO_LOAD = Load(0, 0, 0, 0, 0, 0)
#: Weight of the newest step in the usual step time.
_SMOOTHING = 0.05
#: Ids that one front-end process has to itself.
_IDS_OF_A_LIFE = 1 << 40


class EngineLost(Exception):
    """The engine is gone; the text is for the operator.

    Args:
        why: the text.
        fault: by its own word, it would be lost again with the same settings.
        silent: it gave no reason; its process's end may show one.
    """

    def __init__(self, why: str, *, fault: bool = False, silent: bool = False) -> None:
        super().__init__(why)
        self.fault = fault
        self.silent = silent


class EngineClient(AsyncLink[FromEngine]):
    """Speaks to one engine process, whose end of the link closes with it.

    Args:
        on_loading: called with the progress while weights are read.
        index, count: which front end of how many this is. It names sequences by the numbers that
            leave `index` when divided by `count`: the engine knows by them whose they are.
        life: how many front ends have had this index before: none of their ids is used again.
        now: nanoseconds of the clock that all processes share.
    """

    def __init__(
        self,
        *,
        on_loading: Callable[[Loading], None] = lambda loading: None,
        index: int = 0,
        count: int = 1,
        life: int = 0,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(FromEngine)  # type: ignore[arg-type]
        self.load = NO_LOAD
        #: Seconds that a step usually takes, and when (CLOCK_MONOTONIC, ns) the last one settled.
        self.usual_step = 0.0
        self.last_step_at = now()
        #: When the engine last sent a message, also one without a step.
        self.heard_at = now()
        #: When the step under way began at the earliest: with the work, or with the last step.
        self._step_began_at = now()
        self._last_step = 0
        #: When the step now being handed over settled.
        self.step_at = 0
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        #: Done, with EngineLost as its result, once the engine is gone.
        self.lost: asyncio.Future[EngineLost] = asyncio.get_running_loop().create_future()
        #: Called with what has changed in the prefix cache, once somebody has asked for it.
        self.on_cache: Callable[[CacheEvents], None] = lambda events: None
        #: The adapters that the engine told of last; None: those that it began with.
        self.adapters: list[AdapterFacts] | None = None
        #: Called with the adapters that requests can have from now on.
        self.on_adapters: Callable[[AdapterList], None] = lambda told: None
        self._changes: dict[int, asyncio.Future[AdapterDone]] = {}
        self._on_loading = on_loading
        self._now = now
        self._sinks = Sinks(self.abort)
        self._ops: dict[int, asyncio.Future[Advanced]] = {}
        self._next_op = 0
        self._next_sequence = self._next_images = index + count * life * _IDS_OF_A_LIFE
        self._encoding: dict[int, asyncio.Future[ImagesEncoded]] = {}
        self._stride = count

    # -- requests ------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether sequences or router steps wait for the engine."""
        return len(self._sinks) > 0 or bool(self._ops)

    def new_sequence_ids(self, n: int) -> list[int]:
        """Ids that were never used before."""
        first = self._next_sequence
        self._next_sequence += n * self._stride
        return list(range(first, self._next_sequence, self._stride))

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; `sink` gets its outputs until each sequence has finished or failed."""
        self._expect_step()
        # A request that can't be sent raises here, and must not be waited for.
        self.send(request)
        self._sinks.watch(request.reported, sink)

    def abort(self, sequence_ids: Iterable[int], *, stopped: bool = False) -> None:
        """Stop and forget sequences; their sink gets nothing more. Unknown ids are ignored.

        `stopped`: their outputs are complete.
        """
        ids = list(sequence_ids)
        self._sinks.forget(ids)
        if ids:
            self.send(Abort(ids, stopped))

    def ask(self) -> None:
        """Request a message, which shows that the engine is alive."""
        self.send(Ask())

    async def advance(
        self,
        *,
        start: list[Request],
        start_chunks: list[int],
        resume: list[int],
        waits: bool,
        sink: Sink,
    ) -> Advanced:
        """One router step (see `Advance`); `sink` gets its tokens before this returns."""
        self._expect_step()
        op = self.new_op()
        done: asyncio.Future[Advanced] = asyncio.get_running_loop().create_future()
        sequence_ids = [request.sequence_ids[0] for request in start] + resume
        self.send(Advance(op, start, start_chunks, resume, waits))
        self._ops[op] = done
        self._sinks.watch(sequence_ids, sink)
        try:
            return await done
        finally:
            self._ops.pop(op, None)
            self._sinks.forget(sequence_ids)

    def new_op(self) -> int:
        """Names a router's step, or a change of adapters."""
        self._next_op += 1
        return self._next_op

    async def change_adapters(self, change: LoadAdapter | UnloadAdapter) -> AdapterDone:
        """Ask the engine, and wait for what becomes of it. Raises Unavailable if it is lost."""
        done: asyncio.Future[AdapterDone] = asyncio.get_running_loop().create_future()
        self._changes[change.op] = done
        try:
            self.send(change)
            ends: set[asyncio.Future[Any]] = {done, self.lost}
            await asyncio.wait(ends, return_when="FIRST_COMPLETED")
            if not done.done():
                raise Unavailable(_LOST, retry_after=RETRY_SECONDS)
            return done.result()
        finally:
            del self._changes[change.op]

    async def encode_images(
        self, images: Sequence[PreparedImage], answered: Callable[[], None]
    ) -> tuple[int, Sequence[bytes]]:
        """Have the engine compute the rows of a request's images, and keep them.

        Args:
            images: for the tower.
            answered: called once the engine needs their descriptors no more, whatever became of
                the caller.

        Returns: the name under which a `Request` or `drop_images` asks for them, and the keys of
        those that the engine does not know, if they came without tensors: then none is kept.

        Raises Unavailable if the engine is lost, Internal if its tower fails.
        """
        op = self._next_images
        self._next_images += self._stride
        done: asyncio.Future[ImagesEncoded] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda _: answered())
        self._encoding[op] = done
        if self.lost.done():
            self._end_encoding()
        self.send(EncodeImages(op, os.getpid(), [*images]))
        try:
            told = await asyncio.shield(done)
        except asyncio.CancelledError:
            self.drop_images(op)
            raise
        if told.failure is FailureCode.UNAVAILABLE:
            raise Unavailable(_LOST, retry_after=RETRY_SECONDS)
        if told.failure is not None:
            fault = Internal()
            extra = {"error_id": fault.error_id, "reason": told.message}
            log.error("images can't be computed", extra=extra)
            raise fault
        return op, told.missing

    def drop_images(self, op: int) -> None:
        """No request will ask for these."""
        self.send(DropImages(op))

    def _end_encoding(self) -> None:
        for op, done in self._encoding.items():
            if not done.done():
                done.set_result(ImagesEncoded(op, (), FailureCode.UNAVAILABLE))
        self._encoding.clear()

    def give_up(self, why: str) -> None:
        """The engine is lost, though it may not know yet; the text is for the operator."""
        self._lose(EngineLost(why))

    def _expect_step(self) -> None:
        if self.lost.done():
            raise Unavailable(_LOST, retry_after=RETRY_SECONDS)
        if not self.pending:
            # A step's time begins with the work, not with the last step.
            self._step_began_at = self._now()

    # -- the link ------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; nothing once the engine is lost."""
        if not self.lost.done():
            super().send(message)

    def receive(self, message: FromEngine) -> None:
        """Take one message of the engine."""
        match message:
            case StepOutputs():
                self._step(message)
            case CacheEvents():
                self.on_cache(message)
            case AdapterList():
                self.adapters = message.loaded
                self.on_adapters(message)
            case AdapterDone():
                if (change := self._changes.get(message.op)) and not change.done():
                    change.set_result(message)
            case ImagesEncoded():
                if (encoding := self._encoding.pop(message.op, None)) is not None:
                    encoding.set_result(message)
            case Loading():
                self._on_loading(message)
            case Ready():
                self.last_step_at = self.heard_at = self._now()
                self.ready.set_result(message)
            case Broken():
                self._lose(EngineLost(message.message, fault=not message.peer))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._lose(EngineLost("the engine process ended", silent=True))

    # -- steps ---------------------------------------------------------------------------------

    def _step(self, outputs: StepOutputs) -> None:
        self.load = outputs.load
        self.step_at = self.heard_at = outputs.at
        if outputs.step != self._last_step:
            self._note_step(outputs)
        self._sinks.deliver(outputs)
        for advanced in outputs.advanced:
            done = self._ops.get(advanced.op)
            if done is not None and not done.done():
                done.set_result(advanced)

    def _note_step(self, outputs: StepOutputs) -> None:
        """A step has settled."""
        self._last_step = outputs.step
        if outputs.sequence_ids:
            took = (outputs.at - self._step_began_at) / 1e9
            self.usual_step += _SMOOTHING * (took - self.usual_step) if self.usual_step else took
        self.last_step_at = self._step_began_at = outputs.at

    def _lose(self, error: EngineLost) -> None:
        if self.lost.done():
            return
        self.lost.set_result(error)
        if not self.ready.done():
            self.ready.cancel()
        self._sinks.fail_all(FailureCode.UNAVAILABLE, _LOST)
        self._end_encoding()
        for done in self._ops.values():
            if not done.done():
                failure = Failure(-1, FailureCode.UNAVAILABLE, _LOST)
                done.set_result(Advanced(0, failure=failure))


# -- whose outputs these are ---------------------------------------------------------------------

P = ParamSpec("P")

#: Not a fault of a sink: these end the process. Panics of Rust libraries are BaseExceptions too.
_EXITS = (KeyboardInterrupt, SystemExit)


class Sink(Protocol):
    """Receives the outputs of a request's sequences. Called on the event loop; must not block."""

    def on_started(self, started: Started) -> None:
        """The prompt is complete; the first token follows in the same message."""

    def on_drafted(self, drafted: Drafted) -> None:
        """Of a sequence's tokens in this message, which follow, the first ones were drafted."""

    def on_vectors(self, vectors: Vectors) -> None:
        """What was asked of a text that is read; its end follows in the same message."""

    def on_token(
        self, sequence_id: int, token_id: int, logprob: float, finish: FinishCode, top: Top | None
    ) -> None:
        """One token; or none (-1), where the sequence ends without."""

    def on_satisfied(self, sequence_id: int, *, whole: bool) -> None:
        """Whether a constrained sequence conforms; its end follows in the same message."""

    def on_failure(self, failure: Failure) -> None:
        """The engine gave up on a sequence; nothing follows."""

    def on_fault(self, sequence_id: int, fault: Internal) -> None:
        """Another of these methods has raised `fault`; nothing more of the sequence follows.

        Must not raise, so it must not read the text.
        """

    def wake(self) -> None:
        """Everything that this message brought has been handed over."""


class Sinks:
    """The sinks of all sequences that are under way.

    Args:
        abort: ends sequences in the engine and forgets them (see `forget`).
    """

    def __init__(self, abort: Callable[[list[int]], None]) -> None:
        self._abort = abort
        self._by_id: dict[int, Sink] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def watch(self, sequence_ids: Iterable[int], sink: Sink) -> None:
        """Give `sink` what comes of these sequences, until each has finished or failed."""
        for sequence_id in sequence_ids:
            self._by_id[sequence_id] = sink

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop what still comes of these sequences. Unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._by_id.pop(sequence_id, None)

    def deliver(self, outputs: StepOutputs) -> None:
        """Give each sink its parts of a message, then wake those that have got any."""
        by_id = self._by_id
        #: By the sink's id: whom to wake, and a sequence of its request.
        touched: dict[int, tuple[Sink, int]] = {}
        for started in outputs.started:
            if sink := by_id.get(started.sequence_id):
                # Of a beam search it comes long before the tokens.
                touched[id(sink)] = sink, started.sequence_id
                self._call(started.sequence_id, sink, sink.on_started, started)
        for sequence_id, whole in outputs.satisfied.items():
            if sink := by_id.get(sequence_id):
                self._call(sequence_id, sink, sink.on_satisfied, sequence_id, whole=whole)
        for drafted in outputs.drafted:
            if sink := by_id.get(drafted.sequence_id):
                self._call(drafted.sequence_id, sink, sink.on_drafted, drafted)
        for vectors in outputs.vectors:
            if sink := by_id.get(vectors.sequence_id):
                self._call(vectors.sequence_id, sink, sink.on_vectors, vectors)
        tops = {top.at: top for top in outputs.tops}
        entries = zip(
            outputs.sequence_ids,
            outputs.token_ids,
            outputs.logprobs,
            outputs.finishes,
            strict=True,
        )
        for at, (sequence_id, token_id, logprob, finish) in enumerate(entries):
            sink = by_id.get(sequence_id)
            if sink is None:
                continue
            touched[id(sink)] = sink, sequence_id
            code = FinishCode.RUNNING
            if finish:
                del by_id[sequence_id]
                code = FinishCode(finish)
            top = tops.get(at) if tops else None
            self._call(sequence_id, sink, sink.on_token, sequence_id, token_id, logprob, code, top)
        self._fail(outputs.failures, touched)
        self._wake(touched)

    def fail_all(self, code: FailureCode, message: str) -> None:
        """End every sequence."""
        failures = [Failure(sequence_id, code, message) for sequence_id in self._by_id]
        touched: dict[int, tuple[Sink, int]] = {}
        self._fail(failures, touched)
        self._wake(touched)

    def _fail(self, failures: Iterable[Failure], touched: dict[int, tuple[Sink, int]]) -> None:
        for failure in failures:
            if sink := self._by_id.pop(failure.sequence_id, None):
                touched[id(sink)] = sink, failure.sequence_id
                self._call(failure.sequence_id, sink, sink.on_failure, failure)

    def _wake(self, touched: dict[int, tuple[Sink, int]]) -> None:
        for sink, sequence_id in touched.values():
            self._call(sequence_id, sink, sink.wake)

    def _call(
        self,
        sequence_id: int,
        sink: Sink,
        method: Callable[P, None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Call a method of a sink; what it raises ends the sequence."""
        try:
            method(*args, **kwargs)
        except _EXITS:
            raise
        except BaseException as error:
            self._fault(sequence_id, sink, error)

    def _fault(self, sequence_id: int, sink: Sink, error: BaseException) -> None:
        """End a sequence whose sink has raised; the log has the error under the client's id."""
        fault = Internal()
        extra = {"error_id": fault.error_id, "sequence": sequence_id}
        _sink_log.error("internal error while a text was read", exc_info=error, extra=extra)
        # The traceback's frames hold the call's texts.
        error.with_traceback(None)
        self._abort([sequence_id])
        sink.on_fault(sequence_id, fault)
