"""A language model of a few lines: each next token is a hash of everything before it.

It has what the protocol's rules need: an end token, special tokens, tokens of one and of two
characters, and ties between probabilities. Greedy tokens depend on the whole context and on nothing
else, so that a shard that mixes up prompts, chunks or batches can't go unnoticed.
"""

from __future__ import annotations

import hashlib
import math
import random
import zlib
from collections.abc import Sequence
from functools import cache

BOS, EOS = 1, 2
SPECIAL = frozenset({0, BOS, EOS})
#: Token 3 + b is the byte b.
FIRST_BYTE = 3
PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd")
FIRST_PAIR = FIRST_BYTE + 256
#: What the model can generate: the end, printable ASCII, and pairs.
CANDIDATES = (
    EOS,
    *(FIRST_BYTE + byte for byte in range(32, 127)),
    *(FIRST_PAIR + index for index in range(len(PAIRS))),
)
#: The values that a logit may have.
_LEVELS = tuple(level / 16 for level in range(128))


def encode(text: str, *, special: bool) -> list[int]:
    """One token a byte of UTF-8, after BOS where `special`."""
    return [BOS] * special + [FIRST_BYTE + byte for byte in text.encode()]


def piece(token: int) -> str:
    """The text of one token; a lone byte of a longer character is U+FFFD."""
    if token in SPECIAL:
        return ""
    if token >= FIRST_PAIR:
        return PAIRS[token - FIRST_PAIR]
    return bytes([token - FIRST_BYTE]).decode("utf-8", errors="replace")


def digest(tokens: Sequence[int], start: int = 0) -> int:
    """A hash of a context; `start` is that of what came before."""
    return zlib.crc32(b"".join(token.to_bytes(2, "little") for token in tokens), start)


def logits(context: int) -> list[float]:
    """One number a candidate, from few values, so that ties happen."""
    drawn = hashlib.shake_128(context.to_bytes(4, "little")).digest(len(CANDIDATES))
    return [_LEVELS[byte & 0x7F] for byte in drawn]


def logprobs(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    total = _normaliser(scores, temperature)
    return [score / temperature - total for score in scores]


def logprob(scores: Sequence[float], index: int, temperature: float = 1.0) -> float:
    """One of `logprobs`, for less."""
    return scores[index] / temperature - _normaliser(scores, temperature)


def _normaliser(scores: Sequence[float], temperature: float) -> float:
    return math.log(sum(map(_exponentials(temperature).__getitem__, scores)))


@cache
def _exponentials(temperature: float) -> dict[float, float]:
    return {level: math.exp(level / temperature) for level in _LEVELS}


def choose(scores: Sequence[float], temperature: float, seed: int | None, step: int) -> int:
    """The index of the next candidate: greedy without a seed, else drawn by (seed, step)."""
    if seed is None:
        return scores.index(max(scores))
    weights = [math.exp(each) for each in logprobs(scores, temperature)]
    return random.Random(seed * 1_000_003 + step).choices(range(len(scores)), weights)[0]


def top(values: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` highest values and of all that tie with the last of them."""
    order = sorted(range(len(values)), key=lambda index: -values[index])
    floor = values[order[min(count, len(order)) - 1]]
    return [index for index in order if values[index] >= floor]
