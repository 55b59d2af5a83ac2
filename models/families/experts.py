"""What families whose feed-forward blocks are mixtures of experts have in common."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.ops import Routing
from tokenpod.models.fields import Fields
from tokenpod.models.spec import Experts, Mlp, ModelSpec

#: More than any model has; a config that is not trusted can't ask for millions of tensors.
MOST_EXPERTS = 1 << 10


def with_experts(
    spec: ModelSpec,
    fields: Fields,
    *,
    width: int | None,
    normalised: bool,
    layers: frozenset[int] | None = None,
) -> ModelSpec:
    """The same with mixtures of experts of `width` (None: the dense blocks') in `layers` (all).

    The number of experts has two names: transformers renamed it, and old files stay as they are.
    """
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    count = fields.integer(name, most=MOST_EXPERTS)
    per_token = fields.integer("num_experts_per_tok", most=count)
    dense = spec.layers[0].mlp
    assert isinstance(dense, Mlp)
    experts = Experts(count, width or dense.width, dense.activation, Routing(per_token, normalised))
    sparse = frozenset(range(len(spec.layers))) if layers is None else layers
    return replace(
        spec,
        layers=tuple(
            replace(layer, mlp=experts) if i in sparse else layer
            for i, layer in enumerate(spec.layers)
        ),
    )
