"""Harmony, of gpt-oss: a turn is messages of channels, and a call is one that is sent to a tool.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`. The first message of the channel analysis is reported as
reasoning by its marks, as other families' is; later ones are read here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenpod.core.constraints import Tag, Tagged
from tokenpod.service.text.parsers.calls import CallFormat, Calls, ToolCallShape
from tokenpod.service.text.parsers.grammar import (
    WHITESPACE,
    Grammar,
    Source,
    Unexpected,
    json_value,
    space,
    until,
)

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ANALYSIS = "analysis"
#: Channels of messages to the user, and how these end; nothing: the turn does.
_TEXTS = ((_ANALYSIS, _END), ("commentary", _END), ("final", ""))
_TO = re.compile(r"to=(?:functions\.)?([\w.-]{1,256})")
#: Characters of a message's header, at most.
_MOST_HEADER = 600
#: How an answer begins, behind reasoning and without.
FINAL = (f"{_START}assistant{_CHANNEL}final{_MESSAGE}", f"{_CHANNEL}final{_MESSAGE}")
REASONS = (f"{_CHANNEL}{_ANALYSIS}{_MESSAGE}", _END)


class Harmony(CallFormat):
    """Calls, and the headers of all messages, which are no text."""

    name = "harmony"
    marks = (_START, _CHANNEL, _END, _CALL, _RETURN)
    shown = (_MESSAGE, "<|constrain|>")
    framed = True

    def matches(self, template: str) -> bool:
        """By its channels."""
        return f"{_CHANNEL}{_ANALYSIS}" in template

    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """Messages, the first of which has the beginning of its header in the prompt.

        Calls alone if one must be made; else those of other channels too, whose texts are free.
        """
        tags = []
        for head in (f"{_START}assistant{_CHANNEL}", _CHANNEL):
            for call in calls:
                begin = f"{head}commentary to=functions.{call.name} <|constrain|>json{_MESSAGE}"
                tags.append(Tag(begin, call.arguments, ""))
            for channel, end in () if must else _TEXTS:
                tags.append(Tag(f"{head}{channel}{_MESSAGE}", None, end))
        # A model ends its turn with a call, and with its answer: `<|call|>` and `<|return|>` end a
        # text as an end-of-text token does.
        return Tagged(tuple(tags))

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """What follows a mark: a header and what it is sent to; nothing behind the end of one."""
        if calls.mark in (_END, _CALL, _RETURN):
            return
        header = yield from until(source, _MESSAGE, _MOST_HEADER)
        if to := _TO.search(header):
            yield from space(source)
            if source.char != "{":
                raise Unexpected
            calls.begin(to[1])
            yield from json_value(source, calls.more)
            calls.end(late=True)
        elif header.rpartition(_CHANNEL)[2].strip(WHITESPACE) == _ANALYSIS:
            yield from _reasoning(source, calls)


def _reasoning(source: Source, calls: Calls) -> Grammar:
    """Up to the end of the message, reported as it arrives."""
    held = ""
    while source.char and held != _END:
        held += source.char
        while not _END.startswith(held):
            calls.reason(held[0])
            held = held[1:]
        yield
    calls.reason(held.removesuffix(_END))
