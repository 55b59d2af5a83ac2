"""Reading text one character at a time, with parts of grammars that several formats share.

A grammar is a generator: it looks at `source.char` and yields when it has taken that character.
So what comes of a text can't hang on how it was cut into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence

Grammar = Generator[None, None, None]
#: A part of a grammar that brings a text.
Reading = Generator[None, None, str]

WHITESPACE = " \t\r\n"
#: Characters of a name, or of a key, at most: until one ends, nothing can be told of it.
MOST_NAME = 256
#: A backslash takes one more character.
_ESCAPE = "\\"


class Unexpected(Exception):
    """The text is none of the grammar's from here on."""


class Source:
    """Where a grammar reads: the character that it is at; "" at the end of the text."""

    __slots__ = ("char",)

    def __init__(self) -> None:
        self.char = ""


def space(source: Source) -> Grammar:
    """Whitespace, or none."""
    while source.char and source.char in WHITESPACE:
        yield


def literal(source: Source, text: str) -> Grammar:
    """Exactly this text."""
    for char in text:
        if source.char != char:
            raise Unexpected
        yield


def quoted(source: Source, take: Callable[[str], None]) -> Grammar:
    """A string in the quotes that it begins with; `take` gets each character, quotes too."""
    quote = source.char
    take(quote)
    yield
    while True:
        char = source.char
        if not char:
            raise Unexpected
        take(char)
        yield
        if char == quote:
            return
        if char == _ESCAPE:
            if not source.char:
                raise Unexpected
            take(source.char)
            yield


def json_name(source: Source) -> Reading:
    """A JSON string that names something: not empty, and not long."""
    taken: list[str] = []

    def take(char: str) -> None:
        if len(taken) > MOST_NAME:
            raise Unexpected
        taken.append(char)

    if source.char != '"':
        raise Unexpected
    yield from quoted(source, take)
    return named("".join(taken))


def word(source: Source, marks: str) -> Reading:
    """A name without quotes: letters, digits and these marks; not empty, and not long."""
    taken: list[str] = []
    while source.char and (source.char.isalnum() or source.char in marks):
        if len(taken) == MOST_NAME:
            raise Unexpected
        taken.append(source.char)
        yield
    if not taken:
        raise Unexpected
    return "".join(taken)


def entries(
    source: Source, end: str, entry: Callable[[], Reading]
) -> Generator[None, None, list[str]]:
    """What stands before `end`, with commas between and maybe one behind; `end` is not read."""
    found: list[str] = []
    while True:
        yield from space(source)
        if source.char == end:
            return found
        found.append((yield from entry()))
        yield from space(source)
        if source.char == ",":
            yield
        elif source.char != end:
            raise Unexpected


def named(quoted_text: str) -> str:
    """The name that a JSON string is; raises Unexpected for what can be none."""
    try:
        name = json.loads(quoted_text)
        # JSON can write halves of characters, which no message can hold.
        name.encode()
    except ValueError as error:
        raise Unexpected from error
    if not name:
        raise Unexpected
    return str(name)


def json_value(source: Source, take: Callable[[str], None]) -> Grammar:
    """A JSON value up to where it ends, valid or not; `take` gets each character."""
    if source.char == '"':
        yield from quoted(source, take)
    elif source.char and source.char in "{[":
        yield from _nested(source, take)
    else:
        if not source.char or source.char in ",}]" or source.char in WHITESPACE:
            raise Unexpected
        while source.char and source.char not in ",}]" and source.char not in WHITESPACE:
            take(source.char)
            yield


def _nested(source: Source, take: Callable[[str], None]) -> Grammar:
    depth = 0
    while True:
        char = source.char
        if not char:
            raise Unexpected
        if char == '"':
            yield from quoted(source, take)
            continue
        take(char)
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        yield
        if not depth:
            return


def one_of(source: Source, texts: Sequence[str], *, stay: bool = False) -> Reading:
    """The one of these texts that comes; none of them begins another one.

    `stay`: its last character is the caller's to take, once it has told what has come.
    """
    read = 0
    left = [text for text in texts if text]
    while True:
        left = [text for text in left if text[read] == source.char]
        if not left:
            raise Unexpected
        read += 1
        for text in left:
            if len(text) == read:
                if not stay:
                    yield
                return text
        yield


def until(source: Source, end: str, most: int | None = None) -> Reading:
    """What stands before `end`, `most` characters at most; `end` is read too."""
    taken = ""
    while not taken.endswith(end):
        if not source.char or (most is not None and len(taken) > most + len(end)):
            raise Unexpected
        taken += source.char
        yield
    return taken[: -len(end)]
