"""What a model is, as data: what the decoder composes, and what weight tables follow from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tokenpod.core.model_size import Expansion
from tokenpod.core.own_state import OwnState
from tokenpod.kernels.cache.kv_pool import KVLayout
from tokenpod.kernels.cache.state_pool import StateLayout
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.positions import Rope
from tokenpod.models.specs.layer_spec import Experts, LayerSpec, Mlp
from tokenpod.models.weights.shard import Shard

#: Of all layers: each has tensors of its own. Kimi K2 has 23,040.
MOST_EXPERTS = 1 << 15


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned positions: position p has row p + offset of a table of `rows`."""

    rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class PerLayerRows:
    """A table with a row per token for all layers, each of which has `width` numbers of it."""

    rows: int
    width: int
    #: Of what is made of the stream for each layer.
    norm: Norm


@dataclass(frozen=True, slots=True)
class Embedding:
    """From tokens to the stream: rows · scale, projected, plus positions, normed."""

    scale: float = 1.0
    #: Whether what is given in place of rows is scaled too.
    scales_given: bool = True
    #: Features of a row where they are not the stream's: a product without bias leads there.
    width: int | None = None
    positions: Positions | None = None
    norm: Norm | None = None
    #: What layers read besides the stream.
    per_layer: PerLayerRows | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """From the stream to logits; `width` of the embedding applies, from the stream back to it."""

    #: The weight is the embedding.
    tied: bool = False
    bias: bool = False
    #: Each row of the weight is divided by its length.
    normalised: bool = False
    #: Multiplies logits, before the soft cap.
    scale: float = 1.0
    #: Logits x become softcap · tanh(x / softcap).
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Raise ModelError for a head that there is not."""
        if self.tied and self.normalised:
            raise ModelError("head.normalised: the head has a weight of its own")


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    #: Positions the model can address.
    max_positions: int
    layers: tuple[LayerSpec, ...]
    #: Before the head.
    norm: Norm | None
    embedding: Embedding = Embedding()
    head: Head = Head()
    #: What the checkpoint says its weights are; None if it does not.
    dtype: torch.dtype | None = None
    #: Tokens that end a text.
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Raise ModelError if layers have too many experts."""
        experts = sum(x.mlp.count for x in self.layers if isinstance(x.mlp, Experts))
        if experts > MOST_EXPERTS:
            raise ModelError(
                f"{len(self.layers):,} layers have {experts:,} experts; at most {MOST_EXPERTS:,}"
                " are supported"
            )

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """What the pool has for a token, cache by cache."""
        found = (self.layers[i].mixer.cache.kv for i in self.storing)
        return tuple(layout for layout in found if layout is not None)

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """How far back each of these is read; None: all that there is."""
        return tuple(self.layers[i].mixer.cache.window for i in self.storing)

    @cached_property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        """What the pool has for a row, state by state."""
        found = (layer.mixer.cache.state for layer in self.layers)
        return tuple(layout for layout in found if layout is not None)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Query heads of each layer that has keys and values."""
        return tuple(self.layers[i].mixer.heads for i in self.storing)

    @cached_property
    def storing(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple(
            i for i, x in enumerate(mixers) if x.reads_layer is None and x.cache.kv is not None
        )

    def cache_of(self, i: int) -> int:
        """Which of the pool's caches layer `i` reads."""
        reads = self.layers[i].mixer.reads_layer
        if self.layers[i].mixer.cache.state is not None:
            return sum(layer.mixer.cache.state is not None for layer in self.layers[:i])
        return self.storing.index(i if reads is None else reads)

    @property
    def runs_on(self) -> str:
        """Whose code computes it."""
        return "tokenpod"

    @property
    def own_state(self) -> OwnState | None:
        """What rows keep besides keys and values; None: all lies in the pool's slots."""
        return self.own_state_of((self.dtype or torch.float32).itemsize)

    def own_state_of(self, item_bytes: int) -> OwnState | None:
        """The same of a model whose numbers take so many bytes."""
        if not self.state_layouts:
            return None
        row_bytes = sum(layout.nbytes(item_bytes) for layout in self.state_layouts)
        return OwnState(row_bytes, 0, pooled=True)

    @property
    def expansion(self) -> Expansion | None:
        """The largest of what attention over latent rows makes of them; None: there are none."""
        made = {layer.mixer.expansion for layer in self.layers}
        return max((x for x in made if x is not None), key=_expanded, default=None)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's."""
        return tuple(layer.mixer.cache.window for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The furthest that any layer looks back; None if one sees everything."""
        reach = [self.windows[i] for i in self.storing]
        known = [window for window in reach if window is not None]
        return max(known) if known and len(known) == len(reach) else None

    @property
    def embedding_width(self) -> int:
        """Features of a row of the embedding."""
        return self.embedding.width or self.hidden_size

    @property
    def widest(self) -> int:
        """Features that one token has within a feed-forward block, at most."""
        per_layer = self.embedding.per_layer
        own = 0 if per_layer is None else 2 * per_layer.width * len(self.layers)
        return own + max(
            mlp.width if isinstance(mlp, Mlp) else mlp.width * mlp.routing.per_token + _width(mlp)
            for mlp in (layer.mlp for layer in self.layers)
        )

    @property
    def rope_variant(self) -> str:
        """Which factors rotation uses where the checkpoint has several; empty if it has not."""
        return next((rope.variant for rope in self._ropes if rope.variant), "")

    @cached_property
    def own_positions(self) -> bool:
        """Whether positions may be other than places, of three axes: some layer's rotation has."""
        return any(rope.axes for rope in self._ropes)

    @property
    def _ropes(self) -> Iterator[Rope]:
        turned = (layer.mixer.turned for layer in self.layers)
        found = (each.positions for each in turned if each is not None)
        return (each for each in found if isinstance(each, Rope))

    def problem(self, world: int) -> str | None:
        """Why so many ranks can't divide the model, as the beginning of a sentence."""
        problems = (layer.problem(world) for layer in dict.fromkeys(self.layers))
        return next((problem for problem in problems if problem), None)

    def check(self, world: int) -> None:
        """Raise ModelError, in one line, if the model can't be divided among so many ranks."""
        problem = self.problem(world)
        if problem:
            fitting = [each for each in self.rank_counts if not self.problem(each)]
            raise ModelError(f"{problem}; {self.architecture} here runs on {_either(fitting)}")

    @property
    def rank_counts(self) -> range:
        """Among how many ranks it may be divided, at most one per query head."""
        return range(1, max(layer.mixer.heads for layer in self.layers) + 1)

    def on_rank(self, shard: Shard) -> ModelSpec:
        """The same with a rank's heads and features; raises as `check` does.

        The vocabulary stays whole: it is what tokens are checked and sampled against.
        """
        self.check(shard.world)
        local = {layer: layer.on_rank(shard) for layer in set(self.layers)}
        return replace(self, layers=tuple(local[layer] for layer in self.layers))


def _width(experts: Experts) -> int:
    """Features of the shared block."""
    return 0 if experts.shared is None else experts.shared.width


def _expanded(expansion: Expansion) -> int:
    """Numbers that there are for a token, in all heads."""
    return expansion.heads * expansion.head_numbers + expansion.token_numbers


def _either(worlds: list[int]) -> str:
    """The numbers in words, as "1, 2 or 4 ranks"."""
    *most, last = map(str, worlds)
    return f"{', '.join(most)} or {last} ranks" if most else f"{last} rank only"
