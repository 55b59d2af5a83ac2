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
from tokenpod.models.layers.attention import Attention
from tokenpod.models.layers.mixer import Mixer
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
    #: Kinds of texts that tokens may belong to, each with a row that is added; 0: there are none.
    token_types: int = 0


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
    """A decoder-only model, or an encoder: one whose tokens see those behind them, too."""

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
    #: So many drafts of a row may turn out to be wrong: states of rows have room for their inputs.
    drafts: int = 0

    def __post_init__(self) -> None:
        """Raise ModelError if layers have too many experts, or do not go together."""
        whole = [isinstance(x, Attention) and not x.causal for x in self.mixers]
        if any(whole) and not all(whole):
            raise ModelError(f"{self.architecture}: all layers of an encoder see whole texts")
        experts = sum(x.mlp.count for x in self.layers if isinstance(x.mlp, Experts))
        if experts > MOST_EXPERTS:
            raise ModelError(
                f"{len(self.layers):,} layers have {experts:,} experts; at most {MOST_EXPERTS:,}"
                " are supported"
            )

    @cached_property
    def layers_of_all_kinds(self) -> int:
        """How many of the first layers have one of each kind."""
        kinds = set(self.layers)
        return next(n for n in range(1, len(self.layers) + 1) if {*self.layers[:n]} == kinds)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """All layers'."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @cached_property
    def _keeping(self) -> dict[int, Mixer]:
        """By layer, the mixers that have keys and values of their own: a layer has one at most."""
        return {
            i: mixer
            for i, layer in enumerate(self.layers)
            for mixer in layer.mixers
            if mixer.reads_layer is None and mixer.cache.kv is not None
        }

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """What the pool has for a token, cache by cache."""
        found = (mixer.cache.kv for mixer in self._keeping.values())
        return tuple(layout for layout in found if layout is not None)

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """How far back each of these is read; None: all that there is."""
        return tuple(mixer.cache.window for mixer in self._keeping.values())

    @cached_property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        """What the pool has for a row, state by state."""
        found = (mixer.cache.state for mixer in self.mixers)
        return tuple(x.with_drafts(self.drafts) for x in found if x is not None)

    @cached_property
    def takes_back(self) -> bool:
        """Whether wrong drafts can be taken back in all layers."""
        found = (mixer.cache.state for mixer in self.mixers)
        return all(layout is None or layout.beside is not None for layout in found)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Query heads of each layer that has keys and values."""
        return tuple(mixer.heads for mixer in self._keeping.values())

    @property
    def encodes(self) -> bool:
        """Whether each token sees all of its text, so that nothing is read after its step."""
        return any(isinstance(x, Attention) and not x.causal for x in self.mixers)

    @property
    def mutual(self) -> int:
        """How many tokens of an image may see each other in some layers; 0: none do."""
        found = [x for x in self.mixers if isinstance(x, Attention) and x.mutual]
        return min((x.window or self.max_positions for x in found), default=0)

    @property
    def mutual_prompts(self) -> bool:
        """Whether all tokens of a prompt see each other (PaliGemma)."""
        return any(isinstance(x, Attention) and x.mutual_prompts for x in self.mixers)

    @property
    def second_text(self) -> int:
        """Added to the token ids of the second text of a pair; 0: both texts have the same ids."""
        return self.vocab_size if self.embedding.token_types > 1 else 0

    @cached_property
    def storing(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own."""
        return tuple(self._keeping)

    def cache_of(self, i: int) -> int:
        """Which of the pool's caches of keys and values layer `i` reads; 0 if none."""
        for mixer in self.layers[i].mixers:
            if mixer.cache.kv is not None:
                reads = mixer.reads_layer
                return self.storing.index(i if reads is None else reads)
        return 0

    def state_of(self, i: int) -> int:
        """Which of the pool's states layer `i` has, if it has one."""
        before = (mixer for layer in self.layers[:i] for mixer in layer.mixers)
        return sum(mixer.cache.state is not None for mixer in before)

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
        return OwnState(row_bytes, 0, pooled=True, takes_back=self.takes_back)

    @property
    def expansion(self) -> Expansion | None:
        """The largest of what attention over latent rows makes of them; None: there are none."""
        made = {mixer.expansion for mixer in self.mixers}
        return max((x for x in made if x is not None), key=_expanded, default=None)

    @property
    def sliding_window(self) -> int | None:
        """The furthest that any layer looks back; None if one sees everything."""
        reach = self.kv_windows
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
        widths = (
            mlp.width if isinstance(mlp, Mlp) else mlp.width * mlp.routing.per_token + _width(mlp)
            for mlp in (layer.mlp for layer in self.layers)
            if mlp is not None
        )
        return own + max(widths, default=self.hidden_size)

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
        turned = (mixer.turned for mixer in self.mixers)
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
        return range(1, max(mixer.heads for mixer in self.mixers) + 1)

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
