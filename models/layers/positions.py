"""How attention knows where tokens stand, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: inverse wavelengths of pairs of dimensions, and a scale.

    The first `rotated` dimensions of a head are turned, the others are left alone. Dimension i
    pairs with i + rotated / 2, or, `interleaved`, 2i with 2i + 1.
    """

    #: [rotated / 2] radians per position.
    inverse_frequencies: tuple[float, ...]
    #: Multiplies sines and cosines.
    scale: float = 1.0
    interleaved: bool = False
    #: [rotated / 2] which axis of a position turns each pair: 0 time, 1 height, 2 width, where a
    #: position has three (multimodal rotation: Wang et al. 2024, Qwen2-VL). Empty: it has one.
    axes: tuple[int, ...] = ()
    #: Which of several sets of factors these frequencies were made with, for the operator.
    variant: str = ""

    @property
    def rotated(self) -> int:
        """Dimensions that are turned."""
        return 2 * len(self.inverse_frequencies)


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """Numbers of the checkpoint are added to logits, by how far off a key is, and on which side.

    Half of the buckets are for keys behind a query. Of each half the first are for one distance
    each, the others for more and more of them, up to `furthest` and beyond (Raffel et al. 2020).
    """

    buckets: int
    furthest: int = 128

    def bucket(self, distance: int) -> int:
        """Of a key so many positions before the query; below 0: behind it."""
        half = self.buckets // 2
        side, n, exact = (half if distance < 0 else 0), abs(distance), half // 2
        if n < exact:
            return side + n
        ratio = math.log(n / exact) / math.log(self.furthest / exact)
        return side + min(exact + int(ratio * (half - exact)), half - 1)


@dataclass(frozen=True, slots=True)
class Alibi:
    """Logits fall by slope · distance (Press et al. 2021)."""

    #: One per query head.
    slopes: tuple[float, ...]
