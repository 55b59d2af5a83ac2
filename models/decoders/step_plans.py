"""What the layers of a model share of a step: plans of mixers, and rotations, once each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.layers.mixer import Mixer, Turned
from tokenpod.models.layers.positions import Rope
from tokenpod.models.layers.rope import pair_axes, pair_frequencies
from tokenpod.models.layers.step import Step


class StepPlans:
    """Makes the `Step` of each batch.

    Args:
        mixers: of a rank's layers.
        ops: of the device.
        dtype: of activations.
        device: where they are.
    """

    def __init__(
        self, mixers: Sequence[Mixer], ops: Operations, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ops, self._dtype, self._device = ops, dtype, device
        #: One of each kind that plans steps alike.
        self._planners = {mixer.plan_key: mixer for mixer in mixers}
        self._numbers: dict[Turned, int] = {}
        for turned in (mixer.turned for mixer in mixers):
            if turned is not None:
                self._numbers.setdefault(_of_ropes(turned), len(self._numbers))
        self._rotations = [
            (
                pair_frequencies(each.positions, each.dim).to(device),
                each.positions.scale if isinstance(each.positions, Rope) else 1.0,
                None if (axes := pair_axes(each.positions, each.dim)) is None else axes.to(device),
            )
            for each in self._numbers
        ]

    def rotation(self, mixers: Sequence[Mixer]) -> int:
        """Which of a step's rotations turns a layer's mixers; 0 if none does."""
        turned = (mixer.turned for mixer in mixers)
        found = (self._numbers[_of_ropes(each)] for each in turned if each is not None)
        return next(found, 0)

    def step(
        self, batch: ForwardBatch, pool: KVPool, per_layer: torch.Tensor | None = None
    ) -> Step:
        """What all layers share of this batch, and their own embeddings if there are any."""
        ops = self._ops
        # Where the pool has no slots for windows, it is that of a draft model beside one that has.
        windows = batch.in_windows if pool.window_slots else batch
        plans = {
            key: mixer.plan(ops, batch if mixer.cache.window is None else windows)
            for key, mixer in self._planners.items()
        }
        rotations = [
            ops.rotate(batch.t_position, frequencies, scale, self._dtype, axes)
            for frequencies, scale, axes in self._rotations
        ]
        return Step(batch, pool, plans, rotations, windows, per_layer)

    def tiles(self, rows: int, *, texts: bool = False) -> StepTiles:
        """How captured steps of up to so many rows describe rows with several tokens.

        `texts`: none of them ever decodes.
        """
        assert self._ops.prepare_capture is not None, "these operations are not captured"
        mixers = self._planners.values()
        shapes = [mixer.captured(self._dtype, self._device) for mixer in mixers]
        found = [shape for shape in shapes if shape is not None]
        return self._ops.prepare_capture(found, rows, texts=texts)


def _of_ropes(turned: Turned) -> Turned:
    """Whatever else positions are, they turn nothing."""
    return turned if isinstance(turned.positions, Rope) else Turned(None, turned.dim)
