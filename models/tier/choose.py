"""How transformers computes a model: over our pool, or with a cache of its own."""

from __future__ import annotations

from typing import Protocol

import torch

from tokenpod.core.own_state import OwnState
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.checkpoints.nested import Nesting
from tokenpod.models.layers.reading import Progress
from tokenpod.models.tier.errors import NotCausal, NotServed
from tokenpod.models.tier.load import TierLoader
from tokenpod.models.tier.model import TransformersModel
from tokenpod.models.tier.padded_load import PaddedLoader
from tokenpod.models.tier.spec import TierSpec


class Loader(Protocol):
    """One config.json's model."""

    #: config.json.
    fields: Fields
    #: In all weights.
    numbers: int
    spec: TierSpec

    def state_of(self, dtype: torch.dtype) -> OwnState | None:
        """What it keeps of sequences by itself, with numbers of this type; None: nothing.

        Raises NotServed if that shows only once it is loaded.
        """
        ...

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Operations,
        progress: Progress,
    ) -> TransformersModel:
        """The model, checked; see `TierLoader.load`."""
        ...


def loader_of(
    architecture: str,
    fields: Fields,
    nesting: Nesting | None = None,
    *,
    dtype: torch.dtype | None,
    eos_token_ids: frozenset[int],
    served: int | None,
) -> Loader:
    """Over our pool if the class leaves attention to us, else with its own cache.

    Arguments as `TierLoader` has them. Raises NotServed if neither can be.
    """
    try:
        return TierLoader(
            architecture, fields, nesting, dtype=dtype, eos_token_ids=eos_token_ids, served=served
        )
    except NotCausal:
        raise
    except NotServed as reason:
        first = reason
    try:
        return PaddedLoader(
            architecture, fields, nesting, dtype=dtype, eos_token_ids=eos_token_ids, served=served
        )
    except NotServed as second:
        same = str(second) == str(first)
        raise NotServed(str(first) if same else f"{first}; with its own cache: {second}") from None
