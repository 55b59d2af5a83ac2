"""A source of drafts whose acceptance is set: it knows what comes, and says so or not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

from tokenpod.scheduler.drafting import Drafting
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.tree_shapes import Shape

#: How many of the guesses are right.
KINDS = {"right": 1.0, "random": 0.7, "wrong": 0.0}


class Guessing:
    """Guesses what follows.

    Args:
        expected: outputs by sequence id; what follows them is guessed to be token 5.
        right: the share of right guesses, each by itself.
        vocabulary: a wrong guess is another token below this.
    """

    watched = True

    def __init__(self, expected: Mapping[int, list[int]], right: float, vocabulary: int) -> None:
        self._expected, self._right, self._vocabulary = expected, right, vocabulary
        self._chance = random.Random(4)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        known = self._expected[sequence.id][len(sequence.outputs) :][:most]
        known += [5] * (most - len(known))
        return [
            token if self._chance.random() < self._right else (token + 1) % self._vocabulary
            for token in known
        ]

    def propose_tree(self, sequence: Sequence, shape: Shape) -> list[int]:
        """Right ones are behind each other, each by chance among those that follow one."""
        known = self._expected[sequence.id][len(sequence.outputs) :]
        known += [5] * len(shape)
        drafts, depths, right = [0] * len(shape), [0], {0}
        for parent in shape:
            depths.append(depths[parent] + 1)
        for parent in range(len(shape)):
            following = [at for at, before in enumerate(shape) if before == parent]
            token = known[depths[parent]]
            for n, at in enumerate(following, 1):
                drafts[at] = (token + n) % self._vocabulary
            if parent in right and following and self._chance.random() < self._right:
                at = self._chance.choice(following)
                drafts[at] = token
                right.add(at + 1)
        return drafts

    def forget(self, sequence: Sequence) -> None:
        pass


def drafting(
    expected: Mapping[int, list[int]], kind: str, most: int, vocabulary: int, *, tree: int = 0
) -> partial:
    """What a scheduler is given so that every row always drafts; `tree`: so many in a tree."""
    return partial(Drafting, Guessing(expected, KINDS[kind], vocabulary), most, tree=tree)
