"""What a sample's turn of a chat has come to: its reasoning and its calls, besides its text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenpod.service.calls.chats import ToolCall
from tokenpod.service.calls.parts import Kind, Part
from tokenpod.service.text.parsers.turn import TurnParser


class Turn:
    """Keeps what a parser tells, besides text, for the end of the stream.

    Args:
        parser: fresh.
        keep: reasoning and calls are wanted at the end.
    """

    def __init__(self, parser: TurnParser, *, keep: bool) -> None:
        self._parser = parser
        self._keep = keep
        self._reasoning = bytearray()
        self._calls: list[tuple[Part, bytearray]] = []
        #: Calls that have begun.
        self.calls_begun = 0

    @property
    def reasons(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._parser.reasons

    @property
    def over(self) -> bool:
        """Whether the model may write no more."""
        return self._parser.over

    @property
    def reasoning(self) -> str:
        """All reasoning so far; empty if it is not kept."""
        return self._reasoning.decode()

    @property
    def calls(self) -> list[ToolCall]:
        """All calls so far; empty if they are not kept."""
        return [ToolCall(p.call_id, p.name, args.decode()) for p, args in self._calls]

    @property
    def kept_bytes(self) -> int:
        """Bytes of reasoning and calls."""
        return len(self._reasoning) + sum(len(arguments) for _, arguments in self._calls)

    def push(self, text: str) -> Sequence[Part]:
        """What more text brings."""
        return self._noted(self._parser.push(text)) if text else ()

    def finish(self) -> Sequence[Part]:
        """What is still held, at the end of the text."""
        return self._noted(self._parser.finish())

    def _noted(self, parts: Sequence[Part]) -> Sequence[Part]:
        for part in parts:
            if part.call_id:
                self.calls_begun += 1
            if part.kind is Kind.TEXT or not self._keep:
                continue
            encoded = part.text.encode()
            if part.kind is Kind.REASONING:
                self._reasoning += encoded
            elif part.call_id:
                self._calls.append((part, bytearray(encoded)))
            else:
                self._calls[-1][1].extend(encoded)
        return parts
