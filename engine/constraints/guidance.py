"""llguidance: masks by derivatives of regular expressions and an Earley parser.

https://github.com/guidance-ai/llguidance. It compiles lazily, so its limits hold at each mask too,
and it lets go of the interpreter's lock while it compiles and while it makes a mask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import llguidance
import msgspec

from tokenpod.core.constraints import (
    Argument,
    Arguments,
    Constraint,
    Grammar,
    JsonSchema,
    Reasoned,
    Tagged,
)
from tokenpod.engine.constraints.guidance_batch import Batches
from tokenpod.engine.constraints.guidance_matcher import GuidanceMatcher, told
from tokenpod.engine.constraints.lark import grammar_of, lark_of
from tokenpod.engine.constraints.library import Advanced, Matcher, Refused

#: Its tree of tokens holds none that is longer; those are never drawn under a constraint.
_MOST_TOKEN_BYTES = 255
#: Of its errors: where in a grammar something is, and the grammar's lines around.
_LEAD = re.compile(r"(?:at )?(\d+)\((\d+)\): (?:failed to compile JSON schema: )?")
_LISTING = re.compile(r"\n *\d+ \| ")
_ANY_OBJECT = JsonSchema('{"type": "object"}')
#: Fuel is what its lexer does, some 14 to 50 of a thousand a millisecond; items are its parser's.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=30_000,
    max_grammar_size=200_000,
    # What clients sent must not get into logs.
    verbose_errors=False,
)


class _Tokens:
    """The vocabulary as the library wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self._bytes = {t: i for i, t in reversed([*enumerate(tokens)]) if len(t) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Some tokens of a text: it is asked, though tokens are never forced."""
        raw = text.encode() if isinstance(text, str) else text
        return [self._bytes[bytes([b])] for b in raw if bytes([b]) in self._bytes]


class Guidance:
    """Compiles constraints for one vocabulary, by llguidance.

    Args:
        tokens: the bytes of each token of the model, by id; empty: never drawn.
        special: those that are no text.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int]) -> None:
        self._vocab = len(tokens)
        known = [token if len(token) <= _MOST_TOKEN_BYTES else b"" for token in tokens]
        self._special = {known[i].decode(errors="replace"): i for i in special if known[i]}
        # One more token stands for the end of the text: which of the model's tokens end a
        # sequence is each request's to say.
        wrapped: Any = _Tokens(
            [*known, b"<|the end of the text|>"], [*special, self._vocab], self._vocab
        )
        self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=[self._vocab])
        self._batches: Batches | None = None

    def prepare(self, constraint: Constraint) -> tuple[str, GuidanceMatcher]:
        """A grammar for the library, and the matcher that it makes of it. Raises Refused."""
        grammar = grammar_of(constraint, self._special)
        made = self._made(grammar)
        loose = _loosened(constraint)
        if made.is_error() and loose is not constraint:
            grammar = grammar_of(loose, self._special)
            made = self._made(grammar)
        if made.is_error():
            raise Refused(_problem(made.get_error(), constraint))
        return grammar, GuidanceMatcher(made, self._vocab)

    def compile(self, constraint: Constraint, prepared: str = "") -> GuidanceMatcher:
        """A matcher at the beginning of a text. Raises Refused."""
        if not prepared:
            return self.prepare(constraint)[1]
        made = self._made(prepared)
        if made.is_error():
            raise Refused(_problem(made.get_error(), constraint))
        return GuidanceMatcher(made, self._vocab)

    def joins(self, matcher: Matcher) -> bool:
        """Whether `advance` takes this matcher."""
        return type(matcher) is GuidanceMatcher

    def advance(self, taken: Sequence[tuple[Matcher, int]], threads: int) -> Advanced:
        """Go on with a token of each of several matchers, together."""
        batches = self._batches = self._batches or Batches(self._vocab, threads)
        return batches.advance([(_own(matcher), token) for matcher, token in taken])

    def _made(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)


def _problem(error: str, constraint: Constraint) -> str:
    """What is wrong, for the client: of what we make of its constraint it knows nothing."""
    found = _LEAD.match(error)
    problem = told(_LISTING.split(error)[0][found.end() if found else 0 :])
    if (
        found
        and isinstance(constraint, Grammar)
        and lark_of(constraint.source) == constraint.source
    ):
        # The first line is ours.
        return f"line {int(found[1]) - 1}, column {found[2]}: {problem}"
    return problem


def _own(matcher: Matcher) -> GuidanceMatcher:
    assert isinstance(matcher, GuidanceMatcher)
    return matcher


def _loosened(constraint: Constraint) -> Constraint:
    """With any JSON object in the place of each tag's schema, where that is allowed."""
    match constraint:
        case Reasoned(answer=Tagged(lenient=True) as tagged):
            return msgspec.structs.replace(constraint, answer=_with_objects(tagged))
        case Tagged(lenient=True):
            return _with_objects(constraint)
        case _:
            return constraint


def _with_any(argument: Argument) -> Argument:
    if not isinstance(argument.inside, JsonSchema):
        return argument
    return msgspec.structs.replace(
        argument, inside=msgspec.structs.replace(argument.inside, schema="{}")
    )


def _with_objects(tagged: Tagged) -> Tagged:
    tags = []
    for tag in tagged.tags:
        inside = tag.inside
        if isinstance(inside, JsonSchema):
            inside = msgspec.structs.replace(inside, schema=_ANY_OBJECT.schema)
        elif isinstance(inside, Arguments):
            each = tuple(_with_any(one) for one in inside.each)
            inside = msgspec.structs.replace(inside, each=each)
        tags.append(msgspec.structs.replace(tag, inside=inside))
    return msgspec.structs.replace(tagged, tags=tuple(tags))
