"""Mamba-2 (also Codestral Mamba): state spaces alone, with no keys and values.

The stream has the model's type, whatever `residual_in_fp32` says. Models whose steps have bounds
are computed by transformers.
"""

from __future__ import annotations

from tokenpod.kernels.operations.recurrent_ops import MemoryShape
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, Sizes, model_spec
from tokenpod.models.families.spaces import NO_LIMITS, unlimited
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.state_space import StateSpace
from tokenpod.models.specs.layer_spec import LayerSpec, Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names, SpaceNames

#: A text may be of any length, and its states are as large: what is served where nothing says.
_POSITIONS = 1 << 18


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields.only("hidden_act", "silu")
    fields.flag("residual_in_fp32", True)
    unlimited(fields)
    hidden = fields.integer("hidden_size", 4096, most=1 << 20)
    heads = fields.integer("num_heads", 128, most=1 << 12)
    groups = fields.integer("n_groups", 8, most=heads)
    head_dim = fields.integer("head_dim", 64, most=1 << 12)
    shape = MemoryShape(
        groups,
        heads,
        fields.integer("state_size", 128, most=1 << 12),
        head_dim,
        fields.integer("conv_kernel", 4, most=64),
    )
    width = fields.integer("expand", 2, most=64) * hidden
    if shape.values != width:
        raise ModelError(
            f"{fields.source}: num_heads is {heads}, head_dim {head_dim}: their product is not"
            f" {width}"
        )
    norm = Norm("rms", fields.real("layer_norm_epsilon", 1e-5))
    space = StateSpace(
        shape,
        norm.epsilon,
        groups,
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
    )
    count = fields.integer("num_hidden_layers", 64, most=1 << 12)
    return model_spec(
        fields,
        Sizes(hidden, count, heads, groups, head_dim),
        tied=False,
        max_positions=fields.integer("max_position_embeddings", served or _POSITIONS),
        layers=(LayerSpec(space, None, Norms(attention_in=norm)),) * count,
        norm=norm,
    )


MAMBA2 = Family(
    ("Mamba2ForCausalLM",),
    _spec,
    Names(
        embedding="embeddings",
        norm="norm_f",
        attention_in="norm",
        space=SpaceNames(
            "mixer.in_proj",
            "mixer.conv1d",
            "mixer.A_log",
            "mixer.dt_bias",
            "mixer.D",
            "mixer.norm",
            "mixer.out_proj",
        ),
    ),
    prefixes=("backbone.", "model."),
    takes=lambda fields: fields.values.get("time_step_limit", NO_LIMITS[0]) in NO_LIMITS,
)
