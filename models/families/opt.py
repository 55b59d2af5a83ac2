"""OPT: learned positions. The 350m layout norms sums, and projects a narrower embedding."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import ACTIVATIONS, Family, model_spec, plain_mlp, sizes_of
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.layer_spec import Join, LayerSpec, Norms
from tokenpod.models.specs.spec import Embedding, ModelSpec, Positions
from tokenpod.models.weights.names import Names

#: The table's first rows are no positions.
OFFSET = 2


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    sizes = sizes_of(fields)
    bias, affine = (fields.flag(f, True) for f in ("enable_bias", "layer_norm_elementwise_affine"))
    norm = Norm("layer", 1e-5, weight=affine, bias=affine)
    before = fields.flag("do_layer_norm_before", True)
    max_positions = fields.integer("max_position_embeddings")
    positions = Positions(max_positions + OFFSET, OFFSET)
    width = fields.integer("word_embed_proj_dim", sizes.hidden, most=1 << 20)
    activation = fields.choice("activation_function", ACTIVATIONS, "relu")
    layer = LayerSpec(
        sizes.attention(None, bias=bias),
        plain_mlp(fields.integer("ffn_dim", most=1 << 24), activation, bias=bias),
        Norms(attention_in=norm, mlp_in=norm) if before else Norms(None, norm, None, norm),
        Join.SEQUENTIAL if before else Join.POST_NORM,
    )
    return model_spec(
        fields,
        sizes,
        tied=True,
        max_positions=max_positions,
        layers=(layer,) * sizes.layers,
        norm=norm if before and not fields.flag("_remove_final_layer_norm", False) else None,
        embedding=Embedding(width=None if width == sizes.hidden else width, positions=positions),
    )


OPT = Family(
    ("OPTForCausalLM",),
    _spec,
    Names(
        positions="embed_positions",
        project_in="project_in",
        project_out="project_out",
        norm="final_layer_norm",
        output="self_attn.out_proj",
        attention_in="self_attn_layer_norm",
        attention_out="self_attn_layer_norm",
        mlp_in="final_layer_norm",
        mlp_out="final_layer_norm",
        up=("fc1",),
        down="fc2",
    ),
    prefixes=("model.decoder.", "decoder."),
)
