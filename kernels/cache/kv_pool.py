"""The KV pool: one slot a token and layer, preallocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenpod.kernels.cache.kv_rounding import store
from tokenpod.kernels.operations.attention_ops import KVScales


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a layer of a pool has for a token."""

    heads: int
    #: Numbers of a head's key, and of its value.
    key_dim: int
    value_dim: int
    #: A value is the first `value_dim` numbers of its key, and not stored apart.
    shared: bool = False

    @property
    def numbers(self) -> int:
        """That are stored."""
        return self.heads * (self.key_dim + (0 if self.shared else self.value_dim))

    @property
    def scales(self) -> int:
        """That are stored with numbers of type int8."""
        return 2 * self.heads


class KVPool:
    """Keys and values of every layer: per layer `[slots + 1, heads, key_dim or value_dim]`.

    Slots are handed out by the scheduler; the last one is the sink that padding writes to. Layers
    with a window may have fewer, of their own.
    Separate tensors a layer: one mutated tensor for all layers costs compilers several times more.

    Args:
        layouts: what each layer has for a token, on this rank.
        slots: tokens that it holds.
        dtype: of the numbers; float8_e4m3fn with `scales` only. Of int8 each slot has scales.
        device: where it lies.
        scales: each layer's, [heads]: what numbers of type float8_e4m3fn are multiples of.
        window_slots: of layers with a window; 0: these have the slots of all others.
        windowed: of each layer, whether it has such slots.
    """

    def __init__(
        self,
        *,
        layouts: Sequence[KVLayout],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KVScales] | None = None,
        window_slots: int = 0,
        windowed: Sequence[bool] = (),
    ) -> None:
        self.slots, self.window_slots = slots, window_slots
        #: Of each layer, whether its slots are window slots.
        self.windowed = windowed if window_slots else [False] * len(layouts)
        #: A layer's each, [heads] or, of int8, [slots + 1, heads]; None: stored as they are.
        self.scales: list[KVScales | None] = [None] * len(layouts)
        if scales is not None:
            self.scales = list(scales)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        #: All that is stored: of each layer keys, and values unless they are part of these.
        self.stored: list[torch.Tensor] = []
        rows = [(window_slots if own else slots) + 1 for own in self.windowed]
        for layout, n in zip(layouts, rows, strict=True):
            keys = _zeros((n, layout.heads, layout.key_dim), dtype, device)
            self.stored.append(keys)
            values = keys[..., : layout.value_dim]
            if not layout.shared:
                values = _zeros((n, layout.heads, layout.value_dim), dtype, device)
                self.stored.append(values)
            self.keys.append(keys)
            self.values.append(values)
        if dtype == torch.int8:
            self.scales = [
                self._slot_scales((n, layout.heads), device)
                for layout, n in zip(layouts, rows, strict=True)
            ]

    def take_pages(self) -> None:
        """Have the system give all memory now; on a CPU it comes when it is first written."""
        for tensor in self.stored:
            tensor.zero_()

    def _slot_scales(self, shape: tuple[int, int], device: torch.device) -> KVScales:
        scales = KVScales(*(_zeros(shape, torch.float32, device) for _ in range(2)))
        self.stored += scales
        return scales

    def reserve(self, rows: int) -> None:
        """Have whatever so many rows need besides slots: here that is nothing."""

    def take_row(self, row: int, prompt: int) -> None:
        """A sequence with so many prompt tokens gets a row. All that it has lies in slots.

        Followers are not told of prompts: theirs are 0 tokens long.
        """

    def copy_states(self, sources: Sequence[int], places: Sequence[int]) -> None:
        """Copy what rows have besides slots, one by one: here that is nothing."""

    def release_rows(self, rows: Sequence[int]) -> None:
        """Rows are free again; their slots are the scheduler's."""

    def write(
        self, slots: torch.Tensor, numbers: torch.Tensor, window_slots: torch.Tensor | None = None
    ) -> None:
        """Write ready keys and values to slots.

        Args:
            slots: [n], on any device.
            numbers: [layers, 2, n, heads, head_dim] keys and values, as attention would have them,
                on the host; for layouts that store both.
            window_slots: [n], of layers that have their own.
        """
        device = self.keys[0].device
        everywhere, there = slots.long().to(device), numbers.to(device, non_blocking=True)
        in_windows = everywhere if window_slots is None else window_slots.long().to(device)
        for layer, scales in enumerate(self.scales):
            at = in_windows if self.windowed[layer] else everywhere
            pair = (self.keys[layer], self.values[layer])
            for index, (tensor, own) in enumerate(zip(pair, there[layer], strict=True)):
                store(own, tensor, at, scales and scales[index])

    @staticmethod
    def bytes_per_slot(*, layouts: Sequence[KVLayout], dtype: torch.dtype) -> int:
        """Bytes of device memory that one token costs in all layers."""
        numbers = sum(layout.numbers for layout in layouts) * dtype.itemsize
        if dtype != torch.int8:
            return numbers
        return numbers + sum(layout.scales for layout in layouts) * torch.float32.itemsize

    @property
    def sink(self) -> int:
        """The slot that padding writes to."""
        return self.slots

    @property
    def window_sink(self) -> int:
        """The same of window slots."""
        return self.window_slots


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU they take no memory until they are written to.

    torch.zeros would touch every page at once: seconds of start-up, and memory that a quiet server
    never needs.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
