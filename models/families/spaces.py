"""What families with state spaces have in common (Granite 4, Bamba, Falcon-H1)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tokenpod.kernels.operations.recurrent_ops import MemoryShape
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layers.state_space import StateSpace
from tokenpod.models.specs.spec import ModelSpec

_MOST_HEADS, _MOST_NUMBERS = 1 << 12, 1 << 12
#: What names of kinds of layers have been, by what they are.
SPACE, ATTENTION = {"mamba", "linear_attention"}, {"attention", "full_attention"}


def mamba_of(fields: Fields, hidden: int, epsilon: float | None, **more: Any) -> StateSpace:
    """By the names of fields that begin with mamba_; `more` is for `StateSpace`."""
    fields.only("hidden_act", "silu")
    unlimited(fields)
    heads = fields.integer("mamba_n_heads", 128, most=_MOST_HEADS)
    width = fields.integer("mamba_expand", 2, most=64) * hidden
    if "mamba_d_ssm" in fields:
        width = fields.integer("mamba_d_ssm", most=_MOST_HEADS * _MOST_NUMBERS)
    named = fields.values.get("mamba_d_head", "auto")
    head = width // heads if named == "auto" else fields.integer("mamba_d_head", most=_MOST_NUMBERS)
    if head * heads != width:
        raise ModelError(
            f"{fields.source}: mamba_n_heads is {heads}, mamba_d_head {named}: their product is not"
            f" {width}"
        )
    groups = fields.integer("mamba_n_groups", 1, most=heads)
    keys = fields.integer("mamba_d_state", 256, most=_MOST_NUMBERS)
    return StateSpace(
        MemoryShape(groups, heads, keys, head, fields.integer("mamba_d_conv", 4, most=64)),
        epsilon,
        groups if epsilon is not None else 1,
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
        **more,
    )


#: `time_step_limit` that is none.
NO_LIMITS = tuple([0, most] for most in (math.inf, {"__float__": "Infinity"}))


def unlimited(fields: Fields) -> None:
    """Raise ModelError where the length of a token's step is limited."""
    fields.only("time_step_limit", *NO_LIMITS)


def with_spaces(spec: ModelSpec, space: StateSpace, layers: Collection[int]) -> ModelSpec:
    """The same with state spaces in place of attention in these layers."""
    return replace(
        spec,
        layers=tuple(
            replace(layer, mixer=space) if i in layers else layer
            for i, layer in enumerate(spec.layers)
        ),
    )


def spaces_in(fields: Fields, name: str, layers: int) -> Collection[int]:
    """The layers with state spaces, by the kinds of all in the field `name`; by default all."""
    if name not in fields:
        return range(layers)
    kinds = fields.texts(name)
    if len(kinds) != layers or not {*kinds} <= SPACE | ATTENTION:
        raise ModelError(
            f"{fields.source}: {name} must name {', '.join(sorted(SPACE | ATTENTION))} for each of"
            f" {layers} layers"
        )
    return frozenset(i for i, kind in enumerate(kinds) if kind in SPACE)
