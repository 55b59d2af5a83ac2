"""Whole embeddings and heads that adapters bring (PEFT's `modules_to_save`), in slots of their own.

Slot n belongs to slot n of adapters. Tables have fixed addresses, and what is in them is read on
the device, so captured steps stay right whatever is put there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from tokenpod.kernels.operations.adapter_ops import OwnLinear
from tokenpod.kernels.operations.pointwise_ops import Embed
from tokenpod.models.adapters.targets import EMBEDDING
from tokenpod.models.weights.weights import HEAD

#: A table's numbers on the host, one piece behind the other.
Copied = Mapping[str, Sequence[torch.Tensor]]


def fill(room: torch.Tensor, pieces: Iterable[torch.Tensor]) -> None:
    """Copy pieces [n] to where `room` begins, in the order of the device's queue."""
    flat, start = room.view(-1), 0
    for piece in pieces:
        flat[start : start + len(piece)].copy_(piece, non_blocking=True)
        start += len(piece)


class Copies:
    """Room for so many adapters' embeddings and heads, all of it taken.

    Args:
        shapes: of this rank's embedding and head, [rows, width] each, by their names.
        slots: how many.
        dtype: of the model.
        device: of the tables.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = slots
        # Written at once: memory that is only promised would be taken under load.
        self._tables = {
            name: torch.empty((slots, *shape), dtype=dtype, device=device).zero_()
            for name, shape in shapes.items()
        }
        #: [slots] int32: whether the adapter there brings its own.
        self._has = {name: torch.zeros(slots, dtype=torch.int32, device=device) for name in shapes}

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.nbytes for table in self._tables.values())

    def put(self, slot: int, copied: Copied) -> None:
        """Put an adapter's into a slot, from 1, in the order of the device's queue."""
        if slot > self.slots:
            assert not copied, f"slot {slot} has no room for an embedding or a head"
            return
        for name, table in self._tables.items():
            fill(table[slot - 1], copied.get(name, ()))
            self._has[name][slot - 1 : slot].fill_(int(name in copied))

    def embedded(
        self, x: torch.Tensor, t_token: torch.Tensor, t_adapter: torch.Tensor, embed: Embed
    ) -> torch.Tensor:
        """X [T, width], and rows of their adapter's table where tokens have one.

        One look-up per slot, whatever tokens have it; ranks make it together.
        """
        for at, table in enumerate(self._tables[EMBEDDING]):
            own = (t_adapter == at + 1) & (self._has[EMBEDDING][at] > 0)
            x = torch.where(own[:, None], embed(table, t_token), x)
        return x

    def logits(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        t_adapter: torch.Tensor,
        own_linear: OwnLinear,
    ) -> torch.Tensor:
        """Logits [n, rows], and the products with their adapter's head where rows have one."""
        has = self._has[HEAD]
        slot = (t_adapter - 1).clamp(0, self.slots - 1)
        own = (t_adapter > 0) & (t_adapter <= self.slots) & (has[slot] > 0)
        made = own_linear(hidden, self._tables[HEAD], t_adapter, has)
        return torch.where(own[:, None], made, logits)
