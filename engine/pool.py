"""The KV pool: one slot a token and layer, preallocated."""

from __future__ import annotations

import math

import numpy as np
import torch


class KVPool:
    """Keys and values of every layer: per layer `[slots + 1, kv_heads, head_dim]` each.

    Slots are handed out by the scheduler; the last one is the sink that padding writes to.
    Separate tensors a layer: one mutated tensor for all layers costs compilers several times more.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = slots
        shape = (slots + 1, kv_heads, head_dim)
        self.keys = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(layers)]

    @staticmethod
    def bytes_per_slot(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of device memory that one token costs in all layers."""
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    @property
    def sink(self) -> int:
        """The slot that padding writes to."""
        return self.slots


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU they take no memory until they are written to.

    torch.zeros would touch every page at once: seconds of start-up, and memory that a quiet server
    never needs.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
