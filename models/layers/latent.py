"""Attention over latent rows: as data, its weights, its division, and made of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import torch

from tokenpod.core.model_size import Expansion
from tokenpod.kernels.attention.composed_latent import expansion_of
from tokenpod.kernels.cache.kv_pool import KVLayout
from tokenpod.kernels.operations.attention_ops import Heads, LatentPlan, LatentShape
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layers.layer_tensors import LayerTensors
from tokenpod.models.layers.linear import Product
from tokenpod.models.layers.mixer import Cache, MixerParts, Turned
from tokenpod.models.layers.normed import NormedProduct, normed_product
from tokenpod.models.layers.norms import Norm, make_norm
from tokenpod.models.layers.positions import Rope
from tokenpod.models.layers.rope import head_order
from tokenpod.models.layers.step import Step
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division, Weight


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
    #: None: nothing is rotated, and the numbers that would be are as they are (Kimi Linear).
    positions: Rope | None
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
        if self.positions is not None and self.positions.rotated != self.rope_dim:
            raise ModelError(
                f"attention.positions rotates {self.positions.rotated} of {self.rope_dim} numbers"
            )

    @property
    def shape(self) -> LatentShape:
        """Of its heads."""
        return LatentShape(self.kv_rank, self.rope_dim, self.nope_dim, self.value_dim)

    @property
    def cache(self) -> Cache:
        """One row of all heads: the latent is the value, too. A token sees everything before it."""
        return Cache(KVLayout(1, self.kv_rank + self.rope_dim, self.kv_rank, shared=True), None)

    @property
    def reads_layer(self) -> None:
        """Each layer has its own cache."""

    @property
    def turned(self) -> Turned:
        """The ends of queries and rows."""
        return Turned(self.positions, self.rope_dim)

    @property
    def expansion(self) -> Expansion:
        """What is made of rows, for some heads at a time."""
        return expansion_of(self.heads, self.shape)

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """Products of queries and rows, in one or two steps, their norms, and `output`."""
        names, hidden, value = tensors.names.latent, tensors.hidden, self.value_dim
        query, row = self.nope_dim + self.rope_dim, self.kv_rank + self.rope_dim
        heads, rank = Axis(self.heads * query, Division.EVEN, unit=query), Axis(self.kv_rank)
        query_order, row_order = self._order(self.nope_dim), self._order(self.kv_rank)
        if self.query_rank is None:
            first = tensors.source(names.queries, heads, hidden, query_order)
        else:
            first = tensors.source(names.query_latent, Axis(self.query_rank), hidden, None)
        rows = tensors.source(names.row, Axis(row), hidden, row_order)
        yield Weight("latent_in", (first, rows), multiplied=True)
        if self.query_rank is not None:
            inner = Axis(self.query_rank)
            yield from tensors.norm("query_norm", self.query_norm, names.query_norm, inner)
            up = tensors.source(names.query_up, heads, inner, query_order)
            yield Weight("q_up", (up,), multiplied=True)
        yield from tensors.norm("kv_norm", self.kv_norm, names.norm, rank)
        made = self.nope_dim + value
        by_head = Axis(self.heads * made, Division.EVEN, unit=made)
        yield Weight("kv_up", (tensors.source(names.up, by_head, rank, None),))
        values = Axis(self.heads * value, Division.EVEN, unit=value)
        yield from tensors.product("output", tensors.names.output, hidden, values, False)

    def _order(self, before: int) -> tuple[int, ...] | None:
        """In which order rows are held that end in what is turned: that pairs i with i + D/2."""
        turned = head_order(self.positions, self.rope_dim)
        return turned and (*range(before), *(before + i for i in turned))

    def idle_names(self, tensors: LayerTensors) -> tuple[str, ...]:
        """There are none."""
        del tensors
        return ()

    def problem(self, world: int) -> str | None:
        """Ranks divide query heads; each has all rows."""
        if self.heads % world:
            return f"{self.heads} query heads can't be divided among {world} ranks"
        return None

    def on_rank(self, shard: Shard) -> Latent:
        """With a rank's heads."""
        return replace(self, heads=self.heads // shard.world)

    @property
    def plan_key(self) -> Hashable:
        """Which tokens are expanded follows from the shape."""
        return self.shape

    def plan(self, ops: Operations, batch: ForwardBatch) -> LatentPlan:
        """Which tokens ask the rows themselves, and which what is made of them."""
        return ops.plan_latent(batch, self.shape)

    def captured(self, dtype: torch.dtype, device: torch.device) -> Heads | None:
        """Nothing: latent rows are the same to all of a row's tokens."""
        return None

    def make(self, parts: MixerParts, norm: Norm | None) -> LatentLayer:
        """With the layer's weights."""
        return LatentLayer(self, parts, norm)


class LatentLayer:
    """One layer's attention over latent rows: from the stream to [T, H · value]."""

    def __init__(self, spec: Latent, parts: MixerParts, norm: Norm | None) -> None:
        products = parts.products
        self._ops, self._shape, self._key = products.ops, spec.shape, spec.plan_key
        self._cache, self._rotation, self._scale = parts.cache, parts.rotation, spec.scale
        self._heads, self._query_dim = spec.heads, spec.nope_dim + spec.rope_dim
        self._row_dim = spec.kv_rank + spec.rope_dim
        self._first = normed_product(
            products, parts.named("latent_in"), norm, parts.named("attention_in")
        )
        self._norm = RowNorm(products.tensor(parts.named("kv_norm")), spec.kv_norm.epsilon)
        up = products.tensor(parts.named("kv_up"))
        self._up = up.view(spec.heads, spec.nope_dim + spec.value_dim, -1)
        #: Queries of what the first product says; None: that is queries.
        self._queries: Product | None = None
        if spec.query_norm is not None:
            query_norm = make_norm(spec.query_norm, products, parts.named("query_norm"))
            self._queries = NormedProduct(query_norm, products.linear(parts.named("q_up")))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The step's rows are in the pool afterwards."""
        ops, batch, rows = self._ops, step.batch, step.pool.keys[self._cache]
        made = self._first(x, batch)
        queries, row = made[:, : -self._row_dim], made[:, -self._row_dim :]
        if self._queries is not None:
            queries = self._queries(queries.contiguous(), batch)
        q = queries.reshape(len(x), self._heads, self._query_dim)
        angles = step.rotations[self._rotation]
        q = ops.store_latent(q, row, angles, self._norm, rows, batch.t_slot)
        plan = step.plan(self._key, LatentPlan)
        return ops.attend_latent(q, rows, self._up, self._shape, plan, self._scale)
