"""What families whose feed-forward blocks are mixtures of experts have in common."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.ops import Routing
from tokenpod.models.config import DecoderConfig, Experts
from tokenpod.models.families.family import attention_weights, dense_weights, outer_weights
from tokenpod.models.fields import Fields
from tokenpod.models.weights import Dim, Source, Split, Weight

#: More than any model has; a config that is not trusted can't ask for millions of tensors.
MOST_EXPERTS = 1 << 10


def experts_of(
    fields: Fields, *, intermediate_size: int, normalised: bool, layers: frozenset[int]
) -> Experts:
    """A description from the field names that these families share.

    The number of experts has two names: transformers renamed it, and old files stay as they are.
    """
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    count = fields.integer(name, most=MOST_EXPERTS)
    per_token = fields.integer("num_experts_per_tok", most=count)
    return Experts(count, intermediate_size, Routing(per_token, normalised), layers)


def expert_weights(
    config: DecoderConfig, *, block: str, gate: str, up: str, down: str
) -> tuple[Weight, ...]:
    """The tensors of a model in which some layers' blocks are sparse, the others dense.

    `block` is the sparse block's name in the checkpoint; `gate`, `up` and `down` are an expert's
    products.
    """
    experts = config.experts
    assert experts is not None
    inward, outward = (Dim.EXPERT_INTERMEDIATE, Dim.HIDDEN), (Dim.HIDDEN, Dim.EXPERT_INTERMEDIATE)
    expert = f"{block}.experts.{{e}}"
    sparse = (
        Weight(
            "{i}.experts.router",
            (Source(f"{block}.gate.weight", (Dim.EXPERTS, Dim.HIDDEN)),),
        ),
        Weight(
            "{i}.experts.gate_up",
            (Source(f"{expert}.{gate}.weight", inward), Source(f"{expert}.{up}.weight", inward)),
            Split.OUTPUT,
            experts=experts.count,
        ),
        Weight(
            "{i}.experts.down",
            (Source(f"{expert}.{down}.weight", outward),),
            Split.INPUT,
            experts=experts.count,
        ),
    )
    dense_layers = frozenset(range(config.layers)) - experts.layers
    return (
        *outer_weights(config),
        *attention_weights(config),
        *(replace(weight, layers=dense_layers) for weight in dense_weights(config)),
        *(replace(weight, layers=experts.layers) for weight in sparse),
    )
