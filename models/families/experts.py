"""What families whose feed-forward blocks are mixtures of experts have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from tokenpod.kernels.operations.expert_ops import Routing, Score
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.specs.layer_spec import Experts, Mlp
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import ExpertNames, Names, experts_apart

#: More than any model has; a config that is not trusted can't ask for millions of tensors.
MOST_EXPERTS = 1 << 10
MOST_FEATURES = 1 << 24


def experts_of(
    fields: Fields,
    spec: ModelSpec,
    routing: Routing,
    *,
    width: str | None = "moe_intermediate_size",
    count: tuple[str, ...] = ("num_local_experts", "num_experts"),
    chosen: str = "num_experts_per_tok",
) -> Experts:
    """Mixtures with `routing`, by the names of their fields.

    The number of experts has two names: transformers renamed it, and old files stay as they are.
    `width` None: that of the dense blocks.
    """
    dense = spec.layers[0].mlp
    assert isinstance(dense, Mlp)
    experts = fields.integer(fields.first(*count), most=MOST_EXPERTS)
    return Experts(
        experts,
        dense.width if width is None else fields.integer(width, most=MOST_FEATURES),
        dense.activation,
        routing._replace(per_token=fields.integer(chosen, most=experts)),
    )


def with_experts(
    spec: ModelSpec, experts: Experts, layers: Collection[int] | None = None
) -> ModelSpec:
    """The same with mixtures of experts in `layers`, or in all."""
    return replace(
        spec,
        layers=tuple(
            replace(layer, mlp=experts) if layers is None or i in layers else layer
            for i, layer in enumerate(spec.layers)
        ),
    )


def softmax_routing(*, normalised: bool) -> Routing:
    """As in Mixtral; how many experts a token has is not said yet."""
    return Routing(1, normalised)


def sigmoid_routing(fields: Fields) -> Routing:
    """As in DeepSeek V3: sigmoids, groups by their two best, a correction of the choice."""
    return Routing(
        1,
        fields.flag("norm_topk_prob", True),
        Score.SIGMOID,
        groups=fields.integer("n_group", 1),
        chosen_groups=fields.integer("topk_group", 1),
        group_best=2,
        scale=fields.real("routed_scaling_factor", 1.0),
        least_sum=1e-20,
    )


def shared_of(experts: Experts, width: int, *, bias: bool = False) -> Mlp:
    """A block for every token, of the experts' kind."""
    return Mlp(width, experts.activation, gated=True, up_bias=bias, down_bias=bias)


def every(fields: Fields, layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer, but for those that are said to be dense."""
    step = fields.integer("decoder_sparse_step", 1)
    return frozenset(range(step - 1, layers, step)) - fields.indices("mlp_only_layers")


def sparse_layers(fields: Fields, layers: int, *, dense: int) -> Collection[int]:
    """As `mlp_layer_types` says; without it, all but the first `first_k_dense_replace` layers."""
    if "mlp_layer_types" not in fields:
        return range(fields.count("first_k_dense_replace", dense), layers)
    types = fields.texts("mlp_layer_types")
    if len(types) != layers or not {*types} <= {"dense", "sparse"}:
        raise ModelError(
            f"{fields.source}: mlp_layer_types must name dense or sparse for each of {layers} "
            "layers"
        )
    return frozenset(i for i, kind in enumerate(types) if kind == "sparse")


def gate_names(
    *,
    shared: str = "shared_experts",
    correction: str = "mlp.gate.e_score_correction_bias",
    correction_rows: bool = False,
) -> ExpertNames:
    """As Qwen's, with tensors apart."""
    return experts_apart(
        "mlp.gate",
        "mlp.experts.{e}",
        "gate_proj",
        "up_proj",
        "down_proj",
        correction=correction,
        correction_rows=correction_rows,
        shared_up=(f"mlp.{shared}.gate_proj", f"mlp.{shared}.up_proj"),
        shared_down=f"mlp.{shared}.down_proj",
        shared_gate=f"mlp.{shared}_gate",
    )


def stacked(
    block: str = "mlp", *, transposed: bool = False, **other: Any
) -> Callable[[Names], Names]:
    """The layout in which transformers holds experts since its version 5, with `other` names.

    `transposed`: [in, out], as Qwen 3 VL is published.
    """

    def layout(names: Names) -> Names:
        assert names.experts is not None
        experts = names.experts.stacked(
            f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj", **other
        )
        if transposed:
            experts = experts.transposed()
        return replace(names, experts=experts)

    return layout
