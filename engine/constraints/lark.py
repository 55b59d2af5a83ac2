"""Constraints as grammars in llguidance's Lark notation.

Every grammar begins with `no_forcing`: without it the library allows, wherever the next bytes are
certain, only the tokens that it would write them with. That is another distribution than the
model's under the mask of all tokens that fit.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from tokenpod.core.constraints import Choice, Constraint, Grammar, JsonSchema, Regex, Tagged
from tokenpod.engine.constraints.library import Refused

_HEADER = '%llguidance {"no_forcing": true}\n'
#: Between tokens of JSON: nothing, spaces, or a line's end and its indentation. Bounded, since a
#: model may else write whitespace for ever.
WHITESPACE = r"\n? {0,32}"
_TEXT = r"/(.|\n)*/"


def grammar_of(constraint: Constraint, special: Collection[str]) -> str:
    """A grammar for the library. `special`: names of tokens that are no text. Raises Refused."""
    match constraint:
        case Tagged():
            return _HEADER + _Tags(constraint, special).grammar()
        case Grammar():
            return _HEADER + lark_of(constraint.source)
        case _:
            return f"{_HEADER}start: {_inline(constraint)}\n"


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
            options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
            return f"%json {json.dumps(schema | options)}"
        case Regex():
            return f"/{llguidance.regex_to_lark(constraint.pattern, '')}/"
        case Choice():
            return " | ".join(map(_quoted, constraint.texts))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Tags:
    """The rules of free text with tags."""

    def __init__(self, tagged: Tagged, special: Collection[str]) -> None:
        self._tagged = tagged
        self._special = special
        self._rules: list[str] = []

    def grammar(self) -> str:
        tagged = self._tagged
        names = [self._tag(i) for i in range(len(tagged.tags))]
        one = self._rule("one", " | ".join(names))
        most = "" if tagged.most is None else tagged.most
        if tagged.text:
            again = f"{one}{{{tagged.least},{most}}}"
            body = f"{again} TEXT"
            if tagged.most is not None or tagged.least:
                # Behind the tags that must come nothing more may.
                body = again
            self._rules.append(f"TEXT: {_TEXT}")
        else:
            body = one
            if tagged.most != 1:
                between = f"{_quoted(tagged.separator)} " if tagged.separator else ""
                following = self._rule("following", f"{between}{one}")
                last = "" if tagged.most is None else tagged.most - 1
                body = f"{one} {following}{{{max(tagged.least - 1, 0)},{last}}}"
            if not tagged.least:
                body = f"({body})?"
        return "\n".join([f"start: {body}", *self._rules, ""])

    def _tag(self, at: int) -> str:
        """The rule of one tag, with the text before its trigger where there may be any."""
        tag, tagged = self._tagged.tags[at], self._tagged
        trigger = next((t for t in tagged.triggers if tag.begin.startswith(t)), tag.begin)
        rest = tag.begin[len(trigger) :]
        parts = [self._begin(trigger, at), _quoted(rest) if rest else ""]
        parts += self._content(at)
        return self._rule(f"tag_{at}", " ".join(filter(None, parts)))

    def _begin(self, trigger: str, at: int) -> str:
        token = self._token(trigger)
        if not self._tagged.text:
            return token or _quoted(trigger)
        if token:
            return f"TEXT {token}"
        self._rules.append(f"trigger_{at}[lazy]: TEXT {_quoted(trigger)}")
        return f"trigger_{at}"

    def _content(self, at: int) -> list[str]:
        tag = self._tagged.tags[at]
        end = (self._token(tag.end) or _quoted(tag.end)) if tag.end else ""
        if tag.inside is None:
            if not tag.end or self._token(tag.end):
                return [_TEXT, end]
            self._rules.append(f"inside_{at}[lazy]: /(.|\\n)*/ {end}")
            return [f"inside_{at}"]
        if isinstance(tag.inside, Grammar):
            raise Refused("a grammar inside of a tag is not supported")
        return [f"({_inline(tag.inside)})", end]

    def _token(self, name: str) -> str:
        """A special token by its name; empty if there is none."""
        if name not in self._special:
            return ""
        return name if name.startswith("<") and name.endswith(">") else f"<{name}>"

    def _rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name
