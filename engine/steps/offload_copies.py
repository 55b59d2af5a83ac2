"""Copies between the KV pool and the host's memory, as plans say.

Here they are made at once, as a CPU does. On a GPU (`device_copies`) they run beside the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenpod.core.plan import StepPlan
from tokenpod.engine.steps.drafter import Drafter
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.cache.offload_pool import OffloadPool, read_slots, write_slots


class OffloadCopies:
    """Makes a plan's copies.

    Args:
        pools: keys and values, of the draft model too if there is one; their slots have the first
            numbers.
        offload: holds the slots behind the pool's sink.
    """

    def __init__(self, pools: Sequence[KVPool], offload: OffloadPool) -> None:
        self._offload = offload
        self._take(pools)

    def use(self, pools: Sequence[KVPool]) -> None:
        """Keep keys and values there from now on."""
        self._take(pools)

    def _take(self, pools: Sequence[KVPool]) -> None:
        self._pools = pools
        self._stored = [tensor for pool in pools for tensor in pool.stored]

    def begin(self, plan: StepPlan) -> None:
        """Make the copies of a plan, before anything else of it."""
        source, target = plan.copy_from.astype(np.int64), plan.copy_to.astype(np.int64)
        first = self._pools[0].sink + 1
        out, back = target >= first, source >= first
        if out.any():
            self._go_out(self._indices(source[out]), target[out] - first)
        if back.any():
            self._come_in(source[back] - first, target[back], plan.step)

    def arrived(self) -> int | None:
        """The last step whose copies from main memory are there; None: all are."""
        return None

    def _go_out(self, slots: torch.Tensor, offload_slots: np.ndarray) -> None:
        """Copy what slots [n] of the pool hold to these of main memory."""
        rows = torch.empty((len(slots), self._offload.rows.shape[1]), dtype=torch.uint8)
        read_slots(self._stored, slots, rows)
        self._offload.rows[torch.from_numpy(offload_slots)] = rows

    def _come_in(self, offload_slots: np.ndarray, slots: np.ndarray, step: int) -> None:
        """Copy what these slots [n] of main memory hold to those of the pool, for this step."""
        del step
        rows = self._offload.rows[torch.from_numpy(offload_slots)]
        write_slots(self._stored, self._indices(slots), rows)

    def _indices(self, values: np.ndarray) -> torch.Tensor:
        """[n] int64 where the pool is."""
        return torch.from_numpy(values)


def pools_of(pool: KVPool, draft: Drafter | None) -> list[KVPool]:
    """A model's pool, and its draft model's."""
    return [pool] if draft is None else [pool, draft.pool]
