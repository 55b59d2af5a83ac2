"""Keys and values in the host's memory: what a slot of a pool holds, layer after layer, as bytes.

    pool:  per layer   [slots + 1, heads, dim]          host:  [slots, bytes of all layers]
                        slot 7 of layer 0 --+                   slot 3: layer 0 | layer 1 | ...
                        slot 7 of layer 1 --+---------------------------^

A token's bytes lie together, so that runs of host slots are copied at once, whatever slots of the
pool they come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class OffloadPool:
    """Bytes of tokens, in memory that takes no room until it is written to.

    Args:
        slots: tokens that it holds.
        slot_bytes: of one token.
        pinned: lock the memory, so that a GPU copies to and from it by itself. Raises RuntimeError
            if the system does not let it be locked.
    """

    def __init__(self, slots: int, slot_bytes: int, *, pinned: bool) -> None:
        self.slots = slots
        # Not of torch's allocator of pinned memory: that rounds up to powers of two.
        self._memory = np.zeros(slots * slot_bytes, np.uint8)
        #: [slots, slot_bytes] uint8
        self.rows = torch.from_numpy(self._memory).view(slots, slot_bytes)
        if pinned and slots:
            error = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                self.rows.data_ptr(), self.rows.nbytes, 0
            )
            if int(error):
                raise RuntimeError(f"CUDA error {int(error)}")

    def take_pages(self) -> None:
        """Have the system give all memory now."""
        self._memory[:] = 0


def read_slots(tensors: Sequence[torch.Tensor], slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows [n, bytes] uint8 become what slots [n] int64 of a pool's tensors hold."""
    at = 0
    for tensor in tensors:
        numbers = _bytes_of(tensor)
        rows[:, at : at + numbers.shape[1]] = numbers[slots]
        at += numbers.shape[1]


def write_slots(tensors: Sequence[torch.Tensor], slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Slots [n] int64 of a pool's tensors hold what rows [n, bytes] uint8 are."""
    at = 0
    for tensor in tensors:
        numbers = _bytes_of(tensor)
        numbers[slots] = rows[:, at : at + numbers.shape[1]]
        at += numbers.shape[1]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[slots, bytes] of one of a pool's tensors, [slots, heads, dim]."""
    return tensor.view(torch.uint8).flatten(1)
