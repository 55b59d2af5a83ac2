"""What one of several parallel ranks has of a model: its heads, its features, its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenpod.models.config import DecoderConfig
from tokenpod.models.errors import ModelError
from tokenpod.models.weights import Dim, Source, Split, Weight


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of every tensor that is divided, the first rank being 0.

    Query heads and feed-forward features are divided evenly. So are key/value heads, unless there
    are fewer than ranks: then each rank has the one that its query heads read. The vocabulary's
    rows are divided into blocks of equal length, and the last ones may lie beyond its end.
    """

    rank: int = 0
    world: int = 1

    def check(self, config: DecoderConfig) -> None:
        """Raise ModelError, in one line, if a model can't be divided among so many ranks."""
        problem = _problem(config, self.world)
        if problem:
            fitting = [world for world in range(1, config.heads + 1) if not _problem(config, world)]
            raise ModelError(f"{problem}; {config.architecture} here runs on {_either(fitting)}")

    def config(self, config: DecoderConfig) -> DecoderConfig:
        """The same with this rank's heads and features; raises as `check` does.

        The vocabulary stays whole: it is what tokens are checked and sampled against.
        """
        self.check(config)
        experts = config.experts
        if experts is not None:
            width = experts.intermediate_size // self.world
            experts = replace(experts, intermediate_size=width)
        return replace(
            config,
            heads=config.heads // self.world,
            kv_heads=self._kv_heads(config),
            intermediate_size=config.intermediate_size // self.world,
            experts=experts,
        )

    def part(self, dim: Dim, config: DecoderConfig) -> range:
        """Which of an axis's features this rank has, of a model that is divided."""
        if dim is Dim.VOCABULARY:
            block = self.length(dim, config)
            first, end = self.rank * block, (self.rank + 1) * block
            return range(min(first, config.vocab_size), min(end, config.vocab_size))
        length = self.length(dim, config)
        if dim is Dim.KEY:
            first = self.rank * config.kv_heads // self.world * config.head_dim
        else:
            first = self.rank * length
        return range(first, first + length)

    def length(self, dim: Dim, config: DecoderConfig) -> int:
        """How long this rank's tensors are along an axis that is divided."""
        if dim is Dim.VOCABULARY:
            return -(-config.vocab_size // self.world)
        if dim is Dim.KEY:
            return self._kv_heads(config) * config.head_dim
        return dim.length(config) // self.world

    def shape(self, source: Source, split: Split, config: DecoderConfig) -> tuple[int, ...]:
        """This rank's part of a tensor of the checkpoint."""
        return tuple(
            self.length(dim, config) if axis == split.value else dim.length(config)
            for axis, dim in enumerate(source.shape)
        )

    def numbers(self, weights: Iterable[Weight], config: DecoderConfig) -> int:
        """How many numbers this rank's weights are, of tables that were written out."""
        return sum(
            math.prod(self.shape(source, weight.split, config))
            for weight in weights
            for source in weight.sources
        )

    def _kv_heads(self, config: DecoderConfig) -> int:
        return max(config.kv_heads // self.world, 1)


#: All of it.
WHOLE = Share()


def _problem(config: DecoderConfig, world: int) -> str | None:
    """Why a model can't be divided among so many ranks, as the beginning of a sentence."""
    divided = [(config.heads, "query heads")]
    experts = config.experts
    if experts is None or len(experts.layers) < config.layers:
        divided.append((config.intermediate_size, "features of a feed-forward block"))
    if experts is not None:
        divided.append((experts.intermediate_size, "features of an expert"))
    for count, what in divided:
        if count % world:
            return f"{count} {what} can't be divided among {world} ranks"
    if config.kv_heads % world and world % config.kv_heads:
        return (
            f"{config.kv_heads} key/value heads can't be divided among {world} ranks, "
            f"nor {world} ranks among them"
        )
    return None


def _either(worlds: list[int]) -> str:
    """The numbers in words, as "1, 2 or 4 ranks"."""
    *most, last = map(str, worlds)
    return f"{', '.join(most)} or {last} ranks" if most else f"{last} rank only"
