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
    #: Shape of its memory, float32.
    memory: tuple[int, ...]

    def nbytes(self, item_bytes: int) -> int:
        """Bytes of a row, of a model whose numbers take `item_bytes`."""
        return math.prod(self.inputs) * item_bytes + math.prod(self.memory) * 4


class StatePool(KVPool):
    """Keys and values by slot, as `KVPool` has them, and states by row.

    There are as many states as rows were seen at once: a server that is asked little keeps few.

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
        #: Of each such layer: inputs [rows, ...] and memories [rows, ...].
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.reserve(1)

    def take_row(self, row: int, prompt: int) -> None:
        """A new sequence has a row: it begins with states of zeros."""
        del prompt
        self.reserve(row + 1)
        for inputs, memory in self.states:
            inputs[row].zero_()
            memory[row].zero_()

    def reserve(self, rows: int) -> None:
        """Have states for so many rows at least; those that are there are kept."""
        if rows <= self._rows:
            return
        rows = max(rows, 2 * self._rows)
        made = []
        for i, layout in enumerate(self._layouts):
            inputs = torch.zeros((rows, *layout.inputs), dtype=self._type, device=self._device)
            memory = torch.zeros((rows, *layout.memory), device=self._device)
            if self._rows:
                inputs[: self._rows], memory[: self._rows] = self.states[i]
            made.append((inputs, memory))
        self.states, self._rows = made, rows
