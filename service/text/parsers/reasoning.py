"""What a model thinks before it answers, between two marks at the beginning of its turn."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.service.calls.parts import Kind, Part, Parts
from tokenpod.service.text.parsers.grammar import WHITESPACE
from tokenpod.service.text.parsers.marks import earliest, held_back

#: Whitespace at the end of reasoning that is no part of it, at most.
_MOST_SPACE = 64


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks reasoning.

    Args:
        name: for `--reasoning-parser`.
        begin, end: the marks.
        sign: what chat templates of the family have; empty: a mark.
        answers: how an answer begins, behind reasoning and without, where it has a mark too.
    """

    name: str
    begin: str
    end: str
    sign: str = ""
    answers: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Models have special tokens of some."""
        return (self.begin, self.end)

    def matches(self, template: str) -> bool:
        """Whether a model with this chat template writes so."""
        if self.sign:
            return self.sign in template
        return self.begin in template or self.end in template

    def is_open(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has begun the reasoning."""
        return prompt_end.rstrip(WHITESPACE).endswith(self.begin)


class ReasoningParser:
    """Tells the reasoning of one turn from its text.

    Whitespace within the marks, and behind the second, is part of neither.

    Args:
        reasoning_format: the marks.
        inside: the prompt has begun it.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, inside: bool) -> None:
        self._format = reasoning_format
        self.inside = inside
        #: Reasoning is over, or the turn has begun without.
        self._over = False
        self._fresh = True
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """What more text brings."""
        if self._over and not self._fresh:
            return [Part(Kind.TEXT, text)] if text else []
        parts = Parts()
        text, self._held = self._held + text, ""
        if not self._over and not self.inside:
            text = self._before(text)
        if self.inside:
            text = self._inside(text, parts)
        if self._over:
            text = text.lstrip(WHITESPACE) if self._fresh else text
            self._fresh = self._fresh and not text
            parts.text(text)
        return parts.take()

    def finish(self) -> list[Part]:
        """What is still held, at the end of the text."""
        held, self._held = self._held, ""
        if self.inside:
            return [Part(Kind.REASONING, body)] if (body := held.rstrip(WHITESPACE)) else []
        return [Part(Kind.TEXT, held)] if held else []

    def _before(self, text: str) -> str:
        """Look whether the turn begins with the mark; what is left of the text."""
        begin = self._format.begin
        said = text.lstrip(WHITESPACE)
        if said.startswith(begin):
            self.inside = True
            return said[len(begin) :]
        if begin.startswith(said):
            self._held = text
            return ""
        self._over, self._fresh = True, False
        return text

    def _inside(self, text: str, parts: Parts) -> str:
        """Tell reasoning up to its end; what is left of the text."""
        if self._fresh:
            text = text.lstrip(WHITESPACE)
            self._fresh = not text
        found = earliest(text, (self._format.end,))
        if found is not None:
            parts.add(Part(Kind.REASONING, _body(text, found[0])))
            self.inside, self._over, self._fresh = False, True, True
            return text[found[1] :]
        body = _body(text, len(text) - held_back(text, (self._format.end,)))
        parts.add(Part(Kind.REASONING, body))
        self._held = text[len(body) :]
        return ""


def _body(text: str, end: int) -> str:
    """A text up to `end`, less the whitespace there."""
    return text[: max(len(text[:end].rstrip(WHITESPACE)), end - _MOST_SPACE, 0)]
