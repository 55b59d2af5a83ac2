"""What a library of grammars must do; `guidance` is the one in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenpod.core.constraints import Constraint

#: A mask that takes longer, in nanoseconds, is slow: nobody else waits for the next one behind it.
SLOW_NS = 5_000_000
#: Tokens that may be drawn, 32 to a word: bit t % 32 of word t // 32 is token t's.
Words = npt.NDArray[np.int32]


class Refused(Exception):
    """A constraint that can't be compiled; the text is for the client."""


class Fault(Exception):
    """An exception that nobody foresaw, in another process; the text is its traceback."""


class Lost(Exception):
    """The process that tries constraints was killed, which is no constraint's doing."""


class LimitReached(Exception):
    """A matcher has reached one of the library's limits, and is of no use any more."""


class Matcher(Protocol):
    """The state of one text under a constraint. Used by one thread at a time."""

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        ...

    def begin_again(self) -> bool:
        """Go back to the beginning, for another text; False: it is of no use for one."""
        ...

    def take(self, token: int) -> None:
        """Go on with a token that the last mask allows. Raises LimitReached."""
        ...

    def fill(self, words: Words) -> bool:
        """Write which tokens may follow; whether the text may end here. Raises LimitReached.

        Args:
            words: [ceil(vocab / 32)] all of them are written.
        """
        ...

    @property
    def whole(self) -> bool:
        """Whether the text so far satisfies the constraint."""
        ...


@dataclass(frozen=True, slots=True)
class Advanced:
    """What became of several matchers: n of them."""

    #: [n, words] their masks.
    words: Words
    #: [n] whether the text may end here.
    ends: npt.NDArray[np.bool_]
    #: Those that have reached a limit: their masks mean nothing.
    over: Sequence[int] = ()
    #: Those whose masks may each have taken more than `SLOW_NS`.
    suspects: Sequence[int] = ()


class Library(Protocol):
    """Compiles constraints for one vocabulary. Its calls let other threads run."""

    def compile(self, constraint: Constraint, prepared: str = "") -> Matcher:
        """A matcher at the beginning of a text. Raises Refused.

        Args:
            constraint: it.
            prepared: what a trial made of it (trial.py); empty: there was none.
        """
        ...

    def joins(self, matcher: Matcher) -> bool:
        """Whether `advance` takes this matcher."""
        ...

    def advance(self, taken: Sequence[tuple[Matcher, int]], threads: int) -> Advanced:
        """Go on with a token of each of several matchers: what `fill` says of each.

        Args:
            taken: matchers that join, with tokens that their last masks allow.
            threads: used at most besides the caller's.
        """
        ...
