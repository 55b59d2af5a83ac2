"""What the layers of a model are given of a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import Rotation
from tokenpod.kernels.operations.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Step:
    """A step's tokens, and what all layers share of it."""

    batch: ForwardBatch
    pool: KVPool
    #: What mixers found out about the step, each kind under the key that it names.
    plans: Mapping[Hashable, Any]
    #: By the number of the rotation.
    rotations: list[Rotation]
    #: The batch as layers with a window have it.
    windows: ForwardBatch
    #: [T, layers, width]: what each layer reads of its own embeddings; None: there are none.
    per_layer: torch.Tensor | None = None
