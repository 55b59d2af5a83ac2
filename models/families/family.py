"""What a family states, and what those that follow Llama's layout have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenpod.kernels.ops import Activation
from tokenpod.models.config import DecoderConfig
from tokenpod.models.errors import ModelError
from tokenpod.models.fields import Fields
from tokenpod.models.rope import rope_of
from tokenpod.models.weights import Dim, Source, Split, Weight

#: `hidden_act` in config.json.
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}

#: Weights are served in one of these.
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Family:
    """A group of architectures that one config map and one weight table describe."""

    architectures: tuple[str, ...]
    #: From config.json to the decoder's config.
    config: Callable[[Fields], DecoderConfig]
    #: The tensors of a model with that config.
    weights: Callable[[DecoderConfig], tuple[Weight, ...]]


def gated_decoder(
    fields: Fields,
    *,
    windows: Callable[[Fields, int], tuple[int | None, ...]],
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
) -> DecoderConfig:
    """A config from the field names that all these families share.

    `windows` reads each layer's window; `head_dim` is the family's own default.
    """
    hidden = fields.integer("hidden_size", most=1 << 20)
    layers = fields.integer("num_hidden_layers", most=1 << 12)
    heads = fields.integer("num_attention_heads", most=1 << 14)
    kv_heads = fields.integer("num_key_value_heads", heads, most=heads)
    if heads % kv_heads:
        raise ModelError(
            f"{fields.source}: {heads} query heads can't share {kv_heads} key/value heads evenly"
        )
    head_dim = fields.integer("head_dim", head_dim or max(hidden // heads, 1), most=1 << 12)
    max_positions = fields.integer("max_position_embeddings")
    activation = fields.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"{fields.source}: hidden_act {activation!r} is not supported "
            f"(supported: {', '.join(ACTIVATIONS)})"
        )
    return DecoderConfig(
        architecture=fields.texts("architectures")[0],
        vocab_size=fields.integer("vocab_size", most=1 << 26),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", most=1 << 24),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_epsilon=fields.real("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],
        rope=rope_of(fields, head_dim, max_positions),
        windows=windows(fields, layers),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tied_head=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def no_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Every layer sees everything."""
    return (None,) * layers


def _dtype(fields: Fields) -> torch.dtype | None:
    """The checkpoint's dtype under its newer or its older name."""
    name = fields.text("dtype", fields.text("torch_dtype", "")).removeprefix("torch.")
    if name and name not in DTYPES:
        raise ModelError(
            f"{fields.source}: dtype {name!r} is not supported (supported: {', '.join(DTYPES)})"
        )
    return DTYPES.get(name)


def gated_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """The tensors under the names that all these families share."""
    return (*outer_weights(config), *attention_weights(config), *dense_weights(config))


def outer_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """What is there once: embedding, final norm and head."""
    return (*_OUTER, *(() if config.tied_head else _HEAD))


def attention_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """The layers' norms and attention."""
    return (
        *_LAYER,
        *(_QKV_BIAS if config.qkv_bias else ()),
        *(_OUTPUT_BIAS if config.output_bias else ()),
        *(_QK_NORM if config.qk_norm else ()),
    )


def dense_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """The layers' feed-forward blocks, as if all were dense."""
    return (*_DENSE, *(_MLP_BIAS if config.mlp_bias else ()))


_ATTENTION = "model.layers.{i}.self_attn"
_MLP = "model.layers.{i}.mlp"

_OUTER = (
    Weight(
        "embedding",
        (Source("model.embed_tokens.weight", (Dim.VOCABULARY, Dim.HIDDEN)),),
        Split.OUTPUT,
    ),
    Weight("norm", (Source("model.norm.weight", (Dim.HIDDEN,)),)),
)
_HEAD = (Weight("head", (Source("lm_head.weight", (Dim.VOCABULARY, Dim.HIDDEN)),), Split.OUTPUT),)
_LAYER = (
    Weight("{i}.input_norm", (Source("model.layers.{i}.input_layernorm.weight", (Dim.HIDDEN,)),)),
    Weight(
        "{i}.qkv",
        (
            Source(f"{_ATTENTION}.q_proj.weight", (Dim.QUERY, Dim.HIDDEN)),
            Source(f"{_ATTENTION}.k_proj.weight", (Dim.KEY, Dim.HIDDEN)),
            Source(f"{_ATTENTION}.v_proj.weight", (Dim.KEY, Dim.HIDDEN)),
        ),
        Split.OUTPUT,
    ),
    Weight(
        "{i}.output",
        (Source(f"{_ATTENTION}.o_proj.weight", (Dim.HIDDEN, Dim.QUERY)),),
        Split.INPUT,
    ),
    Weight(
        "{i}.mlp_norm",
        (Source("model.layers.{i}.post_attention_layernorm.weight", (Dim.HIDDEN,)),),
    ),
)
_DENSE = (
    Weight(
        "{i}.gate_up",
        (
            Source(f"{_MLP}.gate_proj.weight", (Dim.INTERMEDIATE, Dim.HIDDEN)),
            Source(f"{_MLP}.up_proj.weight", (Dim.INTERMEDIATE, Dim.HIDDEN)),
        ),
        Split.OUTPUT,
    ),
    Weight(
        "{i}.down",
        (Source(f"{_MLP}.down_proj.weight", (Dim.HIDDEN, Dim.INTERMEDIATE)),),
        Split.INPUT,
    ),
)
_QKV_BIAS = (
    Weight(
        "{i}.qkv_bias",
        (
            Source(f"{_ATTENTION}.q_proj.bias", (Dim.QUERY,)),
            Source(f"{_ATTENTION}.k_proj.bias", (Dim.KEY,)),
            Source(f"{_ATTENTION}.v_proj.bias", (Dim.KEY,)),
        ),
        Split.OUTPUT,
    ),
)
_OUTPUT_BIAS = (Weight("{i}.output_bias", (Source(f"{_ATTENTION}.o_proj.bias", (Dim.HIDDEN,)),)),)
_MLP_BIAS = (
    Weight(
        "{i}.gate_up_bias",
        (
            Source(f"{_MLP}.gate_proj.bias", (Dim.INTERMEDIATE,)),
            Source(f"{_MLP}.up_proj.bias", (Dim.INTERMEDIATE,)),
        ),
        Split.OUTPUT,
    ),
    Weight("{i}.down_bias", (Source(f"{_MLP}.down_proj.bias", (Dim.HIDDEN,)),)),
)
_QK_NORM = (
    Weight("{i}.q_norm", (Source(f"{_ATTENTION}.q_norm.weight", (Dim.HEAD,)),)),
    Weight("{i}.k_norm", (Source(f"{_ATTENTION}.k_norm.weight", (Dim.HEAD,)),)),
)
