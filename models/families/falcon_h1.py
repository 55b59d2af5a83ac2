"""Falcon-H1: attention and a state space side by side in each layer, and multipliers of all parts.

Those of products become part of their weights; those before queries and keys part of their scale.
"""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, attention_of, each_layer, gated_decoder
from tokenpod.models.families.spaces import mamba_of
from tokenpod.models.layers.state_space import Multipliers
from tokenpod.models.specs.layer_spec import LayerSpec, Mlp
from tokenpod.models.specs.spec import Embedding, ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    # What is added behind a multiplied product is not multiplied in all places.
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        fields.only(name, False)
    fields = fields.defaulting(num_key_value_heads=8, mamba_d_ssm=1024)
    spec = gated_decoder(fields, served)
    epsilon = fields.real("rms_norm_eps", 1e-5)
    gate, down = _reals(fields, "mlp_multipliers", 2)
    before, behind, key, enters, leaves = (
        fields.real(f"{name}_multiplier", 1.0)
        for name in ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
    )
    opens, values, keys, queries, lengths = (
        enters * factor for factor in _reals(fields, "ssm_multipliers", 5)
    )
    space = mamba_of(
        fields,
        spec.hidden_size,
        epsilon if fields.flag("mamba_rms_norm", False) else None,
        norm_first=fields.flag("mamba_norm_before_gate", True),
        multipliers=Multipliers(opens, values, keys, queries, lengths, leaves),
    )

    def layer(own: LayerSpec) -> LayerSpec:
        attention, mlp = attention_of(own), own.mlp
        assert isinstance(mlp, Mlp)
        scale = attention.head_dim**-0.5 * before * before * key
        return replace(
            own,
            mixer=replace(attention, scale=scale, output_scale=before * behind),
            mlp=replace(mlp, gate_scale=gate, down_scale=down),
            beside=space,
        )

    return replace(
        each_layer(spec, layer),
        embedding=Embedding(scale=fields.real("embedding_multiplier", 1.0)),
        head=replace(spec.head, scale=fields.real("lm_head_multiplier", 1.0)),
    )


def _reals(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    return fields.reals(name, count) if name in fields else (1.0,) * count


FALCON_H1 = Family(
    ("FalconH1ForCausalLM",),
    _spec,
    Names(
        norm="final_layernorm",
        mlp_in="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
)
