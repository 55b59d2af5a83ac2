"""The golden checkpoints, by name: of every family, with every setting that it reads."""

from support.checkpoints.golden_kinds import dense, experts, gated, images, mixtures, plain
from support.checkpoints.golden_kinds.base import BASES, MAX_POSITIONS, SMALL, VOCABULARY, Kind
from support.checkpoints.golden_kinds.nested import NESTED_KINDS
from support.checkpoints.golden_kinds.tier import PADDED_KINDS, TIER_KINDS

KINDS: dict[str, Kind] = {
    **dense.KINDS,
    **gated.KINDS,
    **plain.KINDS,
    **images.KINDS,
    **experts.KINDS,
    **mixtures.KINDS,
}

PREFIX_KINDS = images.PREFIX_KINDS

__all__ = [
    "BASES",
    "KINDS",
    "MAX_POSITIONS",
    "NESTED_KINDS",
    "PADDED_KINDS",
    "PREFIX_KINDS",
    "SMALL",
    "TIER_KINDS",
    "VOCABULARY",
    "Kind",
]
