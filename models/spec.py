"""What a model is, as data: what the decoder composes, and what weight tables follow from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from tokenpod.core.model_size import Expansion
from tokenpod.kernels.attention.composed_latent import expansion_of
from tokenpod.kernels.cache.kv_pool import KVLayout
from tokenpod.models.errors import ModelError
from tokenpod.models.layer_spec import Experts, Latent, LayerSpec, Mlp, Norm, Rope

#: Of all layers: each has tensors of its own. Kimi K2 has 23,040.
MOST_EXPERTS = 1 << 15


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned positions: position p has row p + offset of a table of `rows`."""

    rows: int
    offset: int = 0


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
        """Raise ModelError if layers need pools of different shapes, or have too many experts."""
        experts = sum(x.mlp.count for x in self.layers if isinstance(x.mlp, Experts))
        if experts > MOST_EXPERTS:
            raise ModelError(
                f"{len(self.layers):,} layers have {experts:,} experts; at most {MOST_EXPERTS:,}"
                " are supported"
            )
        shapes = {layer.attention.kv for layer in self.layers}
        if len(shapes) != 1:
            raise ModelError(f"layers have key/value heads of {len(shapes)} shapes; 1 is supported")

    @property
    def heads(self) -> int:
        """Query heads, of each layer."""
        return self.layers[0].attention.heads

    @property
    def kv(self) -> KVLayout:
        """What each layer's pool has for a token."""
        return self.layers[0].attention.kv

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """Of each layer."""
        return tuple(layer.attention.kv for layer in self.layers)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Query heads of each layer."""
        return tuple(layer.attention.heads for layer in self.layers)

    @property
    def runs_on(self) -> str:
        """Whose code computes it."""
        return "tokenpod"

    @property
    def own_state(self) -> None:
        """All that is kept of a sequence lies in the pool's slots."""

    @property
    def latent(self) -> Latent | None:
        """The attention over latent rows, if layers have that."""
        attention = self.layers[0].attention
        return attention if isinstance(attention, Latent) else None

    @property
    def expansion(self) -> Expansion | None:
        """What attention over latent rows makes of them; None: there are none."""
        latent = self.latent
        return None if latent is None else expansion_of(latent.heads, latent.shape)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The furthest that any layer looks back; None if one sees everything."""
        reach = [window for window in self.windows if window is not None]
        return max(reach) if len(reach) == len(self.layers) else None

    @property
    def embedding_width(self) -> int:
        """Features of a row of the embedding."""
        return self.embedding.width or self.hidden_size

    @property
    def widest(self) -> int:
        """Features that one token has within a feed-forward block, at most."""
        return max(
            mlp.width if isinstance(mlp, Mlp) else mlp.width * mlp.routing.per_token + _width(mlp)
            for mlp in (layer.mlp for layer in self.layers)
        )

    @property
    def rope_variant(self) -> str:
        """Which factors rotation uses where the checkpoint has several; empty if it has not."""
        positions = self.layers[0].attention.positions
        return positions.variant if isinstance(positions, Rope) else ""


def _width(experts: Experts) -> int:
    """Features of the shared block."""
    return 0 if experts.shared is None else experts.shared.width
