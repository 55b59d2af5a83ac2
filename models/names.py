"""Where a family's checkpoints have the weights that a spec asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenpod.models.expert_names import ExpertNames


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
    v_norm: str = "self_attn.v_norm"
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
    delta: DeltaNames = DeltaNames()
    per_layer: PerLayerNames = PerLayerNames()
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
