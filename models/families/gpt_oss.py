"""gpt-oss: sinks, a window in every other layer, biased experts with clamped gates, in MXFP4."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import experts_of, softmax_routing, with_experts
from tokenpod.models.families.family import Family, gated_decoder, windows_but_every, with_attention
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import ExpertNames, ExpertTensor, Half, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    for name, value in (("hidden_act", "silu"), ("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        fields.only(name, value)
    # Its default is not to rotate as others do: a config that does not say is no whole one.
    fields.fields(fields.first("rope_scaling", "rope_parameters"))
    bias = fields.flag("attention_bias", True)
    fields = fields.defaulting(rope_theta=150_000.0, rms_norm_eps=1e-5)
    spec = gated_decoder(
        fields, served, windows=_windows, qkv_bias=bias, output_bias=bias, head_dim=64
    )
    experts = experts_of(fields, spec, softmax_routing(normalised=True), width=None)
    experts = replace(experts, activation=Activation.SWIGLU_CLAMPED, router_bias=True, biases=True)
    return with_experts(with_attention(spec, sinks=True), experts)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return windows_but_every(fields, layers, every=2, default=128)


def _experts(*, packed: bool) -> ExpertNames:
    """Rows of gates and of what they open alternate."""

    def tensor(name: str, half: Half | None = None) -> ExpertTensor:
        at = f"mlp.experts.{name}"
        stored, scales = (f"{at}_blocks", f"{at}_scales") if packed else (at, "")
        return ExpertTensor(stored, half, transposed=not packed, scales=scales, bias=f"{at}_bias")

    gate, up = (tensor("gate_up_proj", half) for half in (Half.EVEN, Half.ODD))
    return ExpertNames("mlp.router", gate, up, tensor("down_proj"))


GPT_OSS = Family(
    ("GptOssForCausalLM",),
    _spec,
    Names(experts=_experts(packed=False)),
    layouts=(lambda names: replace(names, experts=_experts(packed=True)),),
    quantised=("mxfp4",),
)
