"""A rank's adapters: those that have been read, on the host, and slots that products read.

Slots have fixed addresses and one size, so captured steps stay right whatever is put into them. The
scheduler decides which adapter is in which slot; what it decides comes with a step's plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenpod.kernels.adapter_ops import AdapterWeights
from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.ops import Operations
from tokenpod.models.adapters.files import Base, HostAdapter, read_adapter
from tokenpod.models.adapters.targets import Product, Targets, products_of
from tokenpod.models.linear import Read, Weights
from tokenpod.models.shard import Shard
from tokenpod.models.weights import Weight


@dataclass(frozen=True, slots=True)
class Space:
    """What is taken for adapters beforehand."""

    #: Adapters that one step can have.
    slots: int
    #: Largest rank of any module.
    rank: int


class AdapterStore:
    """The adapters of one rank of a model, and what they add to its products.

    Args:
        base: what adapters must fit.
        space: how many slots, of which rank.
        ops: the model's.
        device: of the slots.
    """

    def __init__(self, base: Base, space: Space, ops: Operations, device: torch.device) -> None:
        self._base, self._ops, self._device = base, ops, device
        self.slots = space.slots
        self._ranks = torch.zeros(space.slots, dtype=torch.int32, device=device)
        self._weights = {
            name: _slots_of(product, space, base.dtype, self._ranks)
            for name, product in base.products.items()
        }
        #: By the number that requests have.
        self._read: dict[int, HostAdapter] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(weights.nbytes for weights in self._weights.values())

    # -- adapters on the host ------------------------------------------------------------------

    def read(self, folder: Path) -> HostAdapter:
        """This rank's part of an adapter. Any thread may read. Raises ModelError."""
        adapter = read_adapter(folder, self._base)
        if self._device.type != "cuda":
            return adapter
        # So that copies to the device need not wait for the host.
        pinned = {
            name: replace(f, down=f.down.pin_memory(), up=f.up.pin_memory())
            for name, f in adapter.products.items()
        }
        return replace(adapter, products=pinned)

    def keep(self, number: int, adapter: HostAdapter) -> None:
        """Know an adapter by its number from now on."""
        self._read[number] = adapter

    def drop(self, number: int) -> None:
        """Forget an adapter; what is in slots stays there until it is overwritten."""
        self._read.pop(number, None)

    # -- slots ---------------------------------------------------------------------------------

    def put(self, slot: int, number: int) -> None:
        """Put an adapter into a slot, from 1, in the order of the device's queue."""
        adapter, at = self._read[number], slot - 1
        for name, weights in self._weights.items():
            factors = adapter.products.get(name)
            weights.down[at].zero_()
            weights.up[at].zero_()
            if weights.bias is not None:
                weights.bias[at].zero_()
            if factors is None:
                continue
            parts, rank, inputs = factors.down.shape
            down = weights.down[at].view(parts, weights.rank, inputs)
            down[:, :rank].copy_(factors.down, non_blocking=True)
            weights.up[at, :, :rank].copy_(factors.up, non_blocking=True)
            if weights.bias is not None and factors.bias is not None:
                weights.bias[at].copy_(factors.bias, non_blocking=True)
        self._ranks[at : at + 1].fill_(adapter.rank)

    # -- steps ---------------------------------------------------------------------------------

    def prepared(self, batch: ForwardBatch) -> ForwardBatch:
        """A step whose products know which tokens have which adapter."""
        if batch.t_adapter is None:
            return batch
        return replace(batch, adapters=self._ops.plan_adapters(batch.t_adapter, self.slots))

    def delta(self, name: str, x: Read, step: ForwardBatch | None) -> torch.Tensor | None:
        """What is added to a product's sum; see `models.linear.Delta`."""
        if step is None or step.adapters is None:
            return None
        weights = self._weights.get(name)
        return None if weights is None else self._ops.adapt(x(), weights, step.adapters)


def store_of(
    targets: Targets,
    weights: Sequence[Weight],
    tensors: Weights,
    space: Space,
    shard: Shard,
    ops: Operations,
) -> AdapterStore:
    """An empty store for a rank's part of a model, all of its memory taken.

    Args:
        targets: what adapters' modules are in the model.
        weights: of the model.
        tensors: what this rank has read of them.
        space: how many slots, of which rank.
        shard: whose part it is.
        ops: the model's.
    """
    table = tensors["embedding"]
    assert isinstance(table, torch.Tensor)
    products = {product.name: product for product in products_of(weights, shard)}
    named = {name: tensors[f"{name}_bias"] for name, p in products.items() if p.has_bias}
    biases = {
        name: bias.float().cpu() for name, bias in named.items() if isinstance(bias, torch.Tensor)
    }
    base = Base(targets, products, shard, table.dtype, space.rank, biases)
    return AdapterStore(base, space, ops, table.device)


def _slots_of(
    product: Product, space: Space, dtype: torch.dtype, ranks: torch.Tensor
) -> AdapterWeights:
    def zeros(*shape: int) -> torch.Tensor:
        # Written at once: memory that is only promised would be taken under load.
        return torch.empty(space.slots, *shape, dtype=dtype, device=ranks.device).zero_()

    return AdapterWeights(
        down=zeros(len(product.rows) * space.rank, product.inputs),
        up=zeros(product.outputs, space.rank),
        bias=zeros(product.outputs) if product.has_bias else None,
        rows=product.rows,
        ranks=ranks,
    )
