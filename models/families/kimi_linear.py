"""Kimi Linear: delta nets whose keys' numbers decay apart, latent rows without positions, experts.

As data of the same mixers as Qwen3.5's and DeepSeek V3's (Kimi Team, "Kimi Linear", 2025).
"""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.recurrent_ops import MemoryShape
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.deepseek import latent_decoder, with_v3_experts
from tokenpod.models.families.family import Family
from tokenpod.models.families.qwen3_5 import kinds_of
from tokenpod.models.layers.gated_delta import GatedDeltaNet
from tokenpod.models.layers.latent import Latent
from tokenpod.models.layers.mixer import Mixer
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import DeltaNames, Names, experts_apart

#: This family's names of what DeepSeek V3's configs have, and what it is by default.
_FIELDS = {
    "max_position_embeddings": ("model_max_length", 1 << 20),
    "norm_topk_prob": ("moe_renormalize", True),
    "n_group": ("num_expert_group", 1),
    "topk_group": ("topk_group", 1),
    "num_local_experts": ("num_experts", 256),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "n_shared_experts": ("num_shared_experts", 1),
    "moe_intermediate_size": ("moe_intermediate_size", 1024),
    "routed_scaling_factor": ("routed_scaling_factor", 2.446),
    "rms_norm_eps": ("rms_norm_eps", 1e-5),
}


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields.only("mla_use_nope", True)
    fields.only("moe_router_activation_func", "sigmoid")
    fields.only("hidden_act", "silu")
    fields.only("tie_word_embeddings", False)
    known = {
        name: fields.values[field] if field in fields else default
        for name, (field, default) in _FIELDS.items()
    }
    # No head is of this size. Queries are made of the stream unless a config says otherwise.
    fields.integer("head_dim", 72)
    rank = fields.values.get("q_lora_rank")
    fields = fields.replacing(**known, head_dim=None, q_lora_rank=rank)
    spec = latent_decoder(fields, served, interleaved=False)
    own = fields.fields("linear_attn_config") if "linear_attn_config" in fields else None
    net, kinds = _net(fields, own), _kinds(fields, own, len(spec.layers))

    def mixer(kind: str, latent: Mixer | None) -> Mixer:
        assert isinstance(latent, Latent)
        return net if kind == "linear_attention" else replace(latent, positions=None)

    layers = zip(kinds, spec.layers, strict=True)
    spec = replace(
        spec, layers=tuple(replace(own, mixer=mixer(kind, own.mixer)) for kind, own in layers)
    )
    return with_v3_experts(spec, fields, dense=1)


def _net(fields: Fields, own: Fields | None) -> GatedDeltaNet:
    """As published, in an object of its own, or as transformers writes it."""
    names = ("head_dim", "num_heads", "short_conv_kernel_size")
    if own is None:
        own, names = fields, ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    dim = own.integer(names[0], 128, most=1 << 12)
    heads = own.integer(names[1], 32, most=1 << 12)
    shape = MemoryShape(heads, heads, dim, dim, own.integer(names[2], 4, most=64))
    return GatedDeltaNet(shape, fields.real("rms_norm_eps"), gate_rank=dim)


def _kinds(fields: Fields, own: Fields | None, layers: int) -> tuple[str, ...]:
    """Of each layer; published configs number them from 1 on."""
    if own is None or "kda_layers" not in own:
        # Of all but the first, every fourth.
        default = [
            "full_attention" if i and not i % 4 else "linear_attention" for i in range(layers)
        ]
        return kinds_of(fields.defaulting(layer_types=default), layers)
    nets, attention = own.indices("kda_layers"), own.indices("full_attn_layers")
    if nets & attention or nets | attention != {*range(1, layers + 1)}:
        raise ModelError(
            f"{own.source}: kda_layers and full_attn_layers must name each of {layers} layers once,"
            " from 1 on"
        )
    return tuple("linear_attention" if i + 1 in nets else "full_attention" for i in range(layers))


_BLOCK = "block_sparse_moe"
_NAMES = Names(
    experts=experts_apart(
        f"{_BLOCK}.gate",
        f"{_BLOCK}.experts.{{e}}",
        "w1",
        "w3",
        "w2",
        correction=f"{_BLOCK}.gate.e_score_correction_bias",
        shared_up=(f"{_BLOCK}.shared_experts.gate_proj", f"{_BLOCK}.shared_experts.up_proj"),
        shared_down=f"{_BLOCK}.shared_experts.down_proj",
    ),
    delta=DeltaNames(
        gate="self_attn.g_b_proj",
        write="self_attn.b_proj",
        decay="self_attn.f_b_proj",
        log_rate="self_attn.A_log",
        shift="self_attn.dt_bias",
        norm="self_attn.o_norm",
        output="self_attn.o_proj",
        gate_rank="self_attn.g_a_proj",
        decay_rank="self_attn.f_a_proj",
        apart=("self_attn.q", "self_attn.k", "self_attn.v"),
    ),
)


def _as_written(names: Names) -> Names:
    """The layout of transformers, which names dense blocks as it does those of experts."""
    up = (f"{_BLOCK}.gate_proj", f"{_BLOCK}.up_proj")
    return replace(names, up=up, down=f"{_BLOCK}.down_proj")


KIMI_LINEAR = Family(("KimiLinearForCausalLM",), _spec, _NAMES, layouts=(_as_written,))
