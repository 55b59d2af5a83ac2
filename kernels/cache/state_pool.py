"""The pool of models of which some layers keep a state per row instead of keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tokenpod.kernels.cache.kv_pool import KVPool


class StateLayout(NamedTuple):
    """What a layer keeps of a row, whatever its length."""

    #: Shape of its last inputs, in the model's type.
    inputs: tuple[int, ...]
    #: Shape of its memory, float32: of each head one.
    memory: tuple[int, ...]

    def nbytes(self, item_bytes: int) -> int:
        """Bytes of a row, of a model whose numbers take `item_bytes`."""
        heads = self.memory[0]
        return math.prod(self.inputs) * item_bytes + math.prod(self.memory) * 4 + heads * 4


class StatePool(KVPool):
    """Keys and values by slot, as `KVPool` has them, and states by row.

    Captured steps know where states lie: those of all rows are reserved before anything is
    captured. Rows of padding have none.

    Args:
        state_layouts: of the layers that have states.
        state_dtype: of their last inputs.
        named: what `KVPool` takes.
    """

    def __init__(
        self, *, state_layouts: Sequence[StateLayout], state_dtype: torch.dtype, **named: Any
    ) -> None:
        super().__init__(**named)
        self._layouts, self._type = tuple(state_layouts), state_dtype
        self._device: torch.device = named["device"]
        self._rows = 0
        #: Of each such layer: inputs [rows, ...], memories [rows, ...], and how many positions
        #: each head's memory has been through, [rows, heads] int32.
        self.states: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.reserve(1)

    def take_row(self, row: int, prompt: int) -> None:
        """A new sequence has a row: it begins with states of zeros."""
        del prompt
        self.reserve(row + 1)
        for each in self.states:
            for tensor in each:
                tensor[row].zero_()

    def reserve(self, rows: int) -> None:
        """Have states for so many rows at least; those that are there are kept."""
        if rows <= self._rows:
            return
        before = self.states
        self.states = [self._made(layout, rows) for layout in self._layouts]
        for old, new in zip(before, self.states, strict=False):
            for some, all_ in zip(old, new, strict=True):
                all_[: self._rows] = some
        self._rows = rows

    def _made(
        self, layout: StateLayout, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shapes = (layout.inputs, self._type), (layout.memory, torch.float32)
        inputs, memory = (
            torch.zeros((rows, *shape), dtype=dtype, device=self._device) for shape, dtype in shapes
        )
        seen = torch.zeros((rows, layout.memory[0]), dtype=torch.int32, device=self._device)
        return inputs, memory, seen
