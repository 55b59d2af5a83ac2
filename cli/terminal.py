"""What the client commands print: text as it comes, JSON lines, plain tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import TextIO

from google.protobuf.message import Message

from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import GenerateOnceResponse

#: Fewer tokens than these have no rate that would come out the same the next time.
_LEAST_RATED = 16


class LiveText:
    """Text on `out` as it comes, one closing line on `notes`.

    Several samples come interleaved: the first unfinished one is shown live and the others wait,
    each below a line with its index. Of one sample, what the model thinks goes to `notes`.

    Args:
        out, notes: where text and closing line go.
        several: whether samples are to be told apart.
    """

    def __init__(
        self, *, several: bool, out: TextIO = sys.stdout, notes: TextIO = sys.stderr
    ) -> None:
        self._out, self._notes, self._several = out, notes, several
        self._live: int | None = None
        self._waiting: dict[int, str] = {}
        self._finished: dict[int, pb.Finished] = {}
        self._ends_line = True
        self._began = time.monotonic()
        self._first: float | None = None
        self._pieces = 0

    def show(self, message: pb.GenerateResponse | GenerateOnceResponse) -> None:
        """Print what this event adds, or a whole answer."""
        if isinstance(message, GenerateOnceResponse):
            for result in message.results:
                self._text(result.sample_index, result.text)
                self._finish(result)
            return
        kind = message.WhichOneof("event")
        if kind == "tokens":
            self._first = self._first or time.monotonic()
            self._pieces += 1
            if not self._several:
                # Not of the answer, but what the reader waits for.
                self._notes.write(message.tokens.reasoning)
                self._notes.flush()
            self._text(message.tokens.sample_index, message.tokens.text)
        elif kind == "finished":
            self._text(message.finished.sample_index, "")
            self._finish(message.finished)

    def close(self) -> None:
        """The closing line: tokens, tokens/s, time to first token, finish reason."""
        self._end_line()
        ended = time.monotonic()
        samples = [self._finished[i] for i in sorted(self._finished)]
        tokens = sum(s.generated_token_count for s in samples)
        parts = [f"{tokens} token{'' if tokens == 1 else 's'}"]
        if self._first is not None:
            # The first tokens came with the prompt's computation, which is not the rate's; what
            # comes at once at the end, as from a beam search, has none.
            rated = tokens - len(samples)
            if rated >= _LEAST_RATED and self._pieces > len(samples) and ended > self._first:
                parts.append(f"{rated / (ended - self._first):.1f} tokens/s")
            parts.append(f"first token after {self._first - self._began:.3f} s")
        parts.append(", ".join(finish_text(s) for s in samples) or "no sample finished")
        print(f"[{'; '.join(parts)}]", file=self._notes, flush=True)

    def _text(self, index: int, text: str) -> None:
        if self._live is None and index not in self._finished:
            self._show(index)
        if index == self._live:
            self._write(text)
        else:
            self._waiting[index] = self._waiting.get(index, "") + text

    def _finish(self, finished: pb.Finished) -> None:
        self._finished[finished.sample_index] = finished
        self._next()

    def _next(self) -> None:
        """Go on with the lowest waiting sample once the live one has finished."""
        while self._live in self._finished:
            self._live = None
            if self._waiting:
                index = min(self._waiting)
                self._show(index)
                self._write(self._waiting.pop(index))

    def _show(self, index: int) -> None:
        self._live = index
        if self._several:
            self._end_line()
            self._write(f"--- sample {index} ---\n")

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._ends_line = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._ends_line:
            self._write("\n")


def finish_text(finished: pb.Finished) -> str:
    """Why a sample ended, in lower case: `length`, `stop sequence '\\n\\n'`."""
    name = pb.FinishReason.Name(finished.finish_reason).removeprefix("FINISH_REASON_")
    reason = name.lower().replace("_", " ")
    match finished.WhichOneof("stop"):
        case "stop_sequence":
            return f"{reason} {finished.stop_sequence!r}"
        case "stop_token_id":
            return f"{reason} (token {finished.stop_token_id})"
    return reason


def json_line(message: Message, **more: object) -> str:
    """One line of JSON: `more`, then every field, so that readers need no defaults."""
    # It is half of protobuf's import, and text needs none of it.
    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps({**more, **fields}, ensure_ascii=False)


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Names and values in two columns."""
    pairs = [(name, _plain(value)) for name, value in rows]
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else str(value)
