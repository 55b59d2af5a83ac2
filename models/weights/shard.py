"""What one of several parallel ranks has of a model: its heads, its features, its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tokenpod.models.weights.weights import Axis, Division, Source, Weight


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's shard of every tensor that is divided, the first rank being 0.

    Query heads and feed-forward features are divided evenly. So are key/value heads, unless there
    are fewer than ranks: then each rank has the one that its query heads read. The vocabulary's
    rows are divided into blocks of equal length, and the last ones may lie beyond its end.
    """

    rank: int = 0
    world: int = 1

    def part(self, axis: Axis) -> range:
        """Which of an axis's features this rank has."""
        length = self.length(axis)
        if axis.division is Division.WHOLE:
            return range(length)
        if axis.division is Division.VOCABULARY:
            first, end = self.rank * length, (self.rank + 1) * length
            return range(min(first, axis.length), min(end, axis.length))
        if axis.division is Division.KEY:
            first = self.rank * (axis.length // axis.unit) // self.world * axis.unit
        else:
            first = self.rank * length
        return range(first, first + length)

    def length(self, axis: Axis) -> int:
        """How long this rank's tensors are along an axis."""
        if axis.division is Division.WHOLE:
            return axis.length
        if axis.division is Division.VOCABULARY:
            return -(-axis.length // self.world)
        if axis.division is Division.KEY:
            return self._kv_heads(axis.length // axis.unit) * axis.unit
        return axis.length // self.world

    def shape(self, source: Source) -> tuple[int, ...]:
        """This rank's part of a source."""
        return tuple(self.length(axis) for axis in source.axes)

    def numbers(self, weights: Iterable[Weight]) -> int:
        """How many numbers this rank's weights are."""
        return sum(math.prod(self.shape(s)) for weight in weights for s in weight.sources)

    def _kv_heads(self, kv_heads: int) -> int:
        return max(kv_heads // self.world, 1)


#: The shard of a single rank: the whole model.
WHOLE = Shard()
