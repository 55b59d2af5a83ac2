"""What a layer of a model is, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from tokenpod.kernels.cache.kv_pool import KVLayout, alike
from tokenpod.kernels.operations.attention_ops import LatentShape
from tokenpod.kernels.operations.expert_ops import Routing, Score
from tokenpod.kernels.operations.pointwise_ops import Activation
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
    def shape(self) -> LatentShape:
        """Of its heads."""
        return LatentShape(self.kv_rank, self.rope_dim, self.nope_dim, self.value_dim)

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
