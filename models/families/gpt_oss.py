"""gpt-oss: sinks, a window in every other layer, biased experts with clamped gates, in MXFP4."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.ops import Activation
from tokenpod.models.expert_names import ExpertNames, ExpertTensor, Half
from tokenpod.models.families.experts import experts_of, softmax_routing, with_experts
from tokenpod.models.families.family import (
    Family,
    gated_decoder,
    windows_but_every,
    with_attention,
)
from tokenpod.models.fields import Fields
from tokenpod.models.names import Names
from tokenpod.models.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    for name, value in (("hidden_act", "silu"), ("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        fields.only(name, value)
    # Its default is not to rotate as others do: a config that does not say is no whole one.
    fields.fields(fields.first("rope_scaling", "rope_parameters"))
    bias = fields.flag("attention_bias", True)
    spec = gated_decoder(
        fields.defaulting(rope_theta=150_000.0, rms_norm_eps=1e-5),
        served,
        windows=_windows,
        qkv_bias=bias,
        output_bias=bias,
        head_dim=64,
    )
    experts = experts_of(fields, spec, softmax_routing(normalised=True), width=None)
    experts = replace(experts, activation=Activation.SWIGLU_CLAMPED, router_bias=True, biases=True)
    return with_experts(with_attention(spec, sinks=True), experts)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return windows_but_every(fields, layers, every=2, default=128)


def _tensor(name: str, half: Half | None, *, packed: bool) -> ExpertTensor:
    """Rows of gates and of what they open alternate."""
    stored = f"mlp.experts.{name}"
    bias = f"{stored}_bias"
    if packed:
        return ExpertTensor(f"{stored}_blocks", half, scales=f"{stored}_scales", bias=bias)
    return ExpertTensor(stored, half, transposed=True, bias=bias)


def _experts(*, packed: bool) -> ExpertNames:
    return ExpertNames(
        "mlp.router",
        _tensor("gate_up_proj", Half.EVEN, packed=packed),
        _tensor("gate_up_proj", Half.ODD, packed=packed),
        _tensor("down_proj", None, packed=packed),
    )


GPT_OSS = Family(
    ("GptOssForCausalLM",),
    _spec,
    Names(experts=_experts(packed=False)),
    layouts=(lambda names: replace(names, experts=_experts(packed=True)),),
    quantised=("mxfp4",),
)
