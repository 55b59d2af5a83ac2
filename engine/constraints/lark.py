"""Constraints as grammars in llguidance's Lark notation.

Every grammar begins with `no_forcing`: without it the library allows, wherever the next bytes are
certain, only the tokens that it would write them with. That is another distribution than the
model's under the mask of all tokens that fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from tokenpod.core.constraints import (
    Argument,
    Arguments,
    Choice,
    Constraint,
    Grammar,
    JsonSchema,
    Reasoned,
    Regex,
    Tagged,
)
from tokenpod.engine.constraints.library import Refused

_HEADER = '%llguidance {"no_forcing": true}\n'
#: Between tokens of JSON: nothing, spaces, or a line's end and its indentation. Bounded, since a
#: model may else write whitespace for ever.
WHITESPACE = r"\n? {0,32}"
_BOUNDED = {"whitespace_pattern": WHITESPACE}
#: With none of it but a space behind a comma or a colon.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_TEXT = r"/(.|\n)*/"
_EMPTY = '""'
#: Behind reasoning.
_SPACE = r"/[ \n]{0,4}/"


def grammar_of(constraint: Constraint, special: Mapping[str, int]) -> str:
    """A grammar for the library. `special`: tokens that are no text, by name. Raises Refused."""
    if isinstance(constraint, Grammar):
        return _HEADER + lark_of(constraint.source)
    rules = _Rules(special)
    if isinstance(constraint, Reasoned):
        body = f"{rules.reasoning(constraint)} {rules.body(constraint.answer)}"
    else:
        body = rules.body(constraint)
    return _HEADER + "\n".join([f"start: {body}", *rules.made, ""])


def lark_of(source: str) -> str:
    """A client's grammar in Lark's notation. Raises Refused."""
    if "%llguidance" in source:
        raise Refused("%llguidance is not allowed: its options are the server's")
    try:
        return str(any_to_lark(source))
    except Exception as error:
        raise Refused(f"it is neither Lark's notation nor GBNF: {error}") from error


def _inline(constraint: JsonSchema | Regex | Choice) -> str:
    """The right side of a rule."""
    match constraint:
        case JsonSchema():
            schema = json.loads(constraint.schema)
            options = {"x-guidance": _COMPACT if constraint.compact else _BOUNDED}
            return f"%json {json.dumps(schema | options)}"
        case Regex():
            return f"/{llguidance.regex_to_lark(constraint.pattern, '')}/"
        case Choice():
            return " | ".join(map(_quoted, constraint.texts))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Rules:
    """The rules of a grammar, as far as it needs any.

    Args:
        special: tokens that are no text, by name.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted(filter(None, special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self.made = [f"TEXT: {_TEXT}"]
        self._tagged = Tagged(())

    def body(self, constraint: JsonSchema | Regex | Choice | Tagged) -> str:
        """The right side of a rule."""
        if not isinstance(constraint, Tagged):
            return self._rule("answer", _inline(constraint))
        self._tagged = tagged = constraint
        if not tagged.triggers:
            return self._run(tagged.before, [self._tag(i) for i in range(len(tagged.tags))])
        times = "*" if tagged.before else _times(tagged.least, tagged.most)
        return f"{self._in_text()}{times} TEXT"

    def reasoning(self, reasoned: Reasoned) -> str:
        """What may come before the answer, and the space behind it."""
        if reasoned.end in self._special:
            inside = f"TEXT {self._literal(reasoned.end)}"
        else:
            inside = self._rule("reasoning_end", f"TEXT {_quoted(reasoned.end)}", "[lazy]")
        if reasoned.open:
            return f"{inside} {_SPACE}"
        return f"({self._literal(reasoned.begin)} {inside} {_SPACE})?"

    def _in_text(self) -> str:
        """Text and the run behind it."""
        tagged = self._tagged
        if tagged.before:
            trigger, rest = self._divided(tagged.before)
            tags = [self._tag(i) for i in range(len(tagged.tags))]
            body = f"{self._after_text(trigger, 0)} {self._run(rest, tags)}"
        else:
            bodies = []
            for i, tag in enumerate(tagged.tags):
                trigger, rest = self._divided(tag.begin)
                bodies.append(f"{self._after_text(trigger, i)} {self._tag(i, rest)}")
            body = " | ".join(bodies)
        return self._rule("in_text", body)

    def _run(self, before: str, tags: list[str]) -> str:
        tagged = self._tagged
        one = self._rule("one", " | ".join(tags))
        body = one
        if tagged.most != 1:
            following = self._rule("following", f"{self._literal(tagged.separator)} {one}")
            most = None if tagged.most is None else tagged.most - 1
            body = f"{one} {following}{_times(max(tagged.least - 1, 0), most)}"
        if not tagged.least:
            body = f"({body})?"
        return f"{self._literal(before)} {body} {self._literal(tagged.after)}"

    def _divided(self, begin: str) -> tuple[str, str]:
        """The trigger that a run begins with, and what follows it."""
        found = next((t for t in self._tagged.triggers if begin.startswith(t)), begin)
        return found, begin[len(found) :]

    def _after_text(self, trigger: str, at: int) -> str:
        """Text that ends with the trigger."""
        if trigger in self._special:
            return f"TEXT {self._literal(trigger)}"
        return self._rule(f"trigger_{at}", f"TEXT {_quoted(trigger)}", "[lazy]")

    def _tag(self, at: int, begin: str | None = None) -> str:
        """The rule of one tag; `begin`: what is left of its own."""
        tag = self._tagged.tags[at]
        parts = [self._literal(tag.begin if begin is None else begin), *self._content(at)]
        return self._rule(f"tag_{at}", " ".join(filter(None, parts)) or '""')

    def _content(self, at: int) -> list[str]:
        tag = self._tagged.tags[at]
        match tag.inside:
            case None if not tag.end or tag.end in self._special:
                return ["TEXT", self._literal(tag.end)]
            case None:
                # The first `end` ends it.
                return [self._rule(f"inside_{at}", f"TEXT {_quoted(tag.end)}", "[lazy]")]
            case Grammar():
                raise Refused("a grammar inside of a tag is not supported")
            case Arguments():
                return [self._arguments(tag.inside, at), self._literal(tag.end)]
            case _:
                return [f"({_inline(tag.inside)})", self._literal(tag.end)]

    def _arguments(self, arguments: Arguments, at: int) -> str:
        """Rules from the last argument to the first; what comes may be the first that is there."""
        first = following = ""
        separator = self._literal(arguments.separator)
        for i, argument in reversed([*enumerate(arguments.each)]):
            one = self._rule(f"arg_{at}_{i}", self._argument(argument, f"value_{at}_{i}"))
            now_first = f"{one} {following}"
            now_following = f"{separator} {one}"
            if not argument.needed:
                now_first += f" | {first or _EMPTY}"
                now_following = f"({now_following})?"
            following = self._rule(f"more_{at}_{i}", f"{now_following} {following}")
            first = self._rule(f"args_{at}_{i}", now_first)
        return first

    def _argument(self, argument: Argument, name: str) -> str:
        """Its parts; `name`: of a rule for its value."""
        begin = self._literal(argument.begin)
        if argument.inside is not None:
            return f"{begin} ({_inline(argument.inside)}) {self._literal(argument.end)}"
        if argument.end in self._special:
            return f"{begin} TEXT {self._literal(argument.end)}"
        # The first `end` ends it.
        return f"{begin} {self._rule(name, f'TEXT {_quoted(argument.end)}', '[lazy]')}"

    def _literal(self, text: str) -> str:
        """A text in which names of special tokens stand for these."""
        parts, done = [], 0
        for found in self._names.finditer(text):
            if plain := text[done : found.start()]:
                parts.append(_quoted(plain))
            parts.append(f"<[{self._special[found[0]]}]>")
            done = found.end()
        if plain := text[done:]:
            parts.append(_quoted(plain))
        return " ".join(parts)

    def _rule(self, name: str, body: str, options: str = "") -> str:
        self.made.append(f"{name}{options}: {body}")
        return name


def _times(least: int, most: int | None) -> str:
    if most is None:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{most}}}"
