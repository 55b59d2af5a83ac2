"""Trees of drafts: which tokens of a step don't follow the one before them.

A row's tokens lie in order of the tree: each behind the one that it follows, its *parent*. How many
tokens are on the way from the row's first one to a token is its depth, which is its position, too.

    token of the row   0   1   2   3   4   5        0 - 1 - 2 - 3
    parent            -1   0   1   2   1   0            |   +-- 4
    depth              0   1   2   3   2   1            +-- 5

The *trunk* are the first tokens, as far as each follows the one before it: what a row without a
tree is altogether. The others are *branches*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]

#: Drafts of a step that can be in trees; executors have room for so many branches.
MOST_BRANCHES = 32


@dataclass(frozen=True, slots=True)
class Tree:
    """One row's, its tokens counted from its first one. The same are there step after step."""

    #: [n] of each token.
    depth: Ints
    before: Ints
    #: The tokens from the first one to each, itself included.
    ways: tuple[tuple[int, ...], ...]
    branches: Ints
    #: [m] the ways to the branches, one behind the other, and [branches] where each ends.
    way_tokens: Ints
    way_ends: Ints
    #: [k] the tokens that others follow, by depth, and [k, most] which do; -1: no more.
    asked: Ints
    following: Ints

    @classmethod
    def of(cls, parents: tuple[int, ...]) -> Tree:
        """Of each token its parent."""
        return _tree_of(parents)


@lru_cache(256)
def _tree_of(parents: tuple[int, ...]) -> Tree:
    ways: list[tuple[int, ...]] = []
    following: list[list[int]] = [[] for _ in parents]
    for token, parent in enumerate(parents):
        ways.append((*(ways[parent] if token else ()), token))
        if token:
            following[parent].append(token)
    depth = [len(way) - 1 for way in ways]
    branches = [token for token, each in enumerate(depth) if each != token]
    asked = sorted((t for t, each in enumerate(following) if each), key=depth.__getitem__)
    most = max(map(len, following))
    table = [[*following[t], *[-1] * (most - len(following[t]))] for t in asked]
    return Tree(
        np.array(depth),
        np.maximum(parents, 0),
        tuple(ways),
        np.array(branches, np.int64),
        np.array([each for token in branches for each in ways[token]], np.int64),
        np.array([len(ways[token]) for token in branches], np.int64).cumsum(),
        np.array(asked, np.int64),
        np.array(table, np.int64).reshape(len(asked), most),
    )


@dataclass(frozen=True, slots=True)
class Branches:
    """What the trees of a step are."""

    #: [T] of each token: its depth, and which token of the step its parent is (of a row's first,
    #: itself).
    t_depth: Ints
    t_before: Ints
    #: [n] which tokens of the step are branches, rising.
    tokens: Ints
    #: By row of the plan that has branches, rising: its first token, and its tree.
    trees: dict[int, tuple[int, Tree]]

    @classmethod
    def of(cls, r_tokens: Ints, t_parent: Ints) -> Branches:
        """Of a plan's columns.

        Raises ValueError where a token follows itself, a later one, or one of another row.
        """
        ends = r_tokens.cumsum()
        starts = (ends - r_tokens).repeat(r_tokens)
        index = np.arange(len(starts)) - starts
        if len(t_parent) != len(index) or not _each_behind_another(t_parent, index):
            raise ValueError("a step's drafts are no trees: a token follows none before it")
        depth, before = index.copy(), starts + np.maximum(index - 1, 0)
        trees: dict[int, tuple[int, Tree]] = {}
        apart = np.concatenate(([0], (t_parent != index - 1).cumsum()))
        tokens: list[Ints] = [np.empty(0, np.int64)]
        for row in np.flatnonzero(apart[ends] > apart[ends - r_tokens]).tolist():
            first, end = int(ends[row] - r_tokens[row]), int(ends[row])
            tree = Tree.of(tuple(t_parent[first:end].tolist()))
            depth[first:end], before[first:end] = tree.depth, tree.before + first
            trees[row] = first, tree
            tokens.append(tree.branches + first)
        return cls(depth, before, np.concatenate(tokens), trees)


def _each_behind_another(t_parent: Ints, index: Ints) -> bool:
    """Whether each token but the first of a row follows one before it."""
    least = np.where(index == 0, -1, 0)
    return bool(((least <= t_parent) & (t_parent < index)).all())
