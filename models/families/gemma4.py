"""Gemma 4 (text, without experts): heads of two sizes, values that are keys, caches of several
layers, and embeddings that each layer reads of its own.
"""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import (
    Family,
    attention_of,
    changed,
    gated_decoder,
    windows_but_every,
)
from tokenpod.models.families.gemma2 import NAMES
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.rope import rope_of
from tokenpod.models.specs.layer_spec import LayerSpec, Mlp, Norms, PerLayer
from tokenpod.models.specs.spec import Embedding, ModelSpec, PerLayerRows

#: What a config may leave out.
DEFAULTS = {
    "vocab_size": 262_144,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
}
#: Heads of layers without a window.
_GLOBAL_HEAD_DIM = 512


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields = fields.defaulting(**DEFAULTS)
    # A text's tokens see what came before them, whatever images do.
    fields.only("use_bidirectional_attention", "vision")
    mutual = "use_bidirectional_attention" in fields
    fields.only("enable_moe_block", False)
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        fields.only(name, None)
    bias = fields.flag("attention_bias", False)
    norm = Norm("rms", fields.real("rms_norm_eps", 1e-6), exact=True)
    spec = gated_decoder(
        fields,
        served,
        windows=_windows,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_dim=256,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        norm=norm,
        layer_type="sliding_attention",
    )
    layers = _sharing(_global(spec, fields, served), fields)
    width = fields.count("hidden_size_per_layer_input", 256)
    per_layer, rows = None, None
    if width:
        per_layer = PerLayer(width, _mlp(layers[0]).activation, norm)
        count = fields.integer("vocab_size_per_layer_input", 262_144, most=1 << 26)
        if count < spec.vocab_size:
            raise ModelError(
                f"{fields.source}: vocab_size_per_layer_input is {count}: there are"
                f" {spec.vocab_size} tokens"
            )
        rows = PerLayerRows(count, width, norm)
    own = Norms(norm, norm, norm, norm)
    layers = [
        # Of an image's rows, those in windows alone.
        changed(
            replace(each, norms=own, per_layer=per_layer, scaled=True),
            mutual=mutual and attention_of(each).window is not None,
        )
        for each in layers
    ]
    return replace(
        spec,
        layers=tuple(layers),
        embedding=Embedding(spec.hidden_size**0.5, scales_given=False, per_layer=rows),
        head=replace(spec.head, softcap=fields.optional_real("final_logit_softcapping", None)),
    )


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The last layer has none, whatever a config says."""
    return (*windows_but_every(fields, layers, every=6, default=512)[:-1], None)


def _global(spec: ModelSpec, fields: Fields, served: int | None) -> list[LayerSpec]:
    """Layers without a window have heads of their own size and rotation, maybe without values."""
    same = fields.flag("attention_k_eq_v", False)
    found = []
    for i, layer in enumerate(spec.layers):
        own = changed(layer, scale=1.0, value_norm=True)
        attention = attention_of(own)
        if attention.window is None:
            heads = fields.optional_integer("num_global_key_value_heads", None) if same else None
            shape = Fields(
                {
                    "head_dim": fields.integer("global_head_dim", _GLOBAL_HEAD_DIM, most=1 << 12),
                    "num_key_value_heads": heads or attention.kv_heads,
                    **_of_layer(fields, i),
                },
                fields.source,
            )
            head_dim = shape.integer("head_dim", most=1 << 12)
            positions = rope_of(
                fields, head_dim, spec.max_positions, served=served, layer_type="full_attention"
            )
            own = changed(
                own,
                head_dim=head_dim,
                kv_heads=shape.integer("num_key_value_heads"),
                positions=positions,
                values_are_keys=same,
            )
        found.append(own)
    return found


def _of_layer(fields: Fields, i: int) -> dict[str, object]:
    """What newer files say of one layer's heads."""
    layers = fields.fields("per_layer_config") if "per_layer_config" in fields else None
    if layers is None or str(i) not in layers:
        return {}
    own = layers.fields(str(i))
    for name in own.values:
        if name not in ("head_dim", "num_key_value_heads"):
            raise ModelError(f"{fields.source}: per_layer_config has {name}: not supported")
    return dict(own.values)


def _sharing(layers: list[LayerSpec], fields: Fields) -> list[LayerSpec]:
    """The last layers read the keys and values of the last one of their kind before them."""
    first = len(layers) - fields.count("num_kv_shared_layers", 0, most=len(layers))
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    kinds = [attention_of(layer).window for layer in layers]
    found = layers[:first]
    for i in range(first, len(layers)):
        stored = [j for j in range(first) if kinds[j] == kinds[i]]
        if not stored:
            raise ModelError(
                f"{fields.source}: num_kv_shared_layers is {len(layers) - first}: layer {i} finds"
                " no layer of its kind to share with"
            )
        mlp = _mlp(layers[i])
        mlp = replace(mlp, width=mlp.width * wide)
        found.append(replace(changed(layers[i], reads_layer=stored[-1]), mlp=mlp))
    return found


def _is_dense(fields: Fields) -> bool:
    """With experts, which have a router and norms of their own, transformers computes it."""
    return not fields.flag("enable_moe_block", False)


def _mlp(layer: LayerSpec) -> Mlp:
    assert isinstance(layer.mlp, Mlp)
    return layer.mlp


GEMMA4 = Family(("Gemma4ForCausalLM",), _spec, NAMES, takes=_is_dense)
