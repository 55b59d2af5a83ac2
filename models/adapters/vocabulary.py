"""Factors that adapters add to the embedding and the head, in slots beside those of other products.

Slot n belongs to slot n of adapters. Each of the two has a rank of its own in a slot, 0 where the
adapter there leaves it as it is: nothing is read for it then. Addresses are fixed, and what is
there is read on the device, so captured steps stay right whatever is put there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokenpod.kernels.operations.adapter_ops import AdapterWeights
from tokenpod.models.adapters.copies import fill
from tokenpod.models.adapters.packed import PackedFactors
from tokenpod.models.adapters.targets import Product, aligned


class Vocabulary:
    """Room for all slots' factors, taken at once.

    Args:
        products: the embedding and the head of this rank.
        slots: how many.
        rank: the largest.
        dtype: of the model.
        device: of the factors.
    """

    def __init__(
        self,
        products: Mapping[str, Product],
        slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Written at once: memory that is only promised would be taken under load.
        self._tables = {
            name: tuple(
                torch.empty((slots, rank, aligned(numbers)), dtype=dtype, device=device).zero_()
                for numbers in (product.inputs, product.outputs)
            )
            for name, product in products.items()
        }
        #: [slots] int32.
        self.ranks = {
            name: torch.zeros(slots, dtype=torch.int32, device=device) for name in products
        }
        self.weights = {
            name: AdapterWeights(
                down=self._tables[name][0][:, None, :, : product.inputs],
                up=self._tables[name][1][:, :, : product.outputs],
                bias=None,
                rows=product.rows,
            )
            for name, product in products.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(table.nbytes for tables in self._tables.values() for table in tables)

    def put(self, slot: int, factors: Mapping[str, PackedFactors]) -> None:
        """Put an adapter's into a slot, from 1, in the order of the device's queue."""
        for name, (down, up) in self._tables.items():
            own = factors.get(name)
            if own is not None:
                fill(down[slot - 1], own.down)
                fill(up[slot - 1], own.up)
            self.ranks[name][slot - 1 : slot].fill_(0 if own is None else own.rank)


def filled_up(factor: torch.Tensor) -> torch.Tensor:
    """A factor [rank, numbers] as a slot has it."""
    rank, numbers = factor.shape
    made = torch.zeros((rank, aligned(numbers)), dtype=factor.dtype)
    made[:, :numbers] = factor
    return made
