"""Whether a tokenizer's cost is bounded by the length of its text, so that short texts may be
tokenised on the event loop.

A `tokenizer.json` can hold steps whose cost is not: a replacement that makes a letter a megabyte,
a pattern that backtracks for ever. Those of models in use are all of the kinds listed here. What is
not listed is tokenised in a worker process, whatever its length.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend

#: Normalisers that make a character a few, and pre-tokenizers that look at each once.
_PLAIN_STEPS = frozenset(
    {
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt"),
        *("BertNormalizer", "BertPreTokenizer", "Precompiled", "ByteLevel", "Metaspace"),
        *("Whitespace", "WhitespaceSplit", "CharDelimiterSplit", "Punctuation", "Digits"),
        *("UnicodeScripts", "FixedLength"),
    }
)
#: By how much all replacements together may lengthen a text, and what may stand before it.
_MOST_GROWTH = 64
_MOST_PREPENDED = 64
#: Tokens that are added around any text.
_MOST_ADDED_TOKENS = 64
#: Characters of a word that WordPiece looks up: it tries all pieces of each.
_MOST_WORD = 256
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|.)")
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{\d*,?\d*\})")
_OPTIONAL_GROUP = re.compile(r"\((?:\?[a-z]*:)?[^()]*\)\?")
_REPETITION = re.compile(r"[*+]|\{\d*,\d*\}")


def is_bounded(backend: Backend) -> bool:
    """Whether a text of n bytes costs at most what a few of the usual kinds of steps take."""
    normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
    return (
        _growth(normalizer) <= _MOST_GROWTH
        and _growth(pre_tokenizer) <= _MOST_GROWTH
        and backend.num_special_tokens_to_add(is_pair=False) <= _MOST_ADDED_TOKENS
        and getattr(backend.model, "max_input_chars_per_word", 0) <= _MOST_WORD
    )


def _state(step: Any) -> dict[str, Any]:
    """A normaliser or pre-tokenizer as its file has it."""
    return json.loads(step.__getstate__()) if step is not None else {"type": "Lowercase"}


def _growth(step: dict[str, Any]) -> float:
    """By how much a step lengthens a text at most; infinite: it is not known."""
    kind = step["type"]
    if kind == "Sequence":
        growth = 1.0
        for part in step.get("normalizers") or step.get("pretokenizers") or ():
            growth *= _growth(part)
        return growth
    if kind in _PLAIN_STEPS:
        return 1.0
    if kind == "Prepend":
        return 1.0 if len(step["prepend"]) <= _MOST_PREPENDED else float("inf")
    if kind in ("Replace", "Split") and (least := _least_match(step["pattern"])):
        return max(len(step.get("content", "")) / least, 1.0)
    return float("inf")


def _least_match(pattern: dict[str, str]) -> int:
    """Characters of the shortest match; 0: of none, or looking for it has no bound."""
    if "String" in pattern:
        return len(pattern["String"])
    regex = pattern.get("Regex", "")
    return 1 if regex and _is_quick(regex) else 0


def _is_quick(regex: str) -> bool:
    """Whether looking for it takes time in proportion to the text's length squared at most.

    Each alternative repeats single characters: once, or twice where the second repetition ends it,
    for then nothing that follows can fail and have all divisions between the two tried.
    """
    plain = _ESCAPE.sub("x", _CLASS.sub("x", regex))
    if _REPEATED_GROUP.search(plain):
        return False
    return all(
        len(parts := _REPETITION.split(part)) <= 2 or (len(parts) == 3 and not parts[2])
        for part in _OPTIONAL_GROUP.sub("", plain).split("|")
    )
