"""What a text must conform to, as it travels to the engine; checked before, compiled there.

JsonSchema, Regex, Grammar, Choice    the whole text
Tagged                                regions of these kinds, with free text around or not
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


class Arguments(_Part, frozen=True, array_like=True, tag=True):
    """Named arguments as Python writes them, `x=1, y="a"`, in this order; values are JSON."""

    #: Name, schema as JSON text, and whether it must be there.
    each: tuple[tuple[str, str, bool], ...]


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


class ConstraintLimits(msgspec.Struct, frozen=True, array_like=True):
    """What constraints may cost the engine."""

    #: Threads that make masks; 0: by the number of cores.
    workers: int = 0
    #: Seconds until a constraint is compiled and has its first mask, and for each mask after it.
    compile_seconds: float = 5.0
    mask_seconds: float = 0.5
    #: Compiled constraints that are kept, in bytes, about.
    cache_bytes: int = 256 * 1024 * 1024
