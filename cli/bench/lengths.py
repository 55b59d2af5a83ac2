"""Distributions of lengths in tokens, and how the command line writes them."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec


class Random(Protocol):
    """What is asked of numpy's `Generator`."""

    def integers(self, low: int, high: int) -> int:
        """One draw from [low, high)."""

    def normal(self) -> float:
        """One draw from the standard normal distribution."""


class Fixed(msgspec.Struct, frozen=True, tag="fixed"):
    """Always the same."""

    tokens: int

    def draw(self, random: Random) -> int:
        """The length."""
        return self.tokens


class Uniform(msgspec.Struct, frozen=True, tag="uniform"):
    """Every length from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        """A length."""
        return int(random.integers(self.low, self.high + 1))


class LogNormal(msgspec.Struct, frozen=True, tag="lognormal"):
    """Many short, few long: the logarithm is normal with deviation `sigma`, cut at 1 and `most`."""

    median: int
    sigma: float
    most: int

    def draw(self, random: Random) -> int:
        """A length."""
        exponent = math.log(self.median) + self.sigma * float(random.normal())
        # Compared as logarithms: a wide sigma overflows `exp`.
        return self.most if exponent >= math.log(self.most) else max(1, round(math.exp(exponent)))


Lengths = Fixed | Uniform | LogNormal


def parse_lengths(text: str) -> Lengths:
    """`128`, `uniform:16:256` or `lognormal:180:0.9:2048` (median, sigma, longest).

    Raises ValueError that quotes the text and says what is wrong.
    """
    kind, *numbers = text.split(":")
    try:
        match kind, numbers:
            case "uniform", [low, high]:
                return _checked(text, Uniform(int(low), int(high)))
            case "lognormal", [median, sigma, most]:
                return _checked(text, LogNormal(int(median), float(sigma), int(most)))
            case _, []:
                return _checked(text, Fixed(int(kind)))
    except _OutOfRange:
        raise
    except ValueError:
        pass
    raise ValueError(f"is {text!r}: write N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:MAX")


class _OutOfRange(ValueError):
    """Well written, and impossible."""


def _checked(text: str, lengths: Lengths) -> Lengths:
    match lengths:
        case Fixed(tokens) if tokens < 1:
            raise _OutOfRange(f"is {text!r}: a length is at least 1 token")
        case Uniform(low, high) if not 1 <= low <= high:
            raise _OutOfRange(f"is {text!r}: needs 1 <= LOW <= HIGH")
        case LogNormal(median, sigma, most) if not (1 <= median <= most and 0 <= sigma < math.inf):
            raise _OutOfRange(f"is {text!r}: needs 1 <= MEDIAN <= MAX and SIGMA >= 0")
    return lengths
