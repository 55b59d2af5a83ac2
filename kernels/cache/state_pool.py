"""The pool of models of which some layers keep a state per row instead of keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tokenpod.kernels.cache.kv_pool import KVPool


class StateLayout(NamedTuple):
    """What a layer keeps of a row, whatever its length."""

    #: Its last inputs, in the model's type: numbers of one, and how many; that of position p is at
    #: p % how many.
    inputs: tuple[int, int]
    #: Shape of its memory, float32: of each head one.
    memory: tuple[int, ...]
    #: Numbers of a token that the memory takes besides the layer's inputs. None: wrong drafts can't
    #: be taken back.
    beside: int | None = None

    def with_drafts(self, drafts: int) -> StateLayout:
        """The same where so many drafts of a row may turn out to be wrong.

        The memory does not go through guesses: it goes on from their inputs once it is known which
        of them were right. So inputs of that many tokens more are kept, with all that is needed.
        """
        if not drafts or self.beside is None:
            return self
        numbers, tokens = self.inputs
        return self._replace(inputs=(numbers + self.beside, tokens + drafts))

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
        #: Of layers that have the same, together: inputs [layers, rows, ...], memories [layers,
        #: rows, ...], and how many positions each head's memory has been through, [layers, rows,
        #: heads] int32.
        self._stacks: list[torch.Tensor] = []
        #: Of each layer.
        self.states: list[tuple[torch.Tensor, ...]] = []
        self.reserve(1)

    def take_pages(self) -> None:
        """Have the system give all memory now, that of states too."""
        super().take_pages()
        for stack in self._stacks:
            stack.zero_()

    def take_row(self, row: int, prompt: int) -> None:
        """A new sequence has a row: it begins with states of zeros."""
        del prompt
        self.reserve(row + 1)
        for stack in self._stacks:
            stack[:, row].zero_()

    def copy_states(self, sources: Sequence[int], places: Sequence[int]) -> None:
        """Copy rows' states, one by one; rows that there are no sequences of keep snapshots."""
        for source, place in zip(sources, places, strict=True):
            for stack in self._stacks:
                stack[:, place].copy_(stack[:, source])

    def reserve(self, rows: int) -> None:
        """Have states for so many rows at least; those that are there are kept."""
        if rows <= self._rows:
            return
        before, self._stacks, places = self._stacks, [], {}
        for layout in dict.fromkeys(self._layouts):
            shapes = (layout.inputs, self._type), (layout.memory, torch.float32)
            for shape, dtype in (*shapes, (layout.memory[:1], torch.int32)):
                size = self._layouts.count(layout), rows, *shape
                self._stacks.append(torch.zeros(size, dtype=dtype, device=self._device))
            places[layout] = iter(zip(*self._stacks[-3:], strict=True))
        for old, new in zip(before, self._stacks, strict=bool(before)):
            new[:, : self._rows] = old
        self.states = [next(places[layout]) for layout in self._layouts]
        self._rows = rows
