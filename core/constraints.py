"""What a text must conform to, as it travels to the engine; checked before, compiled there.

JsonSchema, Regex, Grammar, Choice    the whole text
Tagged                                regions of these kinds, with free text around or not
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Part(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: hashable, so that compiled constraints are cached by their content."""


class JsonSchema(_Part, frozen=True, array_like=True, tag=True):
    """JSON that a schema accepts, with bounded whitespace between its tokens."""

    #: JSON text of an object.
    schema: str
    #: The only whitespace is a space behind a colon or a comma, or none.
    compact: bool = False


class Regex(_Part, frozen=True, array_like=True, tag=True):
    """Text that a regular expression of Rust's `regex` matches as a whole."""

    pattern: str


class Grammar(_Part, frozen=True, array_like=True, tag=True):
    """Text of a context-free grammar, in Lark's notation or in GBNF."""

    source: str


class Choice(_Part, frozen=True, array_like=True, tag=True):
    """One of several texts, none of them empty."""

    texts: tuple[str, ...]


class Argument(_Part, frozen=True, array_like=True, tag=True):
    """A named value: `begin`, the value, `end`."""

    begin: str
    #: None: any text up to `end`.
    inside: JsonSchema | Choice | None
    end: str
    #: Whether it must be there.
    needed: bool


class Arguments(_Part, frozen=True, array_like=True, tag=True):
    """Named values in this order: Python's `x=1, y="a"`, or one between tags of its name each."""

    each: tuple[Argument, ...]
    separator: str = ""


class Tag(_Part, frozen=True, array_like=True, tag=True):
    """A region: `begin`, what is inside, `end`. Names of special tokens stand for these."""

    begin: str
    #: None: free text up to `end`.
    inside: JsonSchema | Regex | Grammar | Choice | Arguments | None
    end: str


class Tagged(_Part, frozen=True, array_like=True, tag=True):
    """A run of tags, or free text with such runs.

    without text    before tag (separator tag)* after
    with text       (text run)* text, where each run begins with one of the triggers
    """

    tags: tuple[Tag, ...]
    before: str = ""
    separator: str = ""
    after: str = ""
    #: Tags of a run; with text and no `before` a run is one tag, and so many runs. None: any.
    least: int = 1
    most: int | None = None
    #: How runs begin within text; empty: there is no text.
    triggers: tuple[str, ...] = ()
    #: Where the schema of a tag can't be compiled, its inside is any JSON object.
    lenient: bool = False


class Reasoned(_Part, frozen=True, array_like=True, tag=True):
    """Reasoning between two marks, as far as the model writes any, and then what is asked for."""

    begin: str
    end: str
    #: The prompt has begun it already.
    open: bool
    answer: JsonSchema | Regex | Choice | Tagged


Constraint = JsonSchema | Regex | Grammar | Choice | Tagged | Reasoned


def compacted(constraint: Constraint) -> Constraint:
    """The same, with all JSON in it compact."""
    match constraint:
        case JsonSchema():
            return msgspec.structs.replace(constraint, compact=True)
        case Reasoned():
            answer = compacted(constraint.answer)
            assert not isinstance(answer, Grammar | Reasoned), "compacting changes no kind"
            return msgspec.structs.replace(constraint, answer=answer)
        case Tagged():
            tags = tuple(
                msgspec.structs.replace(t, inside=_compact(t.inside)) for t in constraint.tags
            )
            return msgspec.structs.replace(constraint, tags=tags)
    return constraint


def _compact(inside: Any) -> Any:
    match inside:
        case JsonSchema():
            return compacted(inside)
        case Arguments():
            each = tuple(
                msgspec.structs.replace(one, inside=_compact(one.inside)) for one in inside.each
            )
            return msgspec.structs.replace(inside, each=each)
    return inside


class ConstraintLimits(msgspec.Struct, frozen=True, array_like=True):
    """What constraints may cost the engine."""

    #: Threads that make masks; 0: by the number of cores.
    workers: int = 0
    #: Seconds until a constraint is compiled and has its first mask, and for each mask after it.
    compile_seconds: float = 5.0
    mask_seconds: float = 0.5
    #: Compiled constraints that are kept, in bytes, about.
    cache_bytes: int = 256 * 1024 * 1024
