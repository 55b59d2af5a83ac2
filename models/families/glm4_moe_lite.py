"""GLM-4.7-Flash: DeepSeek V3 with other sizes, and layers whose blocks a list names."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.deepseek import NAMES, latent_decoder, with_v3_experts
from tokenpod.models.families.experts import stacked
from tokenpod.models.families.family import Family
from tokenpod.models.specs.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields.only("topk_method", "noaux_tc")
    fields = fields.defaulting(
        qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5, routed_scaling_factor=1.8
    )
    spec = latent_decoder(fields, served, interleaved=fields.flag("rope_interleave", True))
    return with_v3_experts(spec, fields, dense=1)


GLM4_MOE_LITE = Family(("Glm4MoeLiteForCausalLM",), _spec, NAMES, layouts=(stacked(),))
