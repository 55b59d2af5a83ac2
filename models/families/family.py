"""What a family states, and what those that follow Llama's layout have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layers.attention import Attention
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.positions import Alibi, Rope
from tokenpod.models.layers.rope import rope_of
from tokenpod.models.specs.layer_spec import LayerSpec, Mlp, Norms
from tokenpod.models.specs.spec import Head, ModelSpec
from tokenpod.models.weights.names import Names

#: `hidden_act` in config.json, whatever the family calls it.
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}

LLAMA_NAMES = Names()

#: Weights are served in one of these.
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _all(fields: Fields) -> bool:
    """Whatever a config says."""
    del fields
    return True


@dataclass(frozen=True, slots=True)
class Family:
    """A group of architectures that one map from config.json and one set of names describe."""

    architectures: tuple[str, ...]
    #: config.json, and the longest sequence that will be served (None: what the model can) -> spec.
    spec: Callable[[Fields, int | None], ModelSpec]
    #: Where its checkpoints have the weights; of some families it depends on the model.
    names: Names | Callable[[ModelSpec], Names] = LLAMA_NAMES
    #: What names of tensors begin with: the first, or whichever a checkpoint has.
    prefixes: tuple[str, ...] = ("model.", "")
    #: Other layouts that checkpoints are published in.
    layouts: tuple[Callable[[Names], Names], ...] = ()
    #: Kinds of `quantization_config` whose tensors a layout names.
    quantised: tuple[str, ...] = ()
    #: Which models of these architectures are ours, by config.json; transformers has the others.
    takes: Callable[[Fields], bool] = _all

    def names_of(self, spec: ModelSpec) -> tuple[Names, ...]:
        """Of a model, by layout."""
        names = self.names(spec) if callable(self.names) else self.names
        return (names, *(layout(names) for layout in self.layouts))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that any model has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def attention(self, positions: Rope | Alibi | None, *, bias: bool) -> Attention:
        """Attention with a bias in all of its products, or in none."""
        return Attention(
            self.heads, self.kv_heads, self.head_dim, positions, qkv_bias=bias, output_bias=bias
        )


def plain_mlp(width: int, activation: Activation, *, bias: bool) -> Mlp:
    """A block without gates, with a bias in both products or in none."""
    return Mlp(width, activation, gated=False, up_bias=bias, down_bias=bias)


def sizes_of(
    fields: Fields,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    kv_heads: str | int = "num_key_value_heads",
    head_dim: int | None = None,
) -> Sizes:
    """Sizes by the names of their fields, or the number itself; `head_dim` is the family's default.

    Raises ModelError, naming the field, where one does not divide another.
    """
    hidden_size = fields.integer(hidden, most=1 << 20)
    count = fields.integer(heads, most=1 << 14)
    groups = kv_heads if isinstance(kv_heads, int) else fields.integer(kv_heads, count, most=count)
    if count % groups:
        raise ModelError(
            f"{fields.source}: {kv_heads} is {groups}: {count} query heads can't share {groups} "
            "key/value heads evenly"
        )
    if head_dim is None and "head_dim" not in fields:
        if hidden_size % count:
            raise ModelError(
                f"{fields.source}: {heads} is {count}: {hidden} {hidden_size} can't be divided "
                f"among {count} heads"
            )
        head_dim = hidden_size // count
    return Sizes(
        hidden=hidden_size,
        layers=fields.integer(layers, most=1 << 12),
        heads=count,
        kv_heads=groups,
        head_dim=fields.integer("head_dim", head_dim, most=1 << 12),
    )


def model_spec(fields: Fields, sizes: Sizes, *, tied: bool, **more: Any) -> ModelSpec:
    """A spec with what all families say alike; `tied` is the family's default."""
    head = more.pop("head", Head())
    return ModelSpec(
        architecture=fields.texts("architectures")[0],
        vocab_size=fields.integer("vocab_size", most=1 << 26),
        hidden_size=sizes.hidden,
        head=replace(head, tied=fields.flag("tie_word_embeddings", tied)),
        dtype=dtype_of(fields),
        eos_token_ids=fields.token_ids("eos_token_id"),
        **more,
    )


def gated_decoder(
    fields: Fields,
    served: int | None,
    *,
    windows: Callable[[Fields, int], tuple[int | None, ...]] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    tied: bool = False,
    norm: Norm | None = None,
    gated: bool = True,
    **rope: Any,
) -> ModelSpec:
    """A spec from the field names that all families share that follow Llama.

    `windows` reads each layer's window (None: all see everything); `head_dim` and `tied` are the
    family's own defaults, `activation` the name of the field and its default. Without a `norm` it
    is an RMS norm. What else is given is for `rope_of`.
    """
    sizes = sizes_of(fields, head_dim=head_dim)
    max_positions = fields.integer("max_position_embeddings")
    norm = norm or Norm("rms", fields.real("rms_norm_eps", 1e-6))
    mlp = Mlp(
        width=fields.integer("intermediate_size", most=1 << 24),
        activation=fields.choice(activation[0], ACTIVATIONS, activation[1]),
        gated=gated,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
    )
    positions = rope_of(fields, sizes.head_dim, max_positions, served=served, **rope)

    def layer(window: int | None) -> LayerSpec:
        attention = Attention(
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            positions=positions,
            window=window,
            qk_norm=norm if qk_norm else None,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
        )
        return LayerSpec(attention, mlp, Norms(attention_in=norm, mlp_in=norm))

    return model_spec(
        fields,
        sizes,
        tied=tied,
        max_positions=max_positions,
        layers=tuple(map(layer, (windows or no_windows)(fields, sizes.layers))),
        norm=norm,
    )


def each_layer(spec: ModelSpec, change: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
    """The same with every layer changed."""
    return replace(spec, layers=tuple(map(change, spec.layers)))


def with_attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The same with other fields of every layer's attention."""
    return each_layer(spec, lambda layer: changed(layer, **changes))


def changed(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """The same with other fields of its attention."""
    return replace(layer, mixer=replace(attention_of(layer), **changes))


def attention_of(layer: LayerSpec) -> Attention:
    """Of a layer that has heads."""
    assert isinstance(layer.mixer, Attention)
    return layer.mixer


def norms_behind(spec: ModelSpec) -> ModelSpec:
    """The same with norms behind the branches instead of before them."""
    norms = Norms(attention_out=spec.norm, mlp_out=spec.norm)
    return each_layer(spec, lambda layer: replace(layer, norms=norms))


def without_rope(spec: ModelSpec, layers: Iterable[int]) -> ModelSpec:
    """The same with no positions in these layers."""
    own = list(spec.layers)
    for i in layers:
        own[i] = changed(own[i], positions=None)
    return replace(spec, layers=tuple(own))


#: Names of the norms that `norms_behind` leaves.
NAMES_BEHIND = Names(attention_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm")


def no_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Every layer sees everything."""
    return (None,) * layers


def some_window(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """One for all layers, if `sliding_window` is there."""
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    return (window,) * layers


def windows_by_type(fields: Fields, layers: int, window: int | None) -> tuple[int | None, ...]:
    """The window where `layer_types` says so."""
    types = fields.texts("layer_types")
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{fields.source}: layer_types must name full_attention or sliding_attention "
            f"for each of {layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def windows_but_every(
    fields: Fields, layers: int, *, every: int, default: int | None = 4096
) -> tuple[int | None, ...]:
    """As `layer_types` says; without it, every so many-th layer sees everything."""
    window = fields.optional_integer("sliding_window", default)
    if "layer_types" in fields:
        return windows_by_type(fields, layers, window)
    every = fields.integer("sliding_window_pattern", every)
    return tuple(window if (i + 1) % every else None for i in range(layers))


def dtype_of(fields: Fields) -> torch.dtype | None:
    """The checkpoint's dtype under its newer or its older name."""
    name = fields.text("dtype", fields.text("torch_dtype", "")).removeprefix("torch.")
    if name and name not in DTYPES:
        raise ModelError(
            f"{fields.source}: dtype {name!r} is not supported (supported: {', '.join(DTYPES)})"
        )
    return DTYPES.get(name)
