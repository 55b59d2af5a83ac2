"""Where the engine's outputs go in a front end: each request has a sink for its own sequences.

A sink runs code that reads what a model wrote: detokenizers, stop sequences, parsers of calls.
Whatever that code raises ends its own request and nothing else, and is caught here alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import ParamSpec, Protocol

from tokenpod.core.outputs import (
    Drafted,
    Failure,
    FailureCode,
    FinishCode,
    Started,
    StepOutputs,
    Top,
    Vectors,
)
from tokenpod.service.calls.errors import Internal

log = logging.getLogger("tokenpod.client")

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
        log.error("internal error while a text was read", exc_info=error, extra=extra)
        # The traceback's frames hold the call's texts.
        error.with_traceback(None)
        self._abort([sequence_id])
        sink.on_fault(sequence_id, fault)
