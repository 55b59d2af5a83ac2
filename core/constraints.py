"""What a text must conform to, as it travels to the engine; checked before, compiled there.

    JsonSchema, Regex, Grammar, Choice    the whole text
    Tagged                                free text with regions, each of one of these kinds
"""

from __future__ import annotations

import msgspec


class _Part(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: hashable, so that compiled constraints are cached by their content."""


class JsonSchema(_Part, frozen=True, array_like=True, tag=True):
    """JSON that a schema accepts, with bounded whitespace between its tokens."""

    #: JSON text of an object.
    schema: str


class Regex(_Part, frozen=True, array_like=True, tag=True):
    """Text that a regular expression of Rust's `regex` matches as a whole."""

    pattern: str


class Grammar(_Part, frozen=True, array_like=True, tag=True):
    """Text of a context-free grammar, in Lark's notation or in GBNF."""

    source: str


class Choice(_Part, frozen=True, array_like=True, tag=True):
    """One of several texts, none of them empty."""

    texts: tuple[str, ...]


class Tag(_Part, frozen=True, array_like=True, tag=True):
    """A region: `begin`, what is inside, `end`. `begin` starts with one of the triggers."""

    begin: str
    #: None: free text up to `end`.
    inside: JsonSchema | Regex | Grammar | Choice | None
    end: str


class Tagged(_Part, frozen=True, array_like=True, tag=True):
    """Free text in which each trigger begins a tag."""

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    #: Tags that there are at least, and at most (None: any number); no text after the last.
    least: int = 0
    most: int | None = None
    #: Whether text may stand before, between and behind tags.
    text: bool = True
    #: Stands between tags where there is no text.
    separator: str = ""


Constraint = JsonSchema | Regex | Grammar | Choice | Tagged


class ConstraintLimits(msgspec.Struct, frozen=True, array_like=True):
    """What constraints may cost the engine."""

    #: Threads that make masks; 0: by the number of cores.
    workers: int = 0
    #: Seconds until a constraint is compiled and has its first mask, and for each mask after it.
    compile_seconds: float = 5.0
    mask_seconds: float = 0.5
    #: Compiled constraints that are kept, in bytes, about.
    cache_bytes: int = 256 * 1024 * 1024
