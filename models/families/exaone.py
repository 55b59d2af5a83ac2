"""EXAONE 3 and 3.5: Llama under other names. 4: norms behind, and of heads."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import (
    NAMES_BEHIND,
    Family,
    gated_decoder,
    norms_behind,
    windows_but_every,
    without_rope,
)
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _exaone3(fields: Fields, served: int | None) -> ModelSpec:
    renamed = fields.defaulting(
        num_hidden_layers=fields.integer(fields.first("num_hidden_layers", "num_layers"))
    )
    norm = Norm("rms", fields.real("layer_norm_epsilon", 1e-5))
    return gated_decoder(renamed, served, norm=norm, activation=("activation_function", "silu"))


def _exaone4(fields: Fields, served: int | None) -> ModelSpec:
    """Where some layers have a window, the others have no positions."""
    spec = norms_behind(gated_decoder(fields, served, windows=_windows, qk_norm=True))
    if fields.optional_integer("sliding_window", 4096) is None:
        return spec
    return without_rope(spec, (i for i, window in enumerate(spec.kv_windows) if window is None))


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return windows_but_every(fields, layers, every=4)


EXAONE3 = Family(
    ("ExaoneForCausalLM",),
    _exaone3,
    Names(
        embedding="wte",
        norm="ln_f",
        layer="h.{i}.",
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        output="attn.attention.out_proj",
        attention_in="ln_1",
        mlp_in="ln_2",
        up=("mlp.c_fc_0", "mlp.c_fc_1"),
        down="mlp.c_proj",
        surplus=(".rotary.inv_freq",),
    ),
    prefixes=("transformer.", ""),
)
EXAONE4 = Family(("Exaone4ForCausalLM",), _exaone4, NAMES_BEHIND)
