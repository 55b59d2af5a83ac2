"""What mixers that keep states, not keys and values of tokens, have in common."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenpod.kernels.cache.state_pool import StatePool
from tokenpod.kernels.operations.batch import CHUNKS, ForwardBatch, TileKind
from tokenpod.kernels.operations.ops import Operations
from tokenpod.kernels.operations.recurrent_ops import RecurrentPlan, RecurrentStates
from tokenpod.models.layers.layer_tensors import LayerTensors
from tokenpod.models.layers.step import Step


class RecurrentMixer:
    """Base of `Mixer`s whose layers share one plan of a step's rows, cut into chunks."""

    __slots__ = ()

    @property
    def reads_layer(self) -> None:
        """Each layer has its own states."""

    @property
    def turned(self) -> None:
        """Positions change nothing."""

    @property
    def expansion(self) -> None:
        """Nothing is made of the cache."""

    def idle_names(self, tensors: LayerTensors) -> tuple[str, ...]:
        """There are none."""
        del tensors
        return ()

    @property
    def plan_key(self) -> Hashable:
        """One plan for all layers with states."""
        return CHUNKS

    def plan(self, ops: Operations, batch: ForwardBatch) -> RecurrentPlan:
        """The step's rows, and what their chunks are."""
        return ops.plan_recurrent(batch)

    def captured(self, dtype: torch.dtype, device: torch.device) -> TileKind:
        """Rows of several tokens are walked along in chunks."""
        del dtype, device
        return CHUNKS


def states_of(step: Step, cache: int) -> tuple[RecurrentStates, RecurrentPlan]:
    """The states of a layer, by its place in the pool, and what a step's rows do with them."""
    pool = step.pool
    assert isinstance(pool, StatePool)
    return RecurrentStates(*pool.states[cache]), step.plan(CHUNKS, RecurrentPlan)
