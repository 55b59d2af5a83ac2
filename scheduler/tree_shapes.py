"""Shapes of trees of drafts: which draft follows which."""

from __future__ import annotations

import heapq
from functools import cache, lru_cache

#: How often the guesses behind a right one are right, the likeliest first: the mean of a trained
#: draft model and a trained head, greedy and sampled, at six places (docs/drafts.md).
CHANCES = (0.76, 0.11, 0.046, 0.026)

#: A shape: of each draft, the number of the one that it follows, from 1; 0: the last known token.
Shape = tuple[int, ...]


@cache
def tree_of(nodes: int, depth: int) -> Shape:
    """The tree of so many drafts, not more than `depth` behind each other, that is right most.

    What follows a draft comes directly behind it, the likeliest first. So the likeliest chain is
    its beginning; a tree of few drafts is that chain.
    """
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while waiting and len(paths) <= nodes:
        chance, path = heapq.heappop(waiting)
        paths.append(path)
        if len(path) < depth:
            for rank, each in enumerate(CHANCES):
                heapq.heappush(waiting, (chance * each, (*path, rank)))
    numbers = {path: number for number, path in enumerate(sorted(paths))}
    return tuple(numbers[path[:-1]] for path in numbers if path)


def chain_of(nodes: int) -> Shape:
    """Each draft follows the one before it."""
    return tuple(range(nodes))


def is_chain(shape: Shape) -> bool:
    """Whether each draft follows the one before it."""
    return shape == chain_of(len(shape))


@lru_cache(256)
def widths_of(shape: Shape) -> tuple[int, ...]:
    """How many drafts are behind none, behind one, and so on."""
    depths = [0]
    for parent in shape:
        depths.append(depths[parent] + 1)
    return tuple(depths.count(depth) for depth in range(1, max(depths) + 1))


def depth_of(shape: Shape) -> int:
    """How many drafts are behind each other, at most."""
    return len(widths_of(shape))


def ranks_of(shape: Shape) -> int:
    """How many drafts follow one token, at most."""
    return max(map(shape.count, shape), default=1)


def way_along(shape: Shape, drafts: list[int], drawn: list[int]) -> list[int]:
    """The numbers, from 1, of the drafts that equal what was drawn, one behind the other.

    Args:
        shape: of n drafts.
        drafts: [n] tokens.
        drawn: tokens in order, the first one behind the last known token; all but the last are
            drafts.
    """
    way, at = list[int](), 0
    for token in drawn[:-1]:
        at = next(
            number
            for number, (parent, draft) in enumerate(zip(shape, drafts, strict=True), 1)
            if parent == at and draft == token
        )
        way.append(at)
    return way
