"""The KV pool: one slot a token and layer, preallocated."""

from __future__ import annotations

import math

import numpy as np
import torch

from tokenpod.kernels.ops import KVScales


class KVPool:
    """Keys and values of every layer: per layer `[slots + 1, kv_heads, head_dim]` each.

    Slots are handed out by the scheduler; the last one is the sink that padding writes to.
    Separate tensors a layer: one mutated tensor for all layers costs compilers several times more.

    Args:
        layers: of the model.
        slots: tokens that it holds.
        kv_heads: of this rank.
        head_dim: numbers of a head.
        dtype: of the numbers; float8_e4m3fn with `scales` only.
        device: where it lies.
        scales: [layers, kv_heads] each: what numbers of 8 bits are multiples of.
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
        scales: KVScales | None = None,
    ) -> None:
        self.slots = slots
        #: A layer's each, [kv_heads]; None where numbers are stored as they are.
        self.scales: list[KVScales | None] = [None] * layers
        if scales is not None:
            self.scales = [KVScales(*layer) for layer in zip(*scales, strict=True)]
        shape = (slots + 1, kv_heads, head_dim)
        self.keys = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(layers)]

    def take_pages(self) -> None:
        """Have the system give all memory now; on a CPU it comes when it is first written."""
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy keys and values from slots [n] to others, all at once, in every layer."""
        source, target = source.long(), target.long()
        for tensor in (*self.keys, *self.values):
            # As integers: numbers of 8 bits can be moved, but not by that name.
            numbers = tensor.view(torch.uint8)
            numbers[target] = numbers[source]

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
