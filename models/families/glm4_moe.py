"""GLM-4.5 and 4.6: DeepSeek V3's experts behind ordinary attention, half of each head rotated."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.deepseek import with_v3_experts
from tokenpod.models.families.experts import gate_names, stacked
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names, PredictingNames


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    spec = gated_decoder(
        fields,
        served,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        factor=0.5,
    )
    return with_v3_experts(spec, fields, dense=1)


GLM4_MOE = Family(
    ("Glm4MoeForCausalLM",),
    _spec,
    Names(experts=gate_names(), predicting=PredictingNames()),
    layouts=(stacked(),),
)
