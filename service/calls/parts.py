"""Pieces of what a model has written, each of one kind."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a piece is."""

    TEXT = 0
    REASONING = 1
    #: Of the arguments of a tool's call.
    CALL = 2


class Part(NamedTuple):
    """A piece; those of one kind, and of one call, add up.

    Args:
        kind: what it is.
        text: of that; of a call, its arguments, as JSON text that need not be valid.
        call: which call of the turn, from 0.
        call_id, name: the call's, in its first piece.
    """

    kind: Kind
    text: str
    call: int = 0
    call_id: str = ""
    name: str = ""


class Parts:
    """Pieces in order, as few as they can be."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        #: Of the last part, which still grows.
        self._texts: list[str] = []

    def add(self, part: Part) -> None:
        """One more piece; empty ones are left out unless a call begins."""
        if not part.text and not part.call_id:
            return
        last = self._parts[-1] if self._parts else None
        joins = last is not None and (part.kind, part.call) == (last.kind, last.call)
        if joins and not part.call_id:
            self._texts.append(part.text)
            return
        self._close()
        self._parts.append(part)
        self._texts = [part.text]

    def text(self, text: str) -> None:
        """One more piece of text."""
        self.add(Part(Kind.TEXT, text))

    def take(self) -> list[Part]:
        """All of them; from here on others follow."""
        self._close()
        taken, self._parts = self._parts, []
        return taken

    def _close(self) -> None:
        if self._parts and len(self._texts) > 1:
            self._parts[-1] = self._parts[-1]._replace(text="".join(self._texts))
        self._texts = []
