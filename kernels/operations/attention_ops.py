"""What each operation around attention promises, over keys and values or over latent rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.operations.batch import ForwardBatch, MixerPlan, RaggedRows, TileKind
from tokenpod.kernels.operations.pointwise_ops import HeadNorm, RowNorm


class AttentionPlan(MixerPlan):
    """What `Operations.plan_attention` found out about a step."""

    __slots__ = ()


class LatentPlan(MixerPlan):
    """What `Operations.plan_latent` found out about a step."""

    __slots__ = ()


class TextPlan(MixerPlan):
    """What `Operations.plan_texts` found out about a step."""

    __slots__ = ()

    #: [T] int64 on the device: the numbers of the step's tokens, from 0.
    t_index: torch.Tensor


class Rotation:
    """What `Operations.rotate` found out about a step; each implementation has its own."""

    __slots__ = ()


class KVScales(NamedTuple):
    """What the numbers of one layer's pool are multiples of, where they are of 8 bits.

    Of type e4m3 (GPUs) they are multiples of one scale per head [K], which is there beforehand: x
    is stored as x / scale, rounded to the nearest, or to ±448 beyond. Of type int8 (CPUs) they are
    multiples of one scale per slot and head [slots + 1, K], written with them: a 127th of the
    largest number of that head.
    """

    #: float32, [K] or [slots + 1, K]
    keys: torch.Tensor
    #: float32, as those of keys
    values: torch.Tensor


class Rotate(Protocol):
    """The angles of a step's positions."""

    def __call__(
        self,
        t_position: torch.Tensor,
        inverse_frequencies: torch.Tensor,
        scale: float,
        dtype: torch.dtype,
        axes: torch.Tensor | None = None,
    ) -> Rotation:
        """t_position [T] int64, inverse_frequencies [D/2] float32 -> scale · cos, scale · sin.

        Positions of three axes [3, T], contiguous, turn pair i by the number `axes[i]` [D/2] int64
        of them (multimodal rotation: Wang et al. 2024, Qwen2-VL); without `axes` all by the first.
        Angles are float32 whatever `dtype`, which the heads to be turned have. A pair of frequency
        0 is neither turned nor scaled: it is no part of the rotation.
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
        """Qkv [T, (H + K) · D + K · V], heads of q, then k, then v -> queries [T, H, D].

        Queries and keys are normed (if `norm`) and rotated: dimension i of a head pairs with
        i + D/2. Keys and values are written to `keys` [slots + 1, K, D] and `values`
        [slots + 1, K, V] at t_slot: in qkv's dtype, or with `scales` as numbers of 8 bits. May
        change `qkv` and scales of slots.
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

    def by_kind(self, numbers: torch.Tensor) -> Mapping[TileKind, torch.Tensor]:
        """Parts of `numbers` [count] int32 on the device, without a copy, as `PagedRows.tiles`."""
        ...


class PrepareCapture(Protocol):
    """Choose, once, how a model's steps are captured."""

    def __call__(
        self, shapes: Sequence[Heads | TileKind], rows: int, *, texts: bool = False
    ) -> StepTiles:
        """For layers of these shapes, or kinds of tiles, and steps of up to so many rows.

        `texts`: no row decodes, and each of them has tiles, also one of a single token.
        """
        ...


class Heads(NamedTuple):
    """The shape of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    #: How many positions back a token sees, itself included; None: all.
    window: int | None
    dtype: torch.dtype
    device: torch.device
    #: Off: they are those of `AttendTexts`; of one model all layers are, or none.
    causal: bool = True


class Attend(Protocol):
    """Softmax(q · kᵀ · scale) · v over the KV that each row's runs name."""

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        options: AttentionOptions = NO_OPTIONS,
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        """Q [T, H, D], keys [slots + 1, K, D], values [slots + 1, K, V] -> [T, H · V].

        Query head h reads key/value head h // (H // K). The step's own keys and values are
        already in the pool: in q's dtype, or with `scales` as numbers of 8 bits.
        """
        ...


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What differs between layers that read texts as a whole."""

    #: Products of queries and keys are multiplied by it; None: D ** -0.5.
    scale: float | None = None
    #: A token sees those fewer positions away, on either side; None: all of its text.
    window: int | None = None
    #: [H, 2n + 1] float32: what is added to the logits of keys, in order from n and more positions
    #: behind the query to n and more before it (Raffel et al. 2020).
    distance_bias: torch.Tensor | None = None

    def scale_of(self, head_dim: int) -> float:
        """The scale of heads of so many numbers."""
        return head_dim**-0.5 if self.scale is None else self.scale


#: A token sees all of its text, and nothing is added.
NEAR_AND_FAR = TextOptions()


class PlanTexts(Protocol):
    """What all layers share of a step whose rows are texts, each of which is here as a whole."""

    def __call__(self, batch: ForwardBatch) -> TextPlan:
        """Of the batch, offsets of rows into the tokens are read, or tiles of a captured step."""
        ...


class AttendTexts(Protocol):
    """Softmax(q · kᵀ · scale) · v over a text, of which nothing is kept."""

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: TextPlan,
        options: TextOptions = NEAR_AND_FAR,
    ) -> torch.Tensor:
        """Q [T, H, D], keys and values [T, K, D] of a step's tokens -> [T, H · D].

        A token sees those behind it, too. Query head h reads key/value head h // (H // K). Heads
        of a token follow each other; tokens may be apart by any stride: all three may be parts of
        the product that made them. What is computed of tokens that belong to no text means nothing.
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
