"""A source of drafts whose acceptance is set: it knows what comes, and says so or not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.sequences.sequence import Sequence

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

    def find(self, sequence: Sequence, most: int) -> list[int]:
        known = self._expected[sequence.id][len(sequence.outputs) :][:most]
        known += [5] * (most - len(known))
        return [
            token if self._chance.random() < self._right else (token + 1) % self._vocabulary
            for token in known
        ]

    def forget(self, sequence: Sequence) -> None:
        pass


def drafting(expected: Mapping[int, list[int]], kind: str, most: int, vocabulary: int) -> partial:
    """What a scheduler is given so that every row always drafts."""
    return partial(Drafting, Guessing(expected, KINDS[kind], vocabulary), most)
