"""GLM-4: half of each head rotated by neighbours, gate and up in one tensor.

The 0414 release has norms behind the branches, too.
"""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, each_layer, gated_decoder
from tokenpod.models.specs.layer_spec import Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Fused, Names

_NAMES = Names(up=Fused("mlp.gate_up_proj"))


def _glm(fields: Fields, served: int | None) -> ModelSpec:
    return gated_decoder(
        fields,
        served,
        qkv_bias=fields.flag("attention_bias", True),
        head_dim=128,
        factor=0.5,
        interleaved=True,
    )


def _glm4(fields: Fields, served: int | None) -> ModelSpec:
    spec = _glm(fields, served)
    norms = Norms(spec.norm, spec.norm, spec.norm, spec.norm)
    return each_layer(spec, lambda layer: replace(layer, norms=norms))


GLM = Family(("GlmForCausalLM",), _glm, _NAMES)
GLM4 = Family(
    ("Glm4ForCausalLM",),
    _glm4,
    replace(_NAMES, attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"),
)
