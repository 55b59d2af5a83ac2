"""One turn of a model, told apart as it comes; and which formats a server knows."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tokenpod.service.calls.parts import Kind, Part
from tokenpod.service.text.parsers.between_tags import DEEPSEEK_DSML, GLM, MINIMAX, QWEN3_CODER
from tokenpod.service.text.parsers.calls import CallFormat, CallParser
from tokenpod.service.text.parsers.gemma import Gemma4
from tokenpod.service.text.parsers.harmony import FINAL, Harmony
from tokenpod.service.text.parsers.harmony import REASONS as HARMONY_REASONS
from tokenpod.service.text.parsers.json_calls import Hermes, Llama3Json, Mistral
from tokenpod.service.text.parsers.pythonic import Pythonic
from tokenpod.service.text.parsers.reasoning import ReasoningFormat, ReasoningParser
from tokenpod.service.text.parsers.sections import DeepSeek, Kimi

#: In the order in which templates are looked at.
CALL_FORMATS: Sequence[CallFormat] = (
    Harmony(),
    Hermes(),
    QWEN3_CODER,
    GLM,
    MINIMAX,
    DEEPSEEK_DSML,
    DeepSeek(),
    Kimi(),
    Gemma4(),
    Mistral(),
    Pythonic(),
    Llama3Json(),
)
REASONING_FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("harmony", *HARMONY_REASONS, sign="<|channel|>analysis", answers=FINAL),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
)
AUTO, NONE = "auto", "none"
#: Mistral's templates take ids of nine letters and digits alone, and others take any.
_ID_LETTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9


@dataclass(frozen=True, slots=True)
class Formats:
    """How the model that is served writes. None: it doesn't, or it is not told apart."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def shown(self) -> frozenset[str]:
        """Special tokens that parsers must see."""
        of_calls = (*self.calls.marks, *self.calls.shown) if self.calls else ()
        return frozenset((*of_calls, *(self.reasoning.marks if self.reasoning else ())))


def formats_of(template: str | None, calls: str, reasoning: str) -> Formats:
    """The formats of these names; `auto` is what the chat template shows.

    Args:
        template: source; None: there is none, and so no chats.
        calls: `--tool-parser`.
        reasoning: `--reasoning-parser`.
    """
    if template is None:
        return Formats()
    return Formats(
        next((f for f in CALL_FORMATS if _chosen(f, calls, template)), None),
        next((f for f in REASONING_FORMATS if _chosen(f, reasoning, template)), None),
    )


def _chosen(each: CallFormat | ReasoningFormat, wanted: str, template: str) -> bool:
    return each.matches(template) if wanted == AUTO else each.name == wanted


def new_call_id() -> str:
    """A name for a call."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


class TurnParser:
    """Reasoning first, then text and calls.

    Args:
        formats: how the model writes.
        prompt_end: what the prompt ends with: it may have begun the reasoning.
        tools: names of those that the model may call; without any no calls are looked for.
        several: the model may call several in a turn; else the turn is over after one.
        new_id: makes a name for a call.
        schemas: of the tools' arguments, as JSON texts.
    """

    def __init__(
        self,
        formats: Formats,
        *,
        prompt_end: str = "",
        tools: Collection[str] = (),
        several: bool = True,
        new_id: Callable[[], str] = new_call_id,
        schemas: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        reasoning = formats.reasoning
        self._reasoning = (
            ReasoningParser(reasoning, inside=reasoning.is_open(prompt_end)) if reasoning else None
        )
        calls = formats.calls
        looked_for = calls is not None and (tools or calls.framed)
        self._calls = CallParser(calls, tools, new_id, schemas) if calls and looked_for else None
        self._several = several

    @property
    def reasons(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    @property
    def over(self) -> bool:
        """Whether the only call that the model may make is whole."""
        return not self._several and self._calls is not None and self._calls.ended > 0

    def push(self, text: str) -> list[Part]:
        """What more text brings."""
        if self._reasoning is None:
            return self._told(Part(Kind.TEXT, text))
        return [each for part in self._reasoning.push(text) for each in self._told(part)]

    def finish(self) -> list[Part]:
        """What is still held, at the end of the text."""
        held = self._reasoning.finish() if self._reasoning else []
        told = [each for part in held for each in self._told(part)]
        if self._calls is None or self.over:
            return told
        return [*told, *self._calls.finish()]

    def _told(self, part: Part) -> list[Part]:
        if part.kind is not Kind.TEXT or self._calls is None:
            return [part]
        told = self._calls.push(part.text)
        return told if self._several else [each for each in told if not each.call]
