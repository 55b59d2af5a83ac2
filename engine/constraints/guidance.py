"""llguidance: masks by derivatives of regular expressions and an Earley parser.

https://github.com/guidance-ai/llguidance. It compiles lazily, so its limits hold at each mask too,
and it lets go of the interpreter's lock while it compiles and while it makes a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llguidance
import msgspec
import numpy as np

from tokenpod.core.constraints import Constraint, JsonSchema, Reasoned, Tagged
from tokenpod.engine.constraints.lark import grammar_of
from tokenpod.engine.constraints.library import LimitReached, Matcher, Refused, Words

#: Its tree of tokens holds none that is longer; those are never drawn under a constraint.
_MOST_TOKEN_BYTES = 255
_WORD_BYTES = 4
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
#: Characters of an error that a client gets.
_MOST_SHOWN = 500


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
    """See `Library`.

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
        self._executor: llguidance.LLExecutor | None = None

    def compile(self, constraint: Constraint) -> GuidanceMatcher:
        """See `Library`."""
        made = self._compile(constraint)
        loose = _loosened(constraint)
        if made.is_error() and loose is not constraint:
            made = self._compile(loose)
        if made.is_error():
            raise Refused(_told(made.get_error()))
        return GuidanceMatcher(made, self._vocab)

    def joins(self, matcher: Matcher) -> bool:
        """See `Library`."""
        return type(matcher) is GuidanceMatcher

    def advance(
        self, taken: Sequence[tuple[Matcher, int]], threads: int
    ) -> tuple[Words, list[bool | None]]:
        """See `Library`."""
        executor = self._executor = self._executor or llguidance.LLExecutor(threads)
        tokens = [(_library_matcher(matcher), token) for matcher, token in taken]
        read = executor.consume_token_par(tokens)
        going_on = [(matcher, at) for at, (matcher, _) in enumerate(tokens) if read[at]]
        found = np.empty((len(taken), self._vocab // 32 + 1), np.int32)
        executor.unsafe_compute_mask_ptr(going_on, found.ctypes.data, found.strides[0], len(found))
        ends: list[bool | None] = [None] * len(taken)
        for matcher, at in going_on:
            if not matcher.is_error():
                ends[at] = _without_end(found[at], self._vocab)
        return found[:, : -(-self._vocab // 32)], ends

    def _compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        grammar = grammar_of(constraint, self._special)
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)


class GuidanceMatcher:
    """See `Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._words = np.zeros(vocab // 32 + 1, np.int32)

    def copy(self) -> GuidanceMatcher:
        """See `Matcher`."""
        return GuidanceMatcher(self._matcher.deep_copy(), self._vocab)

    def take(self, token: int) -> None:
        """See `Matcher`."""
        if not self._matcher.consume_token(token):
            raise LimitReached(_told(self._matcher.get_error()))

    def fill(self, words: Words) -> bool:
        """See `Matcher`."""
        found = self._words
        self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, _WORD_BYTES * len(found))
        if self._matcher.is_error():
            raise LimitReached(_told(self._matcher.get_error()))
        ends = _without_end(found, self._vocab)
        words[:] = found[: len(words)]
        return ends

    @property
    def whole(self) -> bool:
        """See `Matcher`."""
        return bool(self._matcher.is_accepting())


def _library_matcher(matcher: Matcher) -> llguidance.LLMatcher:
    assert isinstance(matcher, GuidanceMatcher)
    return matcher._matcher


def _without_end(words: Words, vocab: int) -> bool:
    """Take the token that stands for the end out of a mask; whether it was in it."""
    last, bit = divmod(vocab, 32)
    ends = bool(words[last] >> bit & 1)
    words[last] &= np.int32((1 << bit) - 1)
    return ends


def _loosened(constraint: Constraint) -> Constraint:
    """With any JSON object in the place of each tag's schema, where that is allowed."""
    match constraint:
        case Reasoned(answer=Tagged(lenient=True) as tagged):
            return msgspec.structs.replace(constraint, answer=_with_objects(tagged))
        case Tagged(lenient=True):
            return _with_objects(constraint)
        case _:
            return constraint


def _with_objects(tagged: Tagged) -> Tagged:
    tags = []
    for tag in tagged.tags:
        inside = _ANY_OBJECT if isinstance(tag.inside, JsonSchema) else tag.inside
        tags.append(msgspec.structs.replace(tag, inside=inside))
    return msgspec.structs.replace(tagged, tags=tuple(tags))


def _told(error: str) -> str:
    """The first lines of an error, as one."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
