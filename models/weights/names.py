"""Where a family's checkpoints have the weights that a spec asks for, experts' too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from tokenpod.models.weights.weights import Axis, Segment, Source, Stack


@dataclass(frozen=True, slots=True)
class Fused:
    """One tensor in place of several: all of the first, then of the second ...

    By `heads`, it has one group per key/value head instead: its queries, its key, its value.
    """

    name: str
    by_heads: bool = False


class Half(Enum):
    """Which rows of a tensor that holds gates and what they open."""

    FIRST = "first"
    SECOND = "second"
    EVEN = "even"
    ODD = "odd"


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A weight of every expert: a tensor each if its name has `{e}`, otherwise all in one."""

    #: Whole, with `.weight` if it has that.
    name: str
    half: Half | None = None
    #: All in one: without an axis that counts experts.
    flat: bool = False
    #: [in, out].
    transposed: bool = False
    #: Of numbers of 4 bits: the tensor with their scales.
    scales: str = ""
    #: The tensor with its bias, if experts have one.
    bias: str = ""

    def source(self, at: str, expert: int, count: int, axes: tuple[Axis, ...]) -> Source:
        """One expert's."""
        return Source(
            at + self.name.format(e=expert),
            axes,
            self._segment(axes[0].length),
            transposed=self.transposed,
            stack=None if "{e}" in self.name else Stack(expert, count, self.flat),
            scales=at + self.scales if self.scales else None,
        )

    def bias_source(self, at: str, expert: int, count: int, rows: Axis) -> Source:
        """One expert's."""
        segment, stack = self._segment(rows.length), Stack(expert, count)
        return Source(at + self.bias, (rows,), segment, stack=stack)

    def _segment(self, rows: int) -> Segment | None:
        if self.half is None:
            return None
        if self.half in (Half.FIRST, Half.SECOND):
            return Segment((rows, rows), int(self.half is Half.SECOND))
        return Segment((1, 1), int(self.half is Half.ODD), rows)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Of a mixture."""

    router: str
    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor
    #: Whole; a tensor [experts] or [1, experts].
    correction: str = ""
    correction_rows: bool = False
    shared_up: tuple[str, ...] | Fused = ()
    shared_down: str = ""
    shared_gate: str = ""
    #: From the stream to what experts read, and back.
    inner_in: str = ""
    inner_out: str = ""

    def stacked(self, gate_up: str, down: str, **other: Any) -> ExpertNames:
        """The same with all experts' weights in two tensors [experts, out, in], and `other`."""
        gate, up = ExpertTensor(gate_up, Half.FIRST), ExpertTensor(gate_up, Half.SECOND)
        return replace(self, gate=gate, up=up, down=ExpertTensor(down), **other)

    def transposed(self) -> ExpertNames:
        """The same with experts' weights as [in, out]."""
        gate, up, down = (replace(x, transposed=True) for x in (self.gate, self.up, self.down))
        return replace(self, gate=gate, up=up, down=down)


def experts_apart(
    router: str, expert: str, gate: str, up: str, down: str, **other: Any
) -> ExpertNames:
    """A tensor for each weight of each expert, whose names begin with `expert` (with `{e}`)."""
    each = [ExpertTensor(f"{expert}.{name}.weight") for name in (gate, up, down)]
    return ExpertNames(router, each[0], each[1], each[2], **other)


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
class DeltaNames:
    """Of gated delta nets, as Qwen3.5 has them."""

    qkv: str = "linear_attn.in_proj_qkv"
    gate: str = "linear_attn.in_proj_z"
    write: str = "linear_attn.in_proj_b"
    decay: str = "linear_attn.in_proj_a"
    conv: str = "linear_attn.conv1d"
    #: Whole names of tensors.
    log_rate: str = "linear_attn.A_log"
    shift: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"
    #: Two tensors in place of the first four, of each key head in turn all that it has: queries,
    #: keys, values and gates in one, `write` and `decay` in the other.
    by_heads: tuple[str, str] | None = None
    #: Where gates and decays are made in two products, the first of each; what names of products
    #: and convolutions of queries, keys and values begin with, which have a tensor each.
    gate_rank: str = ""
    decay_rank: str = ""
    apart: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpaceNames:
    """Of state spaces, as Granite 4 has them."""

    #: Gates, values, keys, queries, steps.
    inputs: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    #: Whole names of tensors.
    log_rate: str = "mamba.A_log"
    shift: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    norm: str = "mamba.norm"
    output: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True)
class ShortNames:
    """Of short convolutions, as LFM2 has them."""

    #: What is let in, what is let out, values.
    inputs: str = "conv.in_proj"
    conv: str = "conv.conv"
    output: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class PerLayerNames:
    """Of embeddings that each layer has of its own, as Gemma has them."""

    embedding: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"
    #: Of each layer.
    gate: str = "per_layer_input_gate"
    output: str = "per_layer_projection"
    output_norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class PredictingNames:
    """Of a layer that predicts further tokens, as DeepSeek V3 has them: `models.mtp`."""

    #: What says in config.json how many there are, and what it is where that does not say.
    field: str = "num_nextn_predict_layers"
    count: int = 0
    #: What names begin with, behind the prefix or `beside` it; `{layers}` is how many there are.
    at: str = "layers.{layers}."
    beside: bool = False
    #: What those of the weights that all layers have begin with, behind that.
    layer: str = ""
    embedding_norm: str = "enorm"
    feature_norm: str = "hnorm"
    join: str = "eh_proj"
    #: The columns of `join` begin with the feature's, not with the token's.
    feature_first: bool = False
    norm: str = "shared_head.norm"

    def place(self, prefix: str, layers: int) -> str:
        """What names of its tensors begin with, of a model of so many layers."""
        return ("" if self.beside else prefix) + self.at.format(layers=layers)


@dataclass(frozen=True, slots=True)
class Names:
    """Names of tensors without `.weight` and `.bias`, as Llama has them.

    All but `head` follow the prefix of the family's checkpoints; those of layers follow `layer`
    too, in which `{i}` is the number. What a spec has not is not looked for.
    """

    embedding: str = "embed_tokens"
    positions: str = ""
    #: What is added to tokens of a first text, of a second, and so on.
    token_types: str = ""
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
    v_norm: str = "self_attn.v_norm"
    sinks: str = "self_attn.sinks"
    #: Once for all layers.
    distance_bias: str = ""
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
    delta: DeltaNames = DeltaNames()
    space: SpaceNames = SpaceNames()
    short: ShortNames = ShortNames()
    per_layer: PerLayerNames = PerLayerNames()
    #: None: no checkpoint has such a layer, or it is not known how.
    predicting: PredictingNames | None = None
    #: A number that the stream behind a layer is multiplied by; the tensor's whole name.
    layer_scale: str = "layer_scalar"
    #: Tensors of one number for all heads or one each, which a checkpoint may have.
    key_scale: str = "self_attn.k_scale"
    value_scale: str = "self_attn.v_scale"
    #: Endings of tensors that no model needs: what they hold follows from the config.
    surplus: tuple[str, ...] = field(default=(".rotary_emb.inv_freq",))
    #: Beginnings of names of such tensors, behind the prefix; `{layers}` is how many there are.
    beyond: tuple[str, ...] = ()
    #: The same, of tensors that lie beside the prefix.
    beside: tuple[str, ...] = ()


def head_name(names: Names, prefix: str) -> str:
    """Of the head's tensor, beside the base model: a.model.layers, a.lm_head."""
    return (
        f"{prefix.removesuffix('model.')}{names.head}" if prefix.endswith(".model.") else names.head
    )
