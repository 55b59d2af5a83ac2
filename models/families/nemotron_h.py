"""Nemotron-H: each layer is a state space, attention without positions, or a block without gates.

That block may be a mixture of experts (Nemotron 3), which may be narrower than the stream (Super).
Not read is the least length of a step: transformers 5 has it in prompts, not in what follows them.
"""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.recurrent_ops import MemoryShape
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import MOST_FEATURES, experts_of, sigmoid_routing
from tokenpod.models.families.family import Family, gated_decoder, plain_mlp, without_rope
from tokenpod.models.families.spaces import ATTENTION, SPACE, unlimited
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.state_space import StateSpace
from tokenpod.models.specs.layer_spec import Experts, LayerSpec, Mlp, Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import ExpertTensor, Names, SpaceNames, experts_apart

#: Of older files, which have a letter for each layer.
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KINDS = SPACE | ATTENTION | {"mlp", "moe"}


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Of each layer."""
    name = fields.first("layers_block_type", "layer_types", "hybrid_override_pattern")
    if name == "hybrid_override_pattern":
        letters = fields.text(name)
        kinds = tuple(_LETTERS.get(letter, letter) for letter in letters)
    else:
        kinds = fields.texts(name)
    if not kinds or not {*kinds} <= _KINDS:
        raise ModelError(
            f"{fields.source}: {name} must name {', '.join(sorted(_KINDS))}, or their letters"
        )
    return kinds


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    kinds = _kinds(fields)
    if "attention_head_dim" in fields:
        fields = fields.defaulting(head_dim=fields.integer("attention_head_dim", most=1 << 12))
    fields = fields.replacing(num_hidden_layers=len(kinds)).defaulting(
        num_key_value_heads=8, intermediate_size=21_504, max_position_embeddings=4096
    )
    # transformers has a head of its own there, whatever the config says.
    fields.only("tie_word_embeddings", False)
    fields.only("residual_in_fp32", False)
    fields.only("mamba_proj_bias", False)
    fields.only("sliding_window")
    norm = Norm("rms", fields.real("layer_norm_epsilon", 1e-5))
    fields.only("attention_bias", False)
    spec = gated_decoder(
        fields,
        served,
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=128,
        activation=("mlp_hidden_act", "relu2"),
        norm=norm,
        gated=False,
    )
    spec = without_rope(spec, range(len(kinds)))
    space = _space(fields, norm.epsilon)
    experts = _experts(fields, spec) if "moe" in kinds else None

    def layer(own: LayerSpec, kind: str) -> LayerSpec:
        if kind in ("mlp", "moe"):
            block = own.mlp if kind == "mlp" else experts
            return replace(own, mixer=None, mlp=block, norms=Norms(mlp_in=norm))
        mixer = own.mixer if kind in ATTENTION else space
        return replace(own, mixer=mixer, mlp=None, norms=Norms(attention_in=norm))

    layers = zip(spec.layers, kinds, strict=True)
    return replace(spec, layers=tuple(layer(*each) for each in layers))


def _experts(fields: Fields, spec: ModelSpec) -> Experts:
    experts = experts_of(fields, spec, sigmoid_routing(fields), count=("n_routed_experts",))
    dense = spec.layers[0].mlp
    assert isinstance(dense, Mlp)
    fields.only("n_shared_experts", 1)
    inner = fields.optional_integer("moe_latent_size", None)
    if inner is not None:
        fields.only("mlp_bias", False)
    shared = fields.integer("moe_shared_expert_intermediate_size", 7688, most=MOST_FEATURES)
    return replace(
        experts,
        correction=True,
        gated=False,
        inner=inner,
        shared=plain_mlp(shared, dense.activation, bias=dense.up_bias),
    )


def _space(fields: Fields, epsilon: float) -> StateSpace:
    fields.only("mamba_hidden_act", "silu")
    unlimited(fields)
    heads = fields.integer("mamba_num_heads", 128, most=1 << 12)
    groups = fields.integer("n_groups", 8, most=heads)
    shape = MemoryShape(
        groups,
        heads,
        fields.integer("ssm_state_size", 128, most=1 << 12),
        fields.integer("mamba_head_dim", 64, most=1 << 12),
        fields.integer("conv_kernel", 4, most=64),
    )
    return StateSpace(
        shape,
        epsilon,
        groups,
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
    )


def _stacked(names: Names) -> Names:
    """The layout in which transformers holds experts since its version 5."""
    assert names.experts is not None
    up, down = (ExpertTensor(f"mixer.experts.{part}_proj") for part in ("up", "down"))
    return replace(names, experts=replace(names.experts, up=up, down=down))


NEMOTRON_H = Family(
    ("NemotronHForCausalLM",),
    _spec,
    Names(
        embedding="embeddings",
        norm="norm_f",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        attention_in="norm",
        mlp_in="norm",
        up=("mixer.up_proj",),
        down="mixer.down_proj",
        space=SpaceNames(
            "mixer.in_proj",
            "mixer.conv1d",
            "mixer.A_log",
            "mixer.dt_bias",
            "mixer.D",
            "mixer.norm",
            "mixer.out_proj",
        ),
        experts=experts_apart(
            "mixer.gate",
            "mixer.experts.{e}",
            "",
            "up_proj",
            "down_proj",
            correction="mixer.gate.e_score_correction_bias",
            shared_up=("mixer.shared_experts.up_proj",),
            shared_down="mixer.shared_experts.down_proj",
            inner_in="mixer.fc1_latent_proj",
            inner_out="mixer.fc2_latent_proj",
        ),
        beside=("mtp.",),
    ),
    prefixes=("backbone.", "model."),
    layouts=(_stacked,),
)
