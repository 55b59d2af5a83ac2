"""Attention over heads of keys and values: as data, its weights, its division, and made of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from tokenpod.kernels.cache.kv_pool import KVLayout
from tokenpod.kernels.operations.attention_ops import (
    AttentionOptions,
    AttentionPlan,
    Heads,
    TextOptions,
    TextPlan,
)
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.kernels.operations.pointwise_ops import HeadNorm
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layers.head_steps import (
    EachHead,
    HeadSteps,
    NormBoth,
    NormOver,
    OverAll,
    OverHeads,
    QueryGrowth,
)
from tokenpod.models.layers.layer_tensors import LayerTensors, norm_weights
from tokenpod.models.layers.mixer import Cache, Mix, MixerParts, Turned
from tokenpod.models.layers.normed import normed_product
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.positions import Alibi, DistanceBias, Rope
from tokenpod.models.layers.rope import head_order
from tokenpod.models.layers.step import Step
from tokenpod.models.weights.names import Fused
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division, Segment, Source, Weight


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries, keys and values, softmax, and the product that ends in the stream."""

    heads: int
    #: Each serves heads // kv_heads query heads.
    kv_heads: int
    #: Numbers of a query and of a key.
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
    #: Values are normed as queries and keys are, without a weight.
    value_norm: bool = False
    #: The checkpoint has no product for values: they are keys before norm and rotation.
    values_are_keys: bool = False
    #: The number of the layer whose keys and values it reads; None: it has its own.
    reads_layer: int | None = None
    #: What heads find is multiplied by the sigmoid of numbers that the product of queries has, too:
    #: of each head its query, then these.
    output_gate: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    #: Off: a token sees those behind it, too; of a window so many on either side. A text is read in
    #: one step then, and nothing is kept of it.
    causal: bool = True
    #: Rows of an image see each other, see `ForwardBatch.b_mutual`.
    mutual: bool = False
    #: And so do all other tokens of a prompt.
    mutual_prompts: bool = False
    #: What is added to logits by distance, where a text is read as a whole; None: nothing is.
    distance_bias: DistanceBias | None = None
    #: Multiplies what the last product says.
    output_scale: float = 1.0
    #: Numbers of a value; None: as many as of a key.
    own_value_dim: int | None = None

    def __post_init__(self) -> None:
        """Raise ModelError for heads that can't be."""
        if self.heads % self.kv_heads:
            raise ModelError(
                f"attention.heads is {self.heads}: they can't share {self.kv_heads} key/value heads"
            )
        for name, dim in (("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            if dim % 2:
                raise ModelError(f"attention.{name} is {dim}: heads are held in pairs")
        if self.value_dim != self.head_dim and (self.values_are_keys or self.output_gate):
            raise ModelError("attention.value_dim is head_dim where values are keys, or gated")
        if not self.causal:
            others = self.softcap, self.sinks, self.output_gate, self.values_are_keys
            if any(others) or self.reads_layer is not None or self.value_dim != self.head_dim:
                raise ModelError("attention that is not causal knows no such options")
            if isinstance(self.positions, Alibi):
                raise ModelError("attention that is not causal has no ALiBi")
        elif self.distance_bias is not None:
            raise ModelError("attention.distance_bias goes with attention that is not causal")
        if isinstance(self.positions, Alibi) and len(self.positions.slopes) != self.heads:
            slopes = len(self.positions.slopes)
            raise ModelError(f"attention.positions has {slopes} slopes for {self.heads} heads")
        norm, over = self.qk_norm, self.qk_norm_over
        plain = norm is not None and norm.kind == "rms" and over is NormOver.HEAD
        if not plain and (self.value_norm or self.reads_layer is not None):
            raise ModelError("attention.value_norm and reads_layer need an rms norm of heads")
        if norm is None:
            return
        if not norm.weight or (norm.bias and over is not NormOver.HEAD):
            raise ModelError(f"attention.qk_norm over {over.value} has a weight, and no bias")
        if over is NormOver.ALL and norm.kind != "rms":
            raise ModelError(
                f"attention.qk_norm.kind is {norm.kind!r}; supported over all heads: rms"
            )

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.head_dim if self.own_value_dim is None else self.own_value_dim

    @property
    def cache(self) -> Cache:
        """Keys and values of all key/value heads, unless a text is read as a whole."""
        if not self.causal:
            return Cache(None, None)
        return Cache(KVLayout(self.kv_heads, self.head_dim, self.value_dim), self.window)

    @property
    def turned(self) -> Turned | None:
        """Whole heads, in part or as a whole; None: they are read where their product is."""
        plain = self.qk_norm is None and self.positions is None
        return None if plain and not self.causal else Turned(self.positions, self.head_dim)

    @property
    def expansion(self) -> None:
        """Keys and values are read as they are."""

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """The fused product of queries, keys and values, norms of heads, sinks, and `output`."""
        names, head = tensors.names, self.head_dim
        queries = Axis(self.heads * head, Division.EVEN, unit=head)
        keys = Axis(self.kv_heads * head, Division.KEY, unit=head)
        order = head_order(self.positions, head)
        values, found = (
            Axis(count * self.value_dim, division, unit=self.value_dim)
            for count, division in ((self.kv_heads, Division.KEY), (self.heads, Division.EVEN))
        )
        parts = [(queries, order), (keys, order), (values, None)]
        groups = self.kv_heads if isinstance(names.qkv, Fused) and names.qkv.by_heads else 1
        stored: tuple[str, ...] | Fused = names.qkv
        norms = [("q_norm", names.q_norm, queries)]
        if self.reads_layer is None:
            norms.append(("k_norm", names.k_norm, keys))
        if self.values_are_keys or self.reads_layer is not None:
            assert not isinstance(stored, Fused), "each has a tensor"
            # As rows of its own the product of values costs little: few heads have them.
            stored = (stored[0], stored[1], stored[1])
            if self.reads_layer is not None:
                stored, parts = stored[:1], parts[:1]
        for weight in tensors.stacked("qkv", stored, parts, groups, self.qkv_bias):
            yield self._with_gate(weight) if self.output_gate else weight
        if self.qk_norm is not None:
            for name, stored_norm, rows in norms:
                yield from self._head_norm(name, tensors.at + stored_norm, self.qk_norm, rows)
        if self.distance_bias is not None:
            of_all = f"{tensors.prefix}{names.distance_bias}.weight"
            heads = Axis(self.heads, Division.EVEN)
            table = Source(of_all, (Axis(self.distance_bias.buckets), heads))
            yield Weight("distance_bias", (table,), dtype=torch.float32)
        if self.sinks:
            source = Source(tensors.at + names.sinks, (Axis(self.heads, Division.EVEN),))
            yield Weight("sinks", (source,), dtype=torch.float32)
        output = tensors.hidden, found
        yield from tensors.product(
            "output", names.output, *output, self.output_bias, self.output_scale
        )

    def _with_gate(self, weight: Weight) -> Weight:
        """The same with queries cut out of a tensor that has gates, too, and these as last rows."""
        query, *others = weight.sources
        cut = [
            replace(query, segment=Segment((self.head_dim,) * 2, i, self.heads)) for i in range(2)
        ]
        return replace(weight, sources=(cut[0], *others, replace(cut[1], order=None)))

    def _head_norm(self, name: str, stored: str, norm: Norm, rows: Axis) -> Iterator[Weight]:
        """Of queries or of keys. Weights of each head are whole on every rank: they are few."""
        order, head = head_order(self.positions, self.head_dim), Axis(self.head_dim)
        if self.qk_norm_over is not NormOver.HEADS:
            axis = head if self.qk_norm_over is NormOver.HEAD else rows
            for weight in norm_weights(name, norm, stored, axis):
                sources = tuple(replace(source, order=order) for source in weight.sources)
                yield replace(weight, sources=sources)
            return
        heads = rows.length // self.head_dim
        if "{h}" in stored:
            axes: tuple[Axis, ...] = (head,)
            names = [stored.format(h=h) for h in range(heads)]
        else:
            axes, names = (Axis(heads), head), [stored]
        reorder = None if order is None else partial(_reordered, order=order)
        yield Weight(
            name, tuple(Source(f"{each}.weight", axes, function=reorder) for each in names)
        )

    def idle_names(self, tensors: LayerTensors) -> tuple[str, ...]:
        """Keys and values of a layer that reads another's, which some checkpoints have."""
        qkv, names = tensors.names.qkv, tensors.names
        if self.reads_layer is None or isinstance(qkv, Fused):
            return ()
        return tuple(f"{tensors.at}{name}." for name in (*qkv[1:], names.k_norm, names.v_norm))

    def problem(self, world: int) -> str | None:
        """Ranks divide query heads, and key/value heads or those among them."""
        if self.heads % world:
            return f"{self.heads} query heads can't be divided among {world} ranks"
        if self.kv_heads % world and world % self.kv_heads:
            return (
                f"{self.kv_heads} key/value heads can't be divided among {world} ranks, "
                f"nor {world} ranks among them"
            )
        return None

    def on_rank(self, shard: Shard) -> Attention:
        """With a rank's heads, and with their slopes."""
        heads, positions = self.heads // shard.world, self.positions
        if isinstance(positions, Alibi):
            own = slice(shard.rank * heads, (shard.rank + 1) * heads)
            positions = Alibi(positions.slopes[own])
        kv_heads = shard.length(Axis(self.kv_heads, Division.KEY))
        return replace(self, heads=heads, kv_heads=kv_heads, positions=positions)

    @property
    def plan_key(self) -> Hashable:
        """Whatever the heads are, layers of one window see the same."""
        if not self.causal:
            return TextPlan
        return (self.window, "mutual") if self.mutual else self.window

    def plan(self, ops: Operations, batch: ForwardBatch) -> AttentionPlan | TextPlan:
        """What each row sees."""
        if not self.causal:
            return ops.plan_texts(batch)
        if batch.b_mutual is not None and not self.mutual:
            batch = replace(batch, b_mutual=None)
        return ops.plan_attention(batch, self.window)

    def captured(self, dtype: torch.dtype, device: torch.device) -> Heads | None:
        """Tiles of queries follow from the shape of heads, and from the window."""
        shape = self.heads, self.kv_heads, self.head_dim
        return Heads(*shape, self.window, dtype, device, self.causal)

    def make(self, parts: MixerParts, norm: Norm | None) -> Mix:
        """With the layer's weights."""
        return (AttentionLayer if self.causal else TextAttentionLayer)(self, parts, norm)


class AttentionLayer:
    """One layer's attention: from the stream to what its heads found, [T, H · value_dim]."""

    def __init__(self, spec: Attention, parts: MixerParts, norm: Norm | None) -> None:
        products = parts.products
        self._ops, self._key = products.ops, spec.plan_key
        self._cache, self._rotation = parts.cache, parts.rotation
        self._windowed = spec.cache.window is not None
        #: Numbers of a token's gates.
        self._gates = spec.heads * spec.head_dim if spec.output_gate else 0
        self._reads_another = spec.reads_layer is not None
        self._qkv = normed_product(products, parts.named("qkv"), norm, parts.named("attention_in"))
        self._heads = _head_steps(spec, parts)
        slopes = None
        if isinstance(spec.positions, Alibi):
            slopes = torch.tensor(spec.positions.slopes, device=products.device)
        self._options = AttentionOptions(
            scale=spec.scale,
            softcap=spec.softcap,
            alibi_slopes=slopes,
            sinks=products.tensor(parts.named("sinks")) if spec.sinks else None,
        )

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The step's keys and values are in the pool afterwards."""
        ops, batch, pool, heads = self._ops, step.batch, step.pool, self._heads
        keys, values = pool.keys[self._cache], pool.values[self._cache]
        scales, angles = pool.scales[self._cache], step.rotations[self._rotation]
        y, gate = self._qkv(x, batch), None
        if self._gates:
            y, gate = y[:, : -self._gates].contiguous(), y[:, -self._gates :]
        y = heads.before(y)
        if self._reads_another:
            none = y.new_empty((len(keys), 0, keys.shape[2]))
            q = ops.store_key_value(y, angles, heads.norm, none, none, batch.t_slot)
        else:
            t_slot = step.windows.t_slot if self._windowed else batch.t_slot
            q = ops.store_key_value(y, angles, heads.norm, keys, values, t_slot, scales)
        q = heads.after(q, batch.t_position)
        plan = step.plan(self._key, AttentionPlan)
        found = ops.attention(q, keys, values, plan, self._options, scales)
        return found if gate is None else found * gate.sigmoid()


class TextAttentionLayer:
    """One layer's attention where texts are read as a whole, and nothing of them is kept."""

    def __init__(self, spec: Attention, parts: MixerParts, norm: Norm | None) -> None:
        products = parts.products
        self._ops, self._key, self._rotation = products.ops, spec.plan_key, parts.rotation
        self._turned = spec.turned is not None
        self._kv_shape = spec.kv_heads, spec.head_dim
        self._qkv = normed_product(products, parts.named("qkv"), norm, parts.named("attention_in"))
        self._heads = _head_steps(spec, parts)
        bias = _by_distance(spec.distance_bias, parts)
        self._options = TextOptions(spec.scale, spec.window, bias)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """From the stream to what its heads found, [T, H · head_dim]."""
        ops, batch, heads = self._ops, step.batch, self._heads
        plan = step.plan(self._key, TextPlan)
        y = heads.before(self._qkv(x, batch))
        if self._turned:
            keys, values = (y.new_empty(len(y), *self._kv_shape) for _ in range(2))
            angles, at = step.rotations[self._rotation], plan.t_index
            q = ops.store_key_value(y, angles, heads.norm, keys, values, at)
        else:
            sizes = heads.queries, heads.keys, heads.keys
            parts = y.split_with_sizes(sizes, 1)
            q, keys, values = (part.view(len(y), -1, self._kv_shape[1]) for part in parts)
        return ops.attend_texts(heads.after(q, batch.t_position), keys, values, plan, self._options)


def _by_distance(bias: DistanceBias | None, parts: MixerParts) -> torch.Tensor | None:
    """[H, 2 · furthest + 1] float32; see `TextOptions.distance_bias`."""
    if bias is None:
        return None
    reach = range(-bias.furthest, bias.furthest + 1)
    buckets = torch.tensor([*map(bias.bucket, reach)], device=parts.products.device)
    return parts.products.tensor(parts.named("distance_bias"))[buckets].T.contiguous()


def _head_steps(spec: Attention, parts: MixerParts) -> HeadSteps:
    """What the layer's heads go through, with the weights of their norms."""
    norm, fused, plain = spec.qk_norm, None, None
    if norm is not None and norm.kind == "rms" and spec.qk_norm_over is NormOver.HEAD:
        of_queries = of_keys = parts.products.tensor(parts.named("q_norm"))
        if spec.reads_layer is None:
            of_keys = parts.products.tensor(parts.named("k_norm"))
        fused = HeadNorm(of_queries, of_keys, norm.epsilon, spec.value_norm)
    elif norm is not None:
        plain = _plain_norm(spec, norm, parts)
    queries, keys = (count * spec.head_dim for count in (spec.heads, spec.kv_heads))
    return HeadSteps(queries, keys, fused, plain, spec.clip, spec.query_growth)


def _plain_norm(spec: Attention, norm: Norm, parts: MixerParts) -> NormBoth:
    products, group = parts.products, parts.products.ops.group
    if spec.qk_norm_over is NormOver.ALL:
        of_queries, of_keys = (products.tensor(parts.named(f"{x}_norm")).float() for x in "qk")
        return OverAll(of_queries, of_keys, norm.epsilon, group)
    each = []
    for name, division in (("q_norm", Division.EVEN), ("k_norm", Division.KEY)):
        weight, bias = products.tensor(parts.named(name)).float(), None
        if norm.bias:
            bias = products.tensor(parts.named(f"{name}_bias")).float()
        if spec.qk_norm_over is NormOver.HEADS:
            weight = weight.view(-1, spec.head_dim)
            if group is not None:
                own = Shard(group.rank, group.world).part(Axis(len(weight), division))
                weight = weight[own.start : own.stop].clone()
        each.append(EachHead(weight, bias, norm.epsilon, norm.kind == "layer"))
    return OverHeads(*each)


def _reordered(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return x[..., list(order)]
