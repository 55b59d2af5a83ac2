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
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]

#: Branches that a step can have; executors have room for so many.
MOST_BRANCHES = 32


@dataclass(frozen=True, slots=True)
class Branches:
    """What the trees of a step are."""

    #: [T] of each token: its depth, and which token of the step its parent is (of a row's first,
    #: itself).
    t_depth: Ints
    t_before: Ints
    #: [n] which tokens of the step are branches, rising, and of which row of the plan.
    tokens: Ints
    rows: Ints

    @classmethod
    def of(cls, r_tokens: Ints, t_parent: Ints) -> Branches:
        """Of a plan's columns.

        Raises ValueError where a token follows itself, a later one, or one of another row.
        """
        starts = np.repeat(r_tokens.cumsum() - r_tokens, r_tokens)
        index = np.arange(len(starts)) - starts
        if len(t_parent) != len(index) or not _each_behind_another(t_parent, index):
            raise ValueError("a step's drafts are no trees: a token follows none before it")
        before = starts + np.maximum(t_parent, 0)
        depth = index.copy()
        # Behind the first branch of a row each token's depth is its parent's and one.
        for at in np.flatnonzero(
            np.repeat(_branched(r_tokens, t_parent, index), r_tokens)
        ).tolist():
            depth[at] = depth[before[at]] + 1 if index[at] else 0
        tokens = np.flatnonzero(depth != index)
        return cls(depth, before, tokens, np.repeat(np.arange(len(r_tokens)), r_tokens)[tokens])

    def path(self, token: int) -> list[int]:
        """The tokens of the step from a row's first one to this, which is the last."""
        path = [token]
        while self.t_before[path[-1]] != path[-1]:
            path.append(int(self.t_before[path[-1]]))
        return path[::-1]


def _each_behind_another(t_parent: Ints, index: Ints) -> bool:
    """Whether each token but the first of a row follows one before it."""
    least = np.where(index == 0, -1, 0)
    return bool(((least <= t_parent) & (t_parent < index)).all())


def _branched(r_tokens: Ints, t_parent: Ints, index: Ints) -> npt.NDArray[np.bool_]:
    """[B] whether a row has branches."""
    apart = np.concatenate(([0], (t_parent != index - 1).cumsum()))
    ends = r_tokens.cumsum()
    found: npt.NDArray[np.bool_] = apart[ends] > apart[ends - r_tokens]
    return found
