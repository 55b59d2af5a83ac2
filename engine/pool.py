"""The KV pool: one slot a token and layer, preallocated."""

from __future__ import annotations

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
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    @staticmethod
    def bytes_per_slot(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of device memory that one token costs in all layers."""
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    @property
    def sink(self) -> int:
        """The slot that padding writes to."""
        return self.slots
