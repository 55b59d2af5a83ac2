"""Positions without a token id: what stands for them in the prefix tree, and their vectors.

Such a position gets an id that no token has. Given embeddings have ids from `GIVEN` downwards, the
same for equal vectors, or for those of one key: so the tree finds a prefix again only where the
vectors are the same. An image's rows have a key, since hashing them would take the engine long, and
since an image of another shape may have equal rows at other places. The
virtual tokens of an adapter come before a prompt, and have ids from `VIRTUAL` downwards, by their
index; whose they are, the salt of their root says, which has the adapter's digest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from tokenpod.core.plan import GIVEN
from tokenpod.core.requests import Request
from tokenpod.scheduler.pool.radix import Tokens

Vectors = npt.NDArray[np.float32]

#: Different vectors that are remembered. One that is forgotten gets another id, and its prefix is
#: computed once more.
_MOST_VECTORS = 1 << 16

#: When ids begin anew, what had the first one has long been evicted.
_MOST_IDS = 1 << 30

#: The id of an adapter's first virtual token.
VIRTUAL = GIVEN - _MOST_IDS


class VectorIds:
    """Ids of vectors, by their SHA-256."""

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._given = 0

    def prompt_of(self, request: Request) -> Tokens:
        """Virtual tokens, then the prompt's, with ids of vectors in the place of those given."""
        virtual = request.virtual_tokens
        prompt = np.empty(request.positions, np.int32)
        prompt[:virtual] = VIRTUAL - np.arange(virtual)
        prompt[virtual:] = request.prompt
        for given in request.given:
            start, vectors = virtual + given.start, _vectors(given.numbers, given.width)
            if given.key:
                prompt[start : start + len(vectors)] = self._ids_of(given.key, len(vectors))
                continue
            for at, vector in enumerate(vectors, start):
                prompt[at] = self._ids_of(vector.tobytes(), 1)[0]
        return prompt

    def _ids_of(self, content: bytes, count: int) -> Tokens:
        """[count] those of vectors that these bytes are, or name."""
        digest = hashlib.sha256(content).digest()
        found = self._ids.pop(digest, None)
        if found is None:
            found = self._given
            self._given += count
        self._ids[digest] = found
        if len(self._ids) > _MOST_VECTORS:
            self._ids.popitem(last=False)
        return (GIVEN - (found + np.arange(count)) % _MOST_IDS).astype(np.int32)


def vectors_of(request: Request, start: int, end: int) -> list[Vectors]:
    """[m, width] each: what is given of positions `start` to `end`, in order."""
    found = []
    for given in sorted(request.given, key=lambda given: given.start):
        rows = _vectors(given.numbers, given.width)
        own = request.virtual_tokens + given.start
        first, last = max(start, own), min(end, own + len(rows))
        if first < last:
            found.append(rows[first - own : last - own])
    return found


def _vectors(numbers: bytes, width: int) -> Vectors:
    return np.frombuffer(numbers, "<f4").astype(np.float32, copy=False).reshape(-1, width)
