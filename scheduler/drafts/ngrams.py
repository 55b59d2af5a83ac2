"""Drafts without a model: what followed the last tokens when they occurred before.

"Prompt lookup": outputs that repeat their prompt (edited code, quotations, tables) or themselves
are guessed well, others not at all. Each sequence has an index of its n-grams: of the prompt one
that is sorted once, of what came since one that grows. So a lookup costs the same few microseconds
however long the context is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenpod.scheduler.pool.radix import Tokens
from tokenpod.scheduler.sequences.sequence import Sequence

#: Tokens that must have occurred before, in their order: three, or else two.
_LONGEST = 3
_SHORTEST = 2
#: Bits of a token's id in a key of three.
_BITS = 21
_MASK = (1 << _BITS) - 1

_Keys = npt.NDArray[np.int64]


class NGrams:
    """Drafts without a model: what followed the latest match of the last tokens."""

    watched = True

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def find(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that followed the last ones before."""
        index = self._indexes.get(sequence.id)
        if index is None:
            prompt = sequence.inputs[: sequence.prompt_length]
            index = self._indexes[sequence.id] = _Index(prompt)
        index.extend(sequence.outputs)
        return index.continued(most)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self._indexes.pop(sequence.id, None)


class _Index:
    """The n-grams of one text, and where each of them ended last, but for those at its end."""

    def __init__(self, prompt: Tokens) -> None:
        self._prompt = prompt
        self._sorted = {n: _sorted(prompt, n) for n in (_LONGEST, _SHORTEST)}
        #: Tokens since.
        self._outputs: list[int] = []
        #: Key -> the position behind it, of n-grams that end among the outputs or with the prompt.
        self._ends: dict[int, int] = {}
        #: The last three tokens, -1 where there are fewer.
        self._last = [-1, -1, -1, *(prompt[-_LONGEST:] & _MASK).tolist()][-_LONGEST:]

    def extend(self, outputs: list[int]) -> None:
        """Take what has come since."""
        start = len(self._prompt)
        for at in range(len(self._outputs), len(outputs)):
            # What ends before this token has a token behind it now.
            for key in self._keys():
                self._ends[key] = start + at
            self._outputs.append(outputs[at])
            self._last = [*self._last[1:], outputs[at]]

    def continued(self, most: int) -> list[int]:
        """Up to `most` tokens behind the latest match of the last ones; a match may overlap."""
        for key, n in zip(self._keys(), (_LONGEST, _SHORTEST), strict=False):
            at = self._ends.get(key, 0) or _behind(self._sorted[n], key)
            if at:
                return self._from(at, most)
        return []

    def _from(self, at: int, most: int) -> list[int]:
        start = len(self._prompt)
        found = self._prompt[at : at + most].tolist() if at < start else []
        since = max(at - start, 0)
        found += self._outputs[since : since + most - len(found)]
        if (end := next((i for i, token in enumerate(found) if token < 0), most)) < most:
            return found[:end]  # a given embedding can't be drawn
        # Where the text ends it goes on with what it has just repeated.
        period = len(found)
        while len(found) < most:
            found.append(found[len(found) - period])
        return found

    def _keys(self) -> list[int]:
        """Of the last three and the last two tokens, as far as there are so many."""
        a, b, c = self._last
        if b < 0:
            return []
        two = (_MASK << _BITS | b) << _BITS | c
        return [two] if a < 0 else [(a << _BITS | b) << _BITS | c, two]


def _sorted(prompt: Tokens, n: int) -> tuple[_Keys, _Keys]:
    """Keys of n-grams that have a token behind them, rising, and the position of that token."""
    ids = prompt.astype(np.int64) & _MASK  # given embeddings have ids below 0
    keys = np.full(max(len(ids) - n, 0), _MASK if n == _SHORTEST else 0, np.int64)
    for i in range(n):
        keys = keys << _BITS | ids[i : i + len(keys)]
    order = keys.argsort(kind="stable")
    return keys[order], order + n


def _behind(index: tuple[_Keys, _Keys], key: int) -> int:
    """The position behind the last n-gram of this key; 0: there is none."""
    keys, ends = index
    at = int(keys.searchsorted(key, side="right")) - 1
    return int(ends[at]) if at >= 0 and keys[at] == key else 0
