"""Calls of tools in what a model writes: the interface of formats, and who runs them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenpod.core.constraints import JsonSchema, Tag, Tagged
from tokenpod.service.calls.parts import Kind, Part, Parts
from tokenpod.service.text.parsers.grammar import (
    WHITESPACE,
    Grammar,
    Source,
    Unexpected,
    json_name,
    json_value,
    literal,
    space,
)
from tokenpod.service.text.parsers.marks import earliest, held_back

#: Whitespace before a call that is no part of the text, at most.
_MOST_SPACE = 64


#: Bytes of a tool's schema once its formats and definitions are written out.
MOST_WRITTEN = 8 * 1024**2
TOO_LONG = f"have a schema of more than {MOST_WRITTEN} bytes, its definitions written out"


class ToolsError(ValueError):
    """The tools of a chat are more than can be made a constraint. The text is for the client."""


@dataclass(frozen=True, slots=True)
class ToolCallShape:
    """A tool that may be called, by its name and its arguments' schema, which is an object's."""

    name: str
    schema: Mapping[str, Any]

    @property
    def arguments(self) -> JsonSchema:
        """As one JSON object."""
        return JsonSchema(json.dumps(self.schema))


class Calls:
    """Where a format's grammar puts the calls that it reads.

    Args:
        parts: gets their pieces.
        tools: names of those that the model may call.
        new_id: makes a name for a call.
        schemas: of their arguments, as JSON texts.
    """

    def __init__(
        self,
        parts: Parts,
        tools: Collection[str],
        new_id: Callable[[], str],
        schemas: Mapping[str, str],
    ) -> None:
        self.tools = tools
        self.schemas = schemas
        #: What calls were begun with; "": they began the turn.
        self.mark = ""
        self._parts = parts
        self._new_id = new_id
        #: Calls that have begun, and that have ended.
        self.begun = 0
        self.ended = 0
        #: Something was told since it was set to false: what was read is a call.
        self.told = False

    def begin(self, name: str) -> None:
        """A call; its arguments follow."""
        self._parts.add(Part(Kind.CALL, "", self.begun, self._new_id(), name))
        self.begun += 1
        self.told = True

    def more(self, arguments: str) -> None:
        """A piece of the last call's arguments, as JSON text."""
        self._parts.add(Part(Kind.CALL, arguments, self.begun - 1))
        self.told = True

    def reason(self, text: str) -> None:
        """What is no call: more of what the model thinks."""
        self._parts.add(Part(Kind.REASONING, text))
        self.told = True

    def end(self, *, late: bool = False) -> None:
        """The last call is whole; `late`: the character before this one was its last."""
        self.ended += 1
        self.told = self.told or not late


class CallFormat(ABC):
    """How a family of models writes calls of tools. One object serves all streams.

    Before the first `Calls.begin` whatever a grammar does not expect makes all of it plain text;
    after it, what the grammar has not made a call of.
    """

    #: For `--tool-parser`.
    name: str
    #: Each begins calls wherever it stands; models have special tokens of some.
    marks: tuple[str, ...] = ()
    #: More special tokens that the grammar reads.
    shown: tuple[str, ...] = ()
    #: A turn whose first character is one of these may begin with calls, without a mark.
    openings: str = ""
    #: All that the model writes is between marks: they are read without tools, too.
    framed: bool = False

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Whether a model with this chat template writes so."""

    @abstractmethod
    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """What calls of these tools look like as the grammar below reads them.

        Args:
            calls: name and arguments of each.
            template: the model's, which shows what it has learnt.
            must: the turn is calls and nothing else; otherwise text in which marks begin calls.
        """

    @abstractmethod
    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """Read calls. `marked`: what follows a mark; else a turn's beginning."""


class CallParser:
    """Takes the calls of one turn out of its text.

    Args:
        calls_format: how they are written.
        tools: names of those that the model may call.
        new_id: makes a name for a call.
        schemas: of their arguments, as JSON texts.
    """

    def __init__(
        self,
        calls_format: CallFormat,
        tools: Collection[str],
        new_id: Callable[[], str],
        schemas: Mapping[str, str],
    ) -> None:
        self._format = calls_format
        self._parts = Parts()
        self._calls = Calls(self._parts, tools, new_id, schemas)
        self._source = Source()
        self._grammar: Grammar | None = None
        #: Text that may turn out to be no text: outside of calls, and what a grammar has read.
        self._held = ""
        self._read: list[str] = []
        #: Calls that had begun when the grammar began.
        self._before = 0
        #: Nothing but whitespace has come, or has come since a call.
        self._fresh = True
        self._behind_call = False

    @property
    def ended(self) -> int:
        """Calls that are whole."""
        return self._calls.ended

    def push(self, text: str) -> list[Part]:
        """What more text brings."""
        while text:
            text = self._outside(text) if self._grammar is None else self._inside(text)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """What is still held, at the end of the text."""
        if self._grammar is not None:
            self._source.char = ""
            whole = self._step(self._grammar) is True
            if whole or self._calls.begun > self._before:
                # What was cut off belongs to a call.
                self._read.clear()
            self._fail()
        elif not (self._behind_call and not self._held.strip(WHITESPACE)):
            self._parts.text(self._held)
        self._held = ""
        return self._parts.take()

    # -- outside of calls ----------------------------------------------------------------------

    def _outside(self, text: str) -> str:
        """Read up to where calls begin; what is left of the text."""
        text, self._held = self._held + text, ""
        if self._fresh and self._format.openings:
            begins = text.lstrip(WHITESPACE)
            if not begins:
                self._held = text
                return ""
            self._fresh = False
            if begins[0] in self._format.openings:
                self._begin(text[: len(text) - len(begins)])
                return begins
        found = earliest(text, self._format.marks)
        if found is None:
            self._tell(text, held_back(text, self._format.marks))
            return ""
        begin, end = found
        self._tell(text[:begin], 0)
        self._begin(self._held, text[begin:end])
        return text[end:]

    def _tell(self, text: str, back: int) -> None:
        """Tell text but the whitespace that it ends with, which is held with what is `back`."""
        end = len(text) - back
        body = max(len(text[:end].rstrip(WHITESPACE)), end - _MOST_SPACE)
        if body > 0:
            self._behind_call = False
            self._parts.text(text[:body])
        self._held = text[max(body, 0) :]

    # -- calls ---------------------------------------------------------------------------------

    def _begin(self, read: str, mark: str = "") -> None:
        self._held, self._read = "", [read + mark]
        self._before, self._calls.mark = self._calls.begun, mark
        self._grammar = self._format.read(self._source, self._calls, marked=bool(mark))

    def _inside(self, text: str) -> str:
        """Let the grammar read; what is left of the text, once it has ended."""
        assert self._grammar is not None
        for at, char in enumerate(text):
            self._source.char = char
            whole = self._step(self._grammar)
            if whole is None:
                if self._calls.told:
                    self._calls.told = False
                    self._read.clear()
                else:
                    self._read.append(char)
                continue
            if whole or self._calls.told:
                self._read.clear()
            self._fail()
            return text[at:]
        return ""

    def _step(self, grammar: Grammar) -> bool | None:
        """Let the grammar go on; whether it has ended well, None if it goes on."""
        try:
            next(grammar)
        except StopIteration:
            return True
        except Unexpected:
            return False
        return None

    def _fail(self) -> None:
        """The grammar is over; what it has read in vain is text."""
        self._grammar = None
        self._behind_call = self._calls.begun > 0 and not self._read
        self._parts.text("".join(self._read))
        self._read = []
        self._calls.told = False


def json_tags(calls: Sequence[ToolCallShape], key: str = "arguments") -> tuple[Tag, ...]:
    """Calls as JSON objects with the arguments under this key, as `json_call` reads them."""
    return tuple(
        Tag(f'{{"name": {json.dumps(call.name)}, "{key}": ', call.arguments, "}") for call in calls
    )


def json_call(source: Source, calls: Calls, *, known: bool) -> Grammar:
    """One JSON object that is a call: its tool's `name`, and `arguments` or `parameters`.

    Args:
        known: it is a call only if it has arguments and its tool is one of the request's; else
            whatever its name is.
    """
    name, early = "", ""
    begun = False
    yield from literal(source, "{")
    while True:
        yield from space(source)
        key = yield from json_name(source)
        yield from space(source)
        yield from literal(source, ":")
        yield from space(source)
        if key == "name" and not name:
            name = yield from json_name(source)
            if known and name not in calls.tools:
                raise Unexpected
        elif key in ("arguments", "parameters") and not begun and not early:
            if name:
                begun = True
                calls.begin(name)
                yield from json_value(source, calls.more)
            else:
                taken: list[str] = []
                yield from json_value(source, taken.append)
                early = "".join(taken)
        elif known and not begun and key not in ("type", "id"):
            # An answer in JSON, such as the user has asked for.
            raise Unexpected
        else:
            yield from json_value(source, _ignore)
        yield from space(source)
        if source.char != ",":
            break
        yield
    if source.char != "}" or not name or (known and not (begun or early)):
        raise Unexpected
    if not begun:
        calls.begin(name)
        calls.more(early or "{}")
    calls.end()
    yield


def _ignore(char: str) -> None:
    """Of a field that says nothing of the call."""
