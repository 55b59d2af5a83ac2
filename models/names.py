"""Where a family's checkpoints have the weights that a spec asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.nn import functional

from tokenpod.models.expert_names import ExpertNames
from tokenpod.models.layer_spec import (
    Attention,
    Experts,
    Latent,
    LayerSpec,
    Mlp,
    Norm,
    NormOver,
    Same,
)
from tokenpod.models.rope import head_order
from tokenpod.models.spec import ModelSpec
from tokenpod.models.weights import HEAD, Axis, Division, Segment, Source, Stack, Weight


@dataclass(frozen=True, slots=True)
class Fused:
    """One tensor in place of several: all of the first, then of the second ...

    By `heads`, it has one group per key/value head instead: its queries, its key, its value.
    """

    name: str
    by_heads: bool = False


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Of attention over latent rows, as DeepSeek has them."""

    #: Queries, of the stream.
    queries: str = "self_attn.q_proj"
    #: What queries are made of, its norm, and queries made of that.
    query_latent: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    row: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    #: By heads: its part of a key, then its value.
    up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True)
class Names:
    """Names of tensors without `.weight` and `.bias`, as Llama has them.

    All but `head` follow the prefix of the family's checkpoints; those of layers follow `layer`
    too, in which `{i}` is the number. What a spec has not is not looked for.
    """

    embedding: str = "embed_tokens"
    positions: str = ""
    embedding_norm: str = ""
    project_in: str = ""
    project_out: str = ""
    norm: str = "norm"
    head: str = "lm_head"
    layer: str = "layers.{i}."
    qkv: tuple[str, str, str] | Fused = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    #: Weights of each head are one tensor, or so many, `{h}` being the head.
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    attention_in: str = "input_layernorm"
    attention_out: str = ""
    mlp_in: str = "post_attention_layernorm"
    mlp_out: str = ""
    #: Gate and up, or up alone.
    up: tuple[str, ...] | Fused = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    #: Weights of products are [in, out].
    transposed: bool = False
    experts: ExpertNames | None = None
    latent: LatentNames = LatentNames()
    #: Tensors of one number for all heads or one each, which a checkpoint may have.
    key_scale: str = "self_attn.k_scale"
    value_scale: str = "self_attn.v_scale"
    #: Endings of tensors that no model needs: what they hold follows from the config.
    surplus: tuple[str, ...] = field(default=(".rotary_emb.inv_freq",))
    #: Beginnings of names of such tensors, behind the prefix; `{layers}` is how many there are.
    beyond: tuple[str, ...] = ()


def weights_of(spec: ModelSpec, names: Names, prefix: str) -> list[Weight]:
    """All weights of a model, layer by layer."""
    table = list(_outer(spec, names, prefix))
    for i, layer in enumerate(spec.layers):
        at = prefix + names.layer.format(i=i)
        own = _Layer(spec.hidden_size, layer, names, at).weights()
        table += [replace(weight, name=f"{i}.{weight.name}") for weight in own]
    return table


def head_name(names: Names, prefix: str) -> str:
    """Of the head's tensor, beside the base model: a.model.layers, a.lm_head."""
    return (
        f"{prefix.removesuffix('model.')}{names.head}" if prefix.endswith(".model.") else names.head
    )


def beyond_names(spec: ModelSpec, names: Names, prefix: str) -> tuple[str, ...]:
    """Beginnings of the names of tensors that a checkpoint has beyond its model's."""
    return tuple(prefix + name.format(layers=len(spec.layers)) for name in names.beyond)


def _outer(spec: ModelSpec, names: Names, prefix: str) -> Iterator[Weight]:
    """What is there once: embedding, positions, projections, norms and head."""
    hidden, width = Axis(spec.hidden_size), Axis(spec.embedding_width)
    vocabulary = Axis(spec.vocab_size, Division.VOCABULARY)
    embedding = spec.embedding
    yield _weight("embedding", prefix + names.embedding, vocabulary, width)
    if embedding.positions is not None:
        rows = Axis(embedding.positions.rows)
        yield _weight("positions", prefix + names.positions, rows, hidden)
    if embedding.width is not None:
        yield _weight("project_in", prefix + names.project_in, hidden, width)
        yield _weight("project_out", prefix + names.project_out, width, hidden)
    yield from _norm("embedding_norm", embedding.norm, prefix + names.embedding_norm, hidden)
    yield from _norm("norm", spec.norm, prefix + names.norm, hidden)
    if not spec.head.tied:
        # In no format of fewer bits: here rounding shows at once.
        function = _rows_of_length_one if spec.head.normalised else None
        source = Source(f"{names.head}.weight", (vocabulary, width), function=function)
        yield Weight(HEAD, (source,))
    if spec.head.bias:
        yield Weight("head_bias", (Source(f"{names.head}.bias", (vocabulary,)),))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, their names without its number."""

    hidden_size: int
    spec: LayerSpec
    names: Names
    at: str

    def weights(self) -> Iterator[Weight]:
        spec, names, hidden = self.spec, self.names, Axis(self.hidden_size)
        norms, at = spec.norms, self.at
        yield from _norm("attention_in", norms.attention_in, at + names.attention_in, hidden)
        if isinstance(spec.attention, Latent):
            yield from self._latent(spec.attention)
        else:
            yield from self._attention(spec.attention)
        yield from _norm("attention_out", norms.attention_out, at + names.attention_out, hidden)
        if not isinstance(norms.mlp_in, Same):
            yield from _norm("mlp_in", norms.mlp_in, at + names.mlp_in, hidden)
        if isinstance(spec.mlp, Experts):
            yield from self._experts(spec.mlp)
        else:
            yield from self._mlp(spec.mlp, "", self.names.up, self.names.down)
        yield from _norm("mlp_out", norms.mlp_out, at + names.mlp_out, hidden)

    def _attention(self, spec: Attention) -> Iterator[Weight]:
        names, head, hidden = self.names, spec.head_dim, Axis(self.hidden_size)
        queries = Axis(spec.heads * head, Division.EVEN, unit=head)
        keys = Axis(spec.kv_heads * head, Division.KEY, unit=head)
        order = head_order(spec.positions, head)
        parts = [(queries, order), (keys, order), (keys, None)]
        groups = spec.kv_heads if isinstance(names.qkv, Fused) and names.qkv.by_heads else 1
        yield from self._stacked("qkv", names.qkv, parts, groups, spec.qkv_bias)
        if spec.qk_norm is not None:
            for name, rows in (("q_norm", queries), ("k_norm", keys)):
                yield from self._head_norm(name, spec, spec.qk_norm, rows)
        if spec.sinks:
            axis = Axis(spec.heads, Division.EVEN)
            source = Source(self.at + names.sinks, (axis,))
            yield Weight("sinks", (source,), dtype=torch.float32)
        yield from self._product("output", names.output, hidden, queries, spec.output_bias)

    def _head_norm(self, name: str, spec: Attention, norm: Norm, rows: Axis) -> Iterator[Weight]:
        """Of queries or of keys. Weights of each head are whole on every rank: they are few."""
        stored = self.at + (self.names.q_norm if name == "q_norm" else self.names.k_norm)
        order, head = head_order(spec.positions, spec.head_dim), Axis(spec.head_dim)
        if spec.qk_norm_over is not NormOver.HEADS:
            axis = head if spec.qk_norm_over is NormOver.HEAD else rows
            for weight in _norm(name, norm, stored, axis):
                sources = tuple(replace(source, order=order) for source in weight.sources)
                yield replace(weight, sources=sources)
            return
        heads = rows.length // spec.head_dim
        if "{h}" in stored:
            axes: tuple[Axis, ...] = (head,)
            names = [stored.format(h=h) for h in range(heads)]
        else:
            axes, names = (Axis(heads), head), [stored]
        reorder = None if order is None else partial(_reordered, order=order)
        yield Weight(
            name, tuple(Source(f"{each}.weight", axes, function=reorder) for each in names)
        )

    def _latent(self, spec: Latent) -> Iterator[Weight]:
        names, hidden, value = self.names.latent, Axis(self.hidden_size), spec.value_dim
        query, row = spec.nope_dim + spec.rope_dim, spec.kv_rank + spec.rope_dim
        # Rotation pairs i with i + D/2 of what it turns: the ends of queries and of rows.
        turned = head_order(spec.positions, spec.rope_dim)

        def order(before: int) -> tuple[int, ...] | None:
            return turned and (*range(before), *(before + i for i in turned))

        heads = Axis(spec.heads * query, Division.EVEN, unit=query)
        if spec.query_rank is None:
            first = self._source(names.queries, heads, hidden, order(spec.nope_dim))
        else:
            first = self._source(names.query_latent, Axis(spec.query_rank), hidden, None)
        rows = self._source(names.row, Axis(row), hidden, order(spec.kv_rank))
        yield Weight("latent_in", (first, rows), multiplied=True)
        if spec.query_rank is not None:
            rank = Axis(spec.query_rank)
            yield from _norm("query_norm", spec.query_norm, self.at + names.query_norm, rank)
            up = self._source(names.query_up, heads, rank, order(spec.nope_dim))
            yield Weight("q_up", (up,), multiplied=True)
        rank = Axis(spec.kv_rank)
        yield from _norm("kv_norm", spec.kv_norm, self.at + names.norm, rank)
        made = spec.nope_dim + value
        up = self._source(names.up, Axis(spec.heads * made, Division.EVEN, unit=made), rank, None)
        yield Weight("kv_up", (up,))
        values = Axis(spec.heads * value, Division.EVEN, unit=value)
        yield from self._product("output", self.names.output, hidden, values, False)

    def _source(
        self, stored: str, rows: Axis, columns: Axis, order: tuple[int, ...] | None
    ) -> Source:
        return Source(f"{self.at}{stored}.weight", (rows, columns), order=order)

    def _mlp(
        self, spec: Mlp, name: str, up: tuple[str, ...] | Fused, down: str
    ) -> Iterator[Weight]:
        width, hidden = Axis(spec.width, Division.EVEN), Axis(self.hidden_size)
        rows: list[tuple[Axis, tuple[int, ...] | None]] = [(width, None)]
        rows *= 2 if spec.gated else 1
        yield from self._stacked(f"{name}up", up, rows, 1, spec.up_bias)
        yield from self._product(f"{name}down", down, hidden, width, spec.down_bias)

    def _experts(self, spec: Experts) -> Iterator[Weight]:
        names, at, count = self.names.experts, self.at, spec.count
        assert names is not None, "a family with experts names them"
        width, hidden = Axis(spec.width, Division.EVEN), Axis(self.hidden_size)
        weights = {
            "gate_up": ((names.gate, names.up), (width, hidden)),
            "down": ((names.down,), (hidden, width)),
        }
        yield _weight("experts.router", at + names.router, Axis(count), hidden)
        for name, (tensors, axes) in weights.items():
            each = tuple(t.source(at, e, count, axes) for e in range(count) for t in tensors)
            yield Weight(f"experts.{name}", each, experts=count)
            if spec.biases:
                rows = axes[0]
                each = tuple(
                    t.bias_source(at, e, count, rows) for e in range(count) for t in tensors
                )
                yield Weight(f"experts.{name}_bias", each, experts=count)
        yield from self._router_biases(spec, names)
        if spec.shared is not None:
            yield from self._mlp(spec.shared, "shared_", names.shared_up, names.shared_down)
        if spec.shared_gate:
            yield _weight("shared_gate", at + names.shared_gate, Axis(1), hidden)

    def _router_biases(self, spec: Experts, names: ExpertNames) -> Iterator[Weight]:
        """In float32: rounding does not choose."""
        rows = Axis(spec.count)
        if spec.router_bias:
            source = Source(f"{self.at}{names.router}.bias", (rows,))
            yield Weight("experts.router_bias", (source,), dtype=torch.float32)
        if spec.correction:
            stack = Stack(0, 1) if names.correction_rows else None
            source = Source(self.at + names.correction, (rows,), stack=stack)
            yield Weight("experts.correction", (source,), dtype=torch.float32)

    def _stacked(
        self,
        name: str,
        stored: tuple[str, ...] | Fused,
        rows: list[tuple[Axis, tuple[int, ...] | None]],
        groups: int,
        bias: bool,
    ) -> Iterator[Weight]:
        """A product of several weights' rows, whether the checkpoint has them fused or apart."""
        sizes = tuple(axis.length // groups for axis, _ in rows)
        for kind in ("weight", "bias") if bias else ("weight",):
            sources = []
            for index, (axis, order) in enumerate(rows):
                at = stored.name if isinstance(stored, Fused) else stored[index]
                segment = Segment(sizes, index, groups) if isinstance(stored, Fused) else None
                axes = (axis, Axis(self.hidden_size)) if kind == "weight" else (axis,)
                turned = self.names.transposed and kind == "weight"
                name_there = f"{self.at}{at}.{kind}"
                sources.append(Source(name_there, axes, segment, order, transposed=turned))
            ours = name if kind == "weight" else f"{name}_bias"
            yield Weight(ours, tuple(sources), multiplied=kind == "weight")

    def _product(
        self, name: str, stored: str, rows: Axis, columns: Axis, bias: bool
    ) -> Iterator[Weight]:
        source = Source(
            f"{self.at}{stored}.weight", (rows, columns), transposed=self.names.transposed
        )
        yield Weight(name, (source,), multiplied=True)
        if bias:
            yield Weight(f"{name}_bias", (Source(f"{self.at}{stored}.bias", (rows,)),))


def _weight(name: str, stored: str, *axes: Axis) -> Weight:
    return Weight(name, (Source(f"{stored}.weight", axes),))


def _norm(name: str, norm: Norm | None, stored: str, axis: Axis) -> Iterator[Weight]:
    if norm is None:
        return
    if norm.weight:
        weight = _weight(name, stored, axis)
        if norm.offset:
            # In float32: what is small beside the offset would be lost in fewer bits.
            sources = tuple(replace(source, function=_add_one) for source in weight.sources)
            weight = replace(weight, sources=sources, dtype=torch.float32)
        yield weight
    if norm.bias:
        yield Weight(f"{name}_bias", (Source(f"{stored}.bias", (axis,)),))


def _rows_of_length_one(x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(x.float())


def _reordered(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return x[..., list(order)]


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x.float() + 1
