"""Positions without a token id: what stands for them in the prefix tree, and their vectors.

Such a position gets an id that no token has. Given embeddings have ids from `GIVEN` downwards, the
same for equal vectors, and where they bring positions, for equal ones: so the tree finds a prefix
again only where its keys are the same. An image's rows have a key of their own, which says both:
hashing each of them would take the engine long. The
virtual tokens of an adapter come before a prompt, and have ids from `VIRTUAL` downwards, by their
index; whose they are, the salt of their root says, which has the adapter's digest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import numpy as np

from tokenpod.core.plan import GIVEN
from tokenpod.core.positions import placed_vectors
from tokenpod.core.requests import Request
from tokenpod.scheduler.pool.radix import Tokens

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
        for placed in placed_vectors(request):
            vectors, place = placed.given.rows, placed.place
            if placed.given.key:
                prompt[place : place + len(vectors)] = self._ids_of(placed.given.key, len(vectors))
                continue
            # Keys are turned by positions: equal vectors elsewhere are another prefix.
            where = [b""] * len(vectors)
            if placed.given.axes:
                behind = placed.end + placed.shift_behind
                where = [np.append(axes, behind).tobytes() for axes in placed.axes().T]
            for at, vector in enumerate(vectors):
                prompt[place + at] = self._ids_of(vector.tobytes() + where[at], 1)[0]
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


def vectors_of(request: Request, start: int, end: int) -> list[Any]:
    """What is given of positions `start` to `end`, in order: [m, width] each, as `GivenVectors` has
    them.
    """
    found = []
    for placed in placed_vectors(request):
        rows, own = placed.given.rows, placed.place
        first, last = max(start, own), min(end, own + len(rows))
        if first < last:
            found.append(rows[first - own : last - own])
    return found
