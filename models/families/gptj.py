"""GPT-J: parallel branches behind one norm, neighbours of a head's first dimensions rotated."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import ACTIVATIONS, Family, model_spec, plain_mlp, sizes_of
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.rope import rope_of
from tokenpod.models.specs.layer_spec import SAME, Join, LayerSpec, Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    sizes = sizes_of(fields, hidden="n_embd", layers="n_layer", heads="n_head")
    max_positions = fields.integer("n_positions")
    rotated = fields.integer("rotary_dim", 64, most=sizes.head_dim)
    rope = rope_of(
        fields,
        sizes.head_dim,
        max_positions,
        served=served,
        factor=rotated / sizes.head_dim,
        interleaved=True,
    )
    norm = Norm("layer", fields.real("layer_norm_epsilon", 1e-5), bias=True)
    layer = LayerSpec(
        sizes.attention(rope, bias=False),
        plain_mlp(
            fields.integer("n_inner", 4 * sizes.hidden, most=1 << 24),
            fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
            bias=True,
        ),
        Norms(attention_in=norm, mlp_in=SAME),
        Join.PARALLEL,
    )
    layers = (layer,) * sizes.layers
    spec = model_spec(
        fields, sizes, tied=False, max_positions=max_positions, layers=layers, norm=norm
    )
    return replace(spec, head=replace(spec.head, bias=True))


GPTJ = Family(
    ("GPTJForCausalLM",),
    _spec,
    Names(
        embedding="wte",
        norm="ln_f",
        layer="h.{i}.",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        attention_in="ln_1",
        up=("mlp.fc_in",),
        down="mlp.fc_out",
        surplus=(".attn.bias", ".attn.masked_bias"),
    ),
    prefixes=("transformer.", ""),
)
