"""The operations models are made of, and what each promises.

Axes: T tokens of a step, H query heads, K key/value heads, D head size, V vocabulary. Every
implementation agrees with `tokenpod.kernels.reference` up to rounding; that package is the
specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.batch import ForwardBatch, RaggedRows
from tokenpod.kernels.group import Group
from tokenpod.kernels.weight import QuantisedWeight


class Linear(Protocol):
    """A product with fixed weights."""

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """X [T, in] -> [T, out].

        The sum starts from `delta` [T, out] if there is one: before a bias, an activation, a
        residual and the sum over ranks, and of ranks that divide the product this rank's part.
        """
        ...


class AddLinear(Protocol):
    """A product with fixed weights that is added to the residual stream."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, delta: torch.Tensor | None = None
    ) -> None:
        """X [T, in], residual [T, out], changed in place; `delta` as `Linear` has it."""
        ...


class AddExperts(Protocol):
    """A sparse feed-forward block: reads the residual stream, norms it, adds its result."""

    def __call__(self, residual: torch.Tensor, into: torch.Tensor | None = None) -> None:
        """Residual [T, hidden]; the result is added in place to it, or to `into` instead.

        A block that was made without a norm reads what is normed already.
        """
        ...


#: What `Operations.plan_attention` found out about a step; each implementation has its own.
AttentionPlan = Any

#: What `Operations.plan_latent` found out about a step; each implementation has its own.
LatentPlan = Any

#: What `Operations.rotate` found out about a step; each implementation has its own.
Rotation = Any

#: What `Group.buffers` is; each kind of group has its own.
PeerBuffers = Any


class Activation(Enum):
    """The non-linearity of a feed-forward block."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    #: relu(x)²
    RELU_SQUARED = "relu_squared"
    #: gate · sigmoid(1.702 · gate) · (up + 1), gate at most 7, up within ±7 (gpt-oss). Gated only.
    SWIGLU_CLAMPED = "swiglu_clamped"


class KVScales(NamedTuple):
    """What the numbers of one layer's pool are multiples of, where they are of 8 bits (e4m3).

    A key or value x is stored as x / scale, rounded to the nearest, or to ±448 beyond.
    """

    #: [K] float32
    keys: torch.Tensor
    #: [K] float32
    values: torch.Tensor


class RowNorm(NamedTuple):
    """RMS norm of each token's hidden state."""

    #: [hidden]; float32 where it is more exact than the hidden state.
    weight: torch.Tensor
    epsilon: float


class HeadNorm(NamedTuple):
    """RMS norm over each head of queries and keys, before rotation."""

    #: [D]
    query_weight: torch.Tensor
    #: [D]
    key_weight: torch.Tensor
    epsilon: float


class Score(Enum):
    """What an expert's logit becomes before experts are chosen and weighed."""

    #: Over all experts. With `Routing.normalised` it is the softmax of the chosen logits alone.
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    #: Two experts, each by the softmax of those that come near it (Liu et al. 2024; PhiMoE).
    SPARSEMIXER = "sparsemixer"


class Routing(NamedTuple):
    """How a token chooses experts and weighs them, by scores that follow from a router's logits.

    Logits and what follows from them are float32 whatever the weights are, so that rounding does
    not choose.
    """

    #: Those of the highest scores; at most all.
    per_token: int
    #: Their weights are divided by their sum.
    normalised: bool
    score: Score = Score.SOFTMAX
    #: Experts form so many groups of equal size, in order ...
    groups: int = 1
    #: ... of which a token looks at so many, those of the highest ...
    chosen_groups: int = 1
    #: ... sum of so many best scores: 1 or 2.
    group_best: int = 1
    #: Multiplies all weights.
    scale: float = 1.0
    #: What the weights are divided by is at least this.
    least_sum: float = 0.0
    #: Of `Score.SPARSEMIXER`: experts further from the best, relative to its logit, have no share.
    tolerance: float = 0.02


class ExpertWeights(NamedTuple):
    """A mixture of E experts, each a gated feed-forward block of n features."""

    #: [E, hidden]
    router: torch.Tensor
    #: [E, 2n, hidden], each expert's gates first
    gate_up: torch.Tensor
    #: [E, hidden, n]
    down: torch.Tensor
    #: [E] float32, added to logits.
    router_bias: torch.Tensor | None = None
    #: [E] float32, added to scores when experts are chosen, not when they are weighed.
    correction: torch.Tensor | None = None
    #: [E, 2n]
    gate_up_bias: torch.Tensor | None = None
    #: [E, hidden]
    down_bias: torch.Tensor | None = None


class Embed(Protocol):
    """Rows of a table."""

    def __call__(self, table: torch.Tensor, t_token: torch.Tensor) -> torch.Tensor:
        """Table [V, hidden], t_token [T] int64 -> a new tensor [T, hidden]."""
        ...


class RmsNorm(Protocol):
    """Root mean square norm (Zhang and Sennrich 2019), the mean taken in float32."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """X [..., n], weight [n] -> x / sqrt(mean(x²) + epsilon) · weight, in x's dtype.

        Rounded to x's dtype before the weight is applied, unless the weight is float32.
        """
        ...


class LayerNorm(Protocol):
    """Layer norm (Ba et al. 2016), its mean and variance taken in float32."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        epsilon: float,
    ) -> torch.Tensor:
        """X [T, n], weight and bias [n] or None -> (x - mean) / sqrt(var + epsilon), as large.

        Then times the weight, which may be float32, plus the bias.
        """
        ...


class Activate(Protocol):
    """A non-linearity by itself, for blocks without gates."""

    def __call__(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """X [T, n] -> activation(x), the same shape. May change `x`."""
        ...


class Rotate(Protocol):
    """The angles of a step's positions."""

    def __call__(
        self,
        t_position: torch.Tensor,
        inverse_frequencies: torch.Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> Rotation:
        """t_position [T] int64, inverse_frequencies [D/2] float32 -> scale · cos, scale · sin.

        Angles are float32 whatever `dtype`, which the heads to be turned have. A pair of
        frequency 0 is neither turned nor scaled: it is no part of the rotation.
        """
        ...


class StoreKeyValue(Protocol):
    """From the fused product to queries, and keys and values in the pool."""

    def __call__(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        t_slot: torch.Tensor,
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        """Qkv [T, (H + 2K) · D], heads of q, then k, then v -> queries [T, H, D].

        Queries and keys are normed (if `norm`) and rotated: dimension i of a head pairs with
        i + D/2. Keys and values are written to `keys` and `values` [slots + 1, K, D] at t_slot:
        in qkv's dtype, or as float8_e4m3fn with `scales`. May change `qkv`.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What some families add to a layer's attention; each is off by default."""

    #: Products of queries and keys are multiplied by it; None: D ** -0.5.
    scale: float | None = None
    #: Scaled products x become softcap · tanh(x / softcap), before ALiBi (Gemma 2).
    softcap: float | None = None
    #: [H] float32: logits fall by slope · distance (Press et al. 2021).
    alibi_slopes: torch.Tensor | None = None
    #: [H] float32: a logit per head that takes its share of the softmax and has no value (gpt-oss).
    sinks: torch.Tensor | None = None

    def scale_of(self, head_dim: int) -> float:
        """The scale of heads of so many numbers."""
        return head_dim**-0.5 if self.scale is None else self.scale


NO_OPTIONS = AttentionOptions()


class PlanAttention(Protocol):
    """What all layers of a step with the same window share."""

    def __call__(self, batch: ForwardBatch, window: int | None) -> AttentionPlan:
        """A token at position p sees positions p - window + 1 to p (all up to p if None)."""
        ...


class StepTiles(Protocol):
    """How captured steps describe their rows with several tokens.

    A captured step replays launches of one shape, so the rows come as numbers of a fixed count, on
    the device, instead of being planned for.
    """

    def count(self, tokens: int) -> int:
        """How many numbers a step of so many tokens has room for."""
        ...

    def fill(self, rows: RaggedRows, into: npt.NDArray[np.int32]) -> bool:
        """Write the numbers of these rows; False: there is no room for them."""
        ...

    def by_window(self, numbers: torch.Tensor) -> Mapping[int | None, torch.Tensor]:
        """Parts of `numbers` [count] int32 on the device, without a copy, as `PagedRows.tiles`."""
        ...


class PrepareCapture(Protocol):
    """Choose, once, how a model's steps are captured."""

    def __call__(self, heads: Heads, windows: Sequence[int | None], rows: int) -> StepTiles:
        """For layers of these different windows, and steps of up to so many rows."""
        ...


class Heads(NamedTuple):
    """The shape of a model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Attention(Protocol):
    """Causal softmax(q · kᵀ · scale) · v over the KV that each row's runs name."""

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        options: AttentionOptions = NO_OPTIONS,
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        """Q [T, H, D], keys and values [slots + 1, K, D] -> [T, H · D].

        Query head h reads key/value head h // (H // K). The step's own keys and values are
        already in the pool: in q's dtype, or as float8_e4m3fn with `scales`.
        """
        ...


class LatentShape(NamedTuple):
    """Of heads that make their keys and values of one latent row per token (DeepSeek-AI 2024).

    A row is `rank` numbers of latent, then the `rope` rotated numbers of a key that heads share.
    """

    rank: int
    rope: int
    #: Numbers of a query and key that are not rotated: they come before those that are.
    nope: int
    #: Numbers of a value.
    value: int


class StoreLatent(Protocol):
    """From products to queries, and latent rows in the pool."""

    def __call__(
        self,
        q: torch.Tensor,
        row: torch.Tensor,
        rotation: Rotation,
        norm: RowNorm,
        pool: torch.Tensor,
        t_slot: torch.Tensor,
    ) -> torch.Tensor:
        """Q [T, H, nope + rope] and row [T, rank + rope] -> the queries, their ends rotated.

        The row's latent is normed, its key rotated; both go to `pool` [slots + 1, 1, rank + rope]
        at t_slot. Pairs are (i, i + rope/2). May change `q`.
        """
        ...


class PlanLatent(Protocol):
    """What all layers of a step share that have latent rows of one shape."""

    def __call__(self, batch: ForwardBatch, shape: LatentShape) -> LatentPlan:
        """A token sees all positions up to its own."""
        ...


class AttendLatent(Protocol):
    """Causal softmax(q · kᵀ · scale) · v, k and v made of the latent rows of each row's runs."""

    def __call__(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        up: torch.Tensor,
        shape: LatentShape,
        plan: LatentPlan,
        scale: float,
    ) -> torch.Tensor:
        """Q [T, H, nope + rope], pool [slots + 1, 1, rank + rope] -> [T, H · value].

        `up` [H, nope + value, rank] makes a head's unrotated part of a key, and its value, of a
        latent; the rotated part is the row's end. The step's own rows are already in the pool.
        """
        ...


class ActMul(Protocol):
    """The gated unit of the feed-forward block."""

    def __call__(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """gate_up [T, 2n], gates first -> activation(gate) · up [T, n]. May change `gate_up`."""
        ...


class PrepareLinear(Protocol):
    """Choose, once, how products with a weight are made."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Weight [out, in], bias [out] or None -> a function computing x · weightᵀ + bias."""
        ...


class PrepareNormLinear(Protocol):
    """Choose, once, how the product of a normed residual with a weight is made.

    Norm, product and gate are one operation because for few tokens they are one kernel: reading
    the weight takes the time, and the rest hides behind it.
    """

    def __call__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RowNorm,
        activation: Activation | None,
    ) -> Linear:
        """Weight [out, in], bias [out] or None -> a function computing norm(x) · weightᵀ + bias.

        With an `activation` the first half of that are gates: the function returns
        activation(gate) · up [T, out / 2].
        """
        ...


class PrepareAddLinear(Protocol):
    """Choose, once, how a product is made that ends in the residual stream."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> AddLinear:
        """Weight [out, in], bias [out] or None -> residual += x · weightᵀ + bias, in place."""
        ...


class PrepareSumLinear(Protocol):
    """Choose, once, how a product is made whose partial sums ranks add in the residual stream.

    Product and sum are one operation because outputs can travel while others are still made.
    """

    def __call__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        buffers: PeerBuffers,
        apart: AddLinear,
    ) -> AddLinear:
        """Weight [out, in], bias [out] or None -> residual += Σ (x · weightᵀ + bias), in place.

        The sum is over ranks and bit by bit the same on all. `apart` does the same in two steps:
        for tokens with which one step would not be faster, or impossible.
        """
        ...


class PrepareExperts(Protocol):
    """Choose, once, how a sparse feed-forward block is computed (Shazeer et al. 2017)."""

    def __call__(
        self,
        weights: ExpertWeights,
        norm: RowNorm | None,
        activation: Activation,
        routing: Routing,
    ) -> AddExperts:
        """A function computing residual += Σ p_e · down_e · (activation(gate_e · x) · (up_e · x)).

        Plus the biases that there are. x is norm(residual), the sum is over the experts that a
        token chose, p are their weights. A token's result depends on no other token, and a token
        that holds NaN gets NaN.
        """
        ...


@dataclass(frozen=True, slots=True)
class Operations:
    """One implementation of everything a model calls, as plain functions."""

    embed: Embed
    rms_norm: RmsNorm
    layer_norm: LayerNorm
    rotate: Rotate
    store_key_value: StoreKeyValue
    plan_attention: PlanAttention
    attention: Attention
    store_latent: StoreLatent
    plan_latent: PlanLatent
    attend_latent: AttendLatent
    act_mul: ActMul
    activate: Activate
    prepare_linear: PrepareLinear
    prepare_norm_linear: PrepareNormLinear
    prepare_add_linear: PrepareAddLinear
    prepare_experts: PrepareExperts
    #: Kernels for formats of fewer bits, by the class of their weights, as `PrepareLinear` makes
    #: products; others are made by the weights' own `multiply`.
    quantised: Mapping[type[QuantisedWeight], Callable[[Any, torch.Tensor | None], Linear]] = field(
        default_factory=dict
    )
    #: None where sums come after their products.
    prepare_sum_linear: PrepareSumLinear | None = None
    #: None where steps are not captured.
    prepare_capture: PrepareCapture | None = None
    #: The ranks that divide the model; None if there is one.
    group: Group | None = None
