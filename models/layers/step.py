"""What the layers of a model are given of a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import Rotation
from tokenpod.kernels.operations.batch import ForwardBatch, MixerPlan

P = TypeVar("P", bound=MixerPlan)


@dataclass(frozen=True, slots=True)
class Step:
    """A step's tokens, and what all layers share of it."""

    batch: ForwardBatch
    pool: KVPool
    #: What mixers found out about the step, each kind under the key that it names.
    plans: Mapping[Hashable, MixerPlan]
    #: By the number of the rotation.
    rotations: list[Rotation]
    #: The batch as layers with a window have it.
    windows: ForwardBatch
    #: [T, layers, width]: what each layer reads of its own embeddings; None: there are none.
    per_layer: torch.Tensor | None = None

    def plan(self, key: Hashable, kind: type[P]) -> P:
        """What mixers of this key found out, which their operation takes as a plan of its kind."""
        found = self.plans[key]
        assert isinstance(found, kind), f"{key} planned {type(found).__name__}, not {kind.__name__}"
        return found
