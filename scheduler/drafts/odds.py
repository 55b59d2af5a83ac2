"""How often guesses have come true: of each sequence, and of all that there were."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenpod.scheduler.sequences.table import Ints

Floats = npt.NDArray[np.float64]

#: A share is that of the last 32 to 64 cases; and so many cases are taken from all rows together.
_WINDOW = 64
_PRIOR = 4.0
#: (yes, cases) of guesses that there are always, and that are hoped to be good.
_CERTAIN, _HOPED = (16.0, 16.0), (12.0, 16.0)


class Odds:
    """How often there are guesses, and how often they are right: by place in the table.

    `hopeful`: guesses of which nothing is known are taken to be good ones.
    """

    def __init__(self, *, hopeful: bool = False) -> None:
        #: [3 shares, (yes, cases), places]: a step has guesses; the first is right; one behind a
        #: right one is.
        self._counts = np.zeros((3, 2, 64))
        #: The same of all rows together.
        self._all = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
        if hopeful:
            self._all[:] = [_CERTAIN, _HOPED, _HOPED]

    @property
    def cases(self) -> float:
        """How many guesses, or steps without any, are counted."""
        return float(self._all[0, 1]) - 1

    def of(self, places: Ints, *, cautious: bool = True) -> tuple[Floats, Floats, Floats]:
        """[n] each: the shares; or, `cautious`, less what chance may have added to them.

        That is one standard error.
        """
        self._grow(int(places.max(initial=0)))
        prior = (self._all[:, 0] / self._all[:, 1])[:, None]
        yes, cases = self._counts[:, 0, places], self._counts[:, 1, places]
        shares = (yes + _PRIOR * prior) / (cases + _PRIOR)
        known = cases + np.minimum(self._all[:, 1], _PRIOR**2)[:, None]
        if cautious:
            shares -= np.sqrt(shares * (1 - shares) / known)
        some, first, further = shares.clip(0, 0.99)
        return some, first, further

    def none(self, place: int) -> None:
        """There was no guess."""
        self._note(place, 0, 0, 1)

    def checked(self, place: int, drafted: int, right: int) -> None:
        """Of so many guesses the first `right` were right."""
        self._note(place, 0, 1, 1)
        self._note(place, 1, int(right > 0), 1)
        if right and drafted > 1:
            self._note(place, 2, right - 1, min(right, drafted - 1))

    def reset(self, place: int) -> None:
        """Another sequence has this place."""
        self._grow(place)
        self._counts[:, :, place] = 0

    def _note(self, place: int, share: int, yes: int, cases: int) -> None:
        self._grow(place)
        for counts in (self._counts[share, :, place], self._all[share]):
            counts += (yes, cases)
            if counts[1] >= _WINDOW:
                counts /= 2

    def _grow(self, place: int) -> None:
        while place >= self._counts.shape[2]:
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)), axis=2)
