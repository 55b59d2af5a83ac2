"""What a model is, as data: what the decoder composes, and what weight tables follow from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

import torch

from tokenpod.kernels.ops import Activation, Routing, Score
from tokenpod.kernels.pool import KVLayout, alike
from tokenpod.models.errors import ModelError


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
    #: Which of several sets of factors these frequencies were made with, for the operator.
    variant: str = ""

    @property
    def rotated(self) -> int:
        """Dimensions that are turned."""
        return 2 * len(self.inverse_frequencies)


@dataclass(frozen=True, slots=True)
class Alibi:
    """Logits fall by slope · distance (Press et al. 2021)."""

    #: One per query head.
    slopes: tuple[float, ...]


class Same(Enum):
    """The type of `SAME`."""

    SAME = "same"


#: As the MLP's norm: it reads what the attention reads.
SAME: Final = Same.SAME


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over a token's features: root mean square ("rms") or layer norm ("layer")."""

    kind: str
    epsilon: float
    #: Added to the stored weight.
    offset: int = 0
    weight: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        """Raise ModelError for a norm that there is not."""
        if self.kind not in ("rms", "layer"):
            raise ModelError(f"norm.kind is {self.kind!r}; supported: rms, layer")
        if self.kind == "rms" and (self.bias or not self.weight):
            raise ModelError("norm.kind is 'rms': it has a weight, and no bias")


class NormOver(Enum):
    """What a norm of queries and keys takes as one row."""

    #: Each head, all with the same weight.
    HEAD = "head"
    #: Each head, each with a weight of its own.
    HEADS = "heads"
    #: All heads of queries together, and all of keys.
    ALL = "all"


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + rate · ln(1 + p // length) (Llama 4)."""

    rate: float
    length: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries, keys and values, softmax, and the product that ends in the stream."""

    heads: int
    #: Each serves heads // kv_heads query heads.
    kv_heads: int
    head_dim: int
    positions: Rope | Alibi | None
    #: How many positions back a token sees, itself included; None: all.
    window: int | None = None
    #: Of products of queries and keys; None: head_dim ** -0.5.
    scale: float | None = None
    #: Scaled products x become softcap · tanh(x / softcap).
    softcap: float | None = None
    #: One more logit per query head, without a value; the checkpoint has them.
    sinks: bool = False
    #: Queries, keys and values are kept within ±clip.
    clip: float | None = None
    #: Of queries and keys, before rotation.
    qk_norm: Norm | None = None
    qk_norm_over: NormOver = NormOver.HEAD
    query_growth: QueryGrowth | None = None
    qkv_bias: bool = False
    output_bias: bool = False

    def __post_init__(self) -> None:
        """Raise ModelError for heads that can't be."""
        if self.heads % self.kv_heads:
            raise ModelError(
                f"attention.heads is {self.heads}: they can't share {self.kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"attention.head_dim is {self.head_dim}: heads are held in pairs")
        if isinstance(self.positions, Alibi) and len(self.positions.slopes) != self.heads:
            slopes = len(self.positions.slopes)
            raise ModelError(f"attention.positions has {slopes} slopes for {self.heads} heads")
        norm, over = self.qk_norm, self.qk_norm_over
        if norm is None:
            return
        if not norm.weight or (norm.bias and over is not NormOver.HEAD):
            raise ModelError(f"attention.qk_norm over {over.value} has a weight, and no bias")
        if over is NormOver.ALL and norm.kind != "rms":
            raise ModelError(
                f"attention.qk_norm.kind is {norm.kind!r}; supported over all heads: rms"
            )

    @property
    def kv(self) -> KVLayout:
        """What the pool has for a token."""
        return alike(self.kv_heads, self.head_dim)

    @property
    def turned_dim(self) -> int:
        """Numbers of what is rotated, in part or as a whole."""
        return self.head_dim


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention over one row per token, of which every head makes a key and a value of its own.

    A row is a normed latent of `kv_rank` numbers and a rotated key of `rope_dim` numbers, which
    all heads share (DeepSeek-AI 2024). Ranks divide heads; each has all rows.
    """

    heads: int
    kv_rank: int
    #: Numbers of queries and keys that are not rotated, and that are.
    nope_dim: int
    rope_dim: int
    value_dim: int
    #: Of latents.
    kv_norm: Norm
    positions: Rope
    #: Of products of queries and keys.
    scale: float
    #: Queries are made of a normed vector of so many numbers; None: of the stream.
    query_rank: int | None = None
    query_norm: Norm | None = None

    def __post_init__(self) -> None:
        """Raise ModelError for norms and rotations that can't be."""
        for norm in (self.kv_norm, self.query_norm):
            if norm is not None and norm.kind != "rms":
                raise ModelError(f"attention: a latent's norm is {norm.kind!r}; supported: rms")
        if (self.query_rank is None) != (self.query_norm is None):
            raise ModelError("attention.query_rank and query_norm go together")
        if self.positions.rotated != self.rope_dim:
            raise ModelError(
                f"attention.positions rotates {self.positions.rotated} of {self.rope_dim} numbers"
            )

    @property
    def window(self) -> None:
        """A token sees everything before it."""
        return None

    @property
    def kv(self) -> KVLayout:
        """What the pool has for a token: the latent is the value, too."""
        return KVLayout(1, self.kv_rank + self.rope_dim, self.kv_rank, shared=True)

    @property
    def turned_dim(self) -> int:
        """Numbers of what is rotated."""
        return self.rope_dim


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(up(x))), or down(activation(gate(x)) · up(x))."""

    width: int
    activation: Activation
    gated: bool
    up_bias: bool = False
    down_bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of gated blocks of `width` features each."""

    count: int
    width: int
    activation: Activation
    routing: Routing
    #: Of the router's product.
    router_bias: bool = False
    #: A number per expert, added to its score when experts are chosen, not when they are weighed.
    correction: bool = False
    #: In both products of each expert.
    biases: bool = False
    #: A block that works for every token, and is added to what the chosen ones say.
    shared: Mlp | None = None
    #: What it says is multiplied by the sigmoid of a product with one output.
    shared_gate: bool = False

    def __post_init__(self) -> None:
        """Raise ModelError for a choice that can't be made."""
        routing = self.routing
        size = self.count // routing.groups
        if self.count % routing.groups or not 1 <= routing.chosen_groups <= routing.groups:
            raise ModelError(
                f"{self.count} experts in {routing.groups} groups, {routing.chosen_groups} of them "
                "chosen: groups are of equal size, and at most all are chosen"
            )
        if not routing.per_token <= size * routing.chosen_groups or routing.group_best > size:
            raise ModelError(
                f"{routing.per_token} experts per token: {routing.chosen_groups} groups of {size} "
                "have too few"
            )
        if routing.score is Score.SPARSEMIXER and routing.per_token != 2:
            raise ModelError(f"{routing.per_token} experts per token: sparsemixer chooses 2")
        if self.shared_gate and (self.shared is None or self.shared.down_bias):
            raise ModelError("experts.shared_gate needs a shared block without a bias at its end")


@dataclass(frozen=True, slots=True)
class Norms:
    """`_in` norms read the stream, `_out` norms what a branch adds to it.

    Under `Join.POST_NORM` an `_out` norm is applied to the sum instead.
    """

    attention_in: Norm | None = None
    attention_out: Norm | None = None
    mlp_in: Norm | Same | None = None
    mlp_out: Norm | None = None


class Join(Enum):
    """How a layer's two branches meet the stream."""

    #: The attention's result is added, then the MLP reads the sum.
    SEQUENTIAL = "sequential"
    #: Both read the same, and both results are added.
    PARALLEL = "parallel"
    #: As SEQUENTIAL, and each sum is normed.
    POST_NORM = "post_norm"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer."""

    attention: Attention | Latent
    mlp: Mlp | Experts
    norms: Norms
    join: Join = Join.SEQUENTIAL
    #: Multiplies what each branch adds to the stream.
    branch_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise ModelError for branches that can't be joined like that."""
        if self.norms.mlp_in is SAME and self.join is not Join.PARALLEL:
            raise ModelError(
                f"norms.mlp_in is SAME, and join {self.join.value}: it is not parallel"
            )
        if isinstance(self.mlp, Experts) and not isinstance(self.norms.mlp_in, Norm):
            raise ModelError("norms.mlp_in: a mixture of experts has a norm of its own")


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned positions: position p has row p + offset of a table of `rows`."""

    rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Embedding:
    """From tokens to the stream: rows · scale, projected, plus positions, normed."""

    scale: float = 1.0
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
        """Raise ModelError if layers need pools of different shapes."""
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
