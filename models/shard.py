"""What one of several parallel ranks has of a model: its heads, its features, its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenpod.models.errors import ModelError
from tokenpod.models.layer_spec import Alibi, Attention, Experts, Latent, LayerSpec
from tokenpod.models.spec import ModelSpec
from tokenpod.models.weights import Axis, Division, Source, Weight


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's shard of every tensor that is divided, the first rank being 0.

    Query heads and feed-forward features are divided evenly. So are key/value heads, unless there
    are fewer than ranks: then each rank has the one that its query heads read. The vocabulary's
    rows are divided into blocks of equal length, and the last ones may lie beyond its end.
    """

    rank: int = 0
    world: int = 1

    def check(self, spec: ModelSpec) -> None:
        """Raise ModelError, in one line, if a model can't be divided among so many ranks."""
        problem = _problem(spec, self.world)
        if problem:
            fitting = [world for world in range(1, spec.heads + 1) if not _problem(spec, world)]
            raise ModelError(f"{problem}; {spec.architecture} here runs on {_either(fitting)}")

    def config(self, spec: ModelSpec) -> ModelSpec:
        """The same with this rank's heads and features; raises as `check` does.

        The vocabulary stays whole: it is what tokens are checked and sampled against.
        """
        self.check(spec)
        local = {layer: self._layer(layer) for layer in set(spec.layers)}
        return replace(spec, layers=tuple(local[layer] for layer in spec.layers))

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

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        mlp = replace(layer.mlp, width=layer.mlp.width // self.world)
        if isinstance(mlp, Experts) and mlp.shared is not None:
            mlp = replace(mlp, shared=replace(mlp.shared, width=mlp.shared.width // self.world))
        return replace(layer, attention=self._attention(layer.attention), mlp=mlp)

    def _attention(self, attention: Attention | Latent) -> Attention | Latent:
        if isinstance(attention, Latent):
            return replace(attention, heads=attention.heads // self.world)
        heads, positions = attention.heads // self.world, attention.positions
        if isinstance(positions, Alibi):
            positions = Alibi(positions.slopes[self.rank * heads : (self.rank + 1) * heads])
        kv_heads = self._kv_heads(attention.kv_heads)
        return replace(attention, heads=heads, kv_heads=kv_heads, positions=positions)

    def _kv_heads(self, kv_heads: int) -> int:
        return max(kv_heads // self.world, 1)


#: The shard of a single rank: the whole model.
WHOLE = Shard()


def _problem(spec: ModelSpec, world: int) -> str | None:
    """Why a model can't be divided among so many ranks, as the beginning of a sentence."""
    for layer in dict.fromkeys(spec.layers):
        attention, mlp = layer.attention, layer.mlp
        block = "an expert" if isinstance(mlp, Experts) else "a feed-forward block"
        divided = [(attention.heads, "query heads"), (mlp.width, f"features of {block}")]
        if isinstance(mlp, Experts) and mlp.shared is not None:
            divided.append((mlp.shared.width, "features of the shared experts"))
        for count, what in divided:
            if count % world:
                return f"{count} {what} can't be divided among {world} ranks"
        kv_heads = attention.kv.heads
        if kv_heads % world and world % kv_heads:
            return (
                f"{kv_heads} key/value heads can't be divided among {world} ranks, "
                f"nor {world} ranks among them"
            )
    return None


def _either(worlds: list[int]) -> str:
    """The numbers in words, as "1, 2 or 4 ranks"."""
    *most, last = map(str, worlds)
    return f"{', '.join(most)} or {last} ranks" if most else f"{last} rank only"
