"""A rank's adapters: those that have been read, on the host, and slots that products read.

Slots have fixed addresses and one size, so captured steps stay right whatever is put into them. The
scheduler decides which adapter is in which slot; what it decides comes with a step's plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.adapter_ops import AdapterWeights, Added, AddedRows, BaseLinear
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.ops import Operations
from tokenpod.kernels.operations.weight import StackedWeight
from tokenpod.models.adapters.copies import Copies, fill
from tokenpod.models.adapters.files import Base, HostAdapter, read_adapter
from tokenpod.models.adapters.packed import Packed, PackedFactors
from tokenpod.models.adapters.scales import Made, Scales
from tokenpod.models.adapters.targets import (
    EMBEDDING,
    Product,
    Targets,
    aligned,
    copied_shapes,
    products_of,
    slot_shape,
    vocabulary_products,
)
from tokenpod.models.adapters.virtual import Virtual, VirtualBase
from tokenpod.models.adapters.vocabulary import Vocabulary, filled_up
from tokenpod.models.checkpoints.tensor_file import Rest, no_rest
from tokenpod.models.layers.linear import Weights
from tokenpod.models.weights.weights import HEAD, Weight

Ints = npt.NDArray[np.int32]

#: A power of two, as torch's allocator of pinned memory would make of it.
_PIECE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Space:
    """What is taken for adapters beforehand."""

    #: Adapters that one step can have.
    slots: int
    #: Largest rank of any module.
    rank: int
    #: How many of the slots have room for an embedding and a head, too.
    heads: int = 0
    #: Whether each slot has room for factors of the embedding and the head.
    vocabulary: bool = False


class AdapterStore:
    """The adapters of one rank of a model, and what they add to its products.

    A slot has the numbers of a rank, of all products, beside each other: so an adapter is put there
    by one copy of as many bytes as it has.

    Args:
        base: what adapters must fit.
        space: how many slots, of which rank.
        ops: the model's.
        device: of the slots.
        tables: shapes of this rank's embedding and head, where there is room for adapters' own.
        vocabulary: the two as products, where there is room for factors of them.
        group: the ranks that divide the model; None: there is one.
    """

    def __init__(
        self,
        base: Base,
        space: Space,
        ops: Operations,
        device: torch.device,
        tables: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        vocabulary: Mapping[str, Product] = MappingProxyType({}),
        group: Group | None = None,
    ) -> None:
        self._base, self._ops, self._device = base, ops, device
        self._ranks = torch.zeros(space.slots, dtype=torch.int32, device=device)
        shape = (space.slots, *slot_shape(base.products.values(), space.rank))
        # Written at once: memory that is only promised would be taken under load.
        self._slots = torch.empty(shape, dtype=base.dtype, device=device).zero_()
        self.scales = Scales(base.products, space.slots, base.dtype, device, group)
        self._weights = {
            name: replace(weights, scale=self.scales.of(name), scaled=self.scales.scaled)
            for name, weights in self._views(self._slots).items()
        }
        #: By the number that requests have.
        self._read: dict[int, Packed | Virtual] = {}
        #: How many there are.
        self.slots = space.slots
        #: None: adapters bring no embeddings and heads.
        self.copies = Copies(tables, space.heads, base.dtype, device) if space.heads else None
        #: None: they have no factors of them.
        self.vocabulary = None
        if space.vocabulary:
            self.vocabulary = Vocabulary(vocabulary, space.slots, space.rank, base.dtype, device)
            self._weights[HEAD] = self.vocabulary.weights[HEAD]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        more = self.scales, self.copies, self.vocabulary
        return self._slots.nbytes + sum(each.nbytes for each in more if each is not None)

    def _views(self, slots: torch.Tensor, rest: Rest = no_rest) -> dict[str, AdapterWeights]:
        """Each product's part of slots [S, rows, numbers]."""
        products = self._base.products.values()
        biases = any(product.has_bias for product in products)
        ranks, at, found = slots[:, int(biases) :], 0, {}
        for product in products:
            parts, end = len(product.rows), at + product.numbers
            up = end - aligned(product.outputs)
            down = ranks[:, :, at : at + parts * product.inputs]
            found[product.name] = AdapterWeights(
                down=down.view(*down.shape[:2], parts, product.inputs).transpose(1, 2),
                up=ranks[:, :, up : up + product.outputs],
                bias=slots[:, 0, up : up + product.outputs] if product.has_bias else None,
                rows=product.rows,
            )
            at = end
            rest()
        return found

    # -- adapters on the host ------------------------------------------------------------------

    def read(self, folder: Path, rest: Rest = no_rest) -> Packed | Virtual:
        """This rank's part of an adapter. Any thread may read. Raises ModelError."""
        adapter = read_adapter(folder, self._base, rest)
        if isinstance(adapter, Virtual):
            return adapter
        copies = {name: self._pieces(own.view(-1), rest) for name, own in adapter.copies.items()}
        made = self.scales.made(adapter.factors, rest)
        pieces = self._pieces(self._packed(adapter, made, rest).view(-1), rest)
        scale, squares = (
            ((), ())
            if made is None
            else (self._pieces(x, rest) for x in (made.scale, made.squares))
        )
        vocabulary = {}
        for name, factors in adapter.tables.items():
            down, up = (self._pieces(filled_up(each).view(-1), rest) for each in factors)
            vocabulary[name] = PackedFactors(len(factors[0]), down, up)
        return Packed(
            adapter.rank,
            adapter.digest,
            pieces,
            scale=scale,
            squares=squares,
            copies=copies,
            vocabulary=vocabulary,
        )

    def _packed(self, adapter: HostAdapter, made: Made | None, rest: Rest) -> torch.Tensor:
        """[rows, numbers], as a slot for adapters of this rank has them."""
        numbers = torch.zeros(
            slot_shape(self._base.products.values(), adapter.rank), dtype=self._base.dtype
        )
        for name, weights in self._views(numbers[None], rest).items():
            starts = [0, *accumulate(weights.rows)]
            for part, factors in adapter.factors.get(name, {}).items():
                rank, start = len(factors.down), starts[part]
                weights.down[0, part, :rank] = factors.down
                weights.up[0, :rank, start : start + len(factors.up)] = factors.up.t()
                rest()
            if weights.bias is not None:
                weights.bias[0] = self._bias(name, adapter, made)
        return numbers

    def _bias(self, name: str, adapter: HostAdapter, made: Made | None) -> torch.Tensor:
        """[out]: what is added to a product that has the base's bias; scales are not for that."""
        base = self._base.biases[name]
        added = adapter.biases.get(name, torch.zeros_like(base))
        scale = None if made is None else self.scales.row(made, name)
        return added if scale is None else added + (1 - scale) * base

    def _pieces(self, numbers: torch.Tensor, rest: Rest) -> tuple[torch.Tensor, ...]:
        """Of a GPU's adapter pinned ones, so that their copies need not wait for the host.

        Pinning takes the longer the more it is, within the driver, where launches of steps may have
        to wait for it. What is unloaded leaves pieces that the next one takes.
        """
        parts = torch.split(numbers, _PIECE_BYTES // numbers.element_size())
        if self._device.type != "cuda":
            return tuple(parts)
        pinned = []
        for part in parts:
            pinned.append(torch.empty_like(part, pin_memory=True).copy_(part))
            rest()
        return tuple(pinned)

    def keep(self, number: int, adapter: Packed | Virtual) -> None:
        """Know an adapter by its number from now on."""
        self._read[number] = adapter

    def drop(self, number: int) -> None:
        """Forget an adapter; what is in slots stays there until it is overwritten."""
        self._read.pop(number, None)

    # -- slots ---------------------------------------------------------------------------------

    def put(self, slot: int, number: int) -> None:
        """Put an adapter into a slot, from 1, in the order of the device's queue."""
        adapter, at = self._read[number], slot - 1
        assert isinstance(adapter, Packed), "virtual tokens have no slots"
        fill(self._slots[at], adapter.pieces)
        self.scales.put(slot, adapter.scale, adapter.squares)
        self._ranks[at : at + 1].fill_(adapter.rank)
        if self.vocabulary is not None:
            self.vocabulary.put(slot, adapter.vocabulary)
        if self.copies is not None:
            self.copies.put(slot, adapter.copies)

    # -- virtual tokens ------------------------------------------------------------------------

    def embeddings(self, numbers: Ints, indices: Ints) -> torch.Tensor:
        """[n, width] on the host: which virtual tokens of which adapters."""
        width = self._virtual(int(numbers[0])).numbers.shape[1]
        made = torch.empty(len(numbers), width, dtype=self._base.dtype)
        for number, at in _places(numbers):
            made[at] = self._virtual(number).numbers[torch.from_numpy(indices[at]).long()]
        return made

    def fill(
        self,
        pool: KVPool,
        slots: Ints,
        numbers: Ints,
        indices: Ints,
        window_slots: Ints | None = None,
    ) -> None:
        """Write the keys and values of virtual tokens to slots [n], in the order of the queue.

        `window_slots`: [n]; None: there are none.
        """
        for number, at in _places(numbers):
            which = torch.from_numpy(indices[at]).long()
            own = None if window_slots is None else torch.from_numpy(window_slots[at])
            ready = self._virtual(number).numbers[:, :, which]
            pool.write(torch.from_numpy(slots[at]), ready, own)

    def _virtual(self, number: int) -> Virtual:
        adapter = self._read[number]
        assert isinstance(adapter, Virtual), f"adapter {number} has no virtual tokens"
        return adapter

    # -- steps ---------------------------------------------------------------------------------

    def prepared(self, batch: ForwardBatch) -> ForwardBatch:
        """A step whose products know which tokens have which adapter."""
        if batch.t_adapter is None:
            return batch
        return replace(batch, adapters=self._ops.plan_adapters(batch.t_adapter, self._ranks))

    def meet(self, name: str, product: BaseLinear) -> None:
        """Note a product whose rows adapters may scale."""
        self.scales.meet(name, product)

    def delta(self, name: str, step: ForwardBatch | None) -> Added | None:
        """What is added to a product; see `models.layers.linear.Delta`."""
        if step is None or step.adapters is None:
            return None
        weights = self._weights.get(name)
        return None if weights is None else Added(weights, step.adapters, self._ops.adapt)

    def at_head(self, step: ForwardBatch | None) -> ForwardBatch | None:
        """The step for the head's product: of other tokens than the others, and other ranks."""
        if self.vocabulary is None or step is None or step.t_adapter is None:
            return step
        ranks = self.vocabulary.ranks[HEAD]
        return replace(step, adapters=self._ops.plan_adapters(step.t_adapter, ranks))

    def embedded(self, step: ForwardBatch) -> AddedRows | None:
        """What is added to rows of the embedding."""
        if self.vocabulary is None or step.t_adapter is None:
            return None
        own = self.vocabulary
        weights, ranks = own.weights[EMBEDDING], own.ranks[EMBEDDING]
        return AddedRows(weights, step.t_adapter, ranks, self._ops.adapt_rows)


def _places(numbers: Ints) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Adapters, and where each of them is named."""
    return [(int(number), np.flatnonzero(numbers == number)) for number in np.unique(numbers)]


def store_of(
    targets: Targets,
    weights: Sequence[Weight],
    tensors: Weights,
    space: Space,
    virtual: VirtualBase,
    ops: Operations,
    group: Group | None = None,
    folder: Path | None = None,
) -> AdapterStore:
    """An empty store for a rank's part of a model, all of its memory taken.

    Args:
        targets: what adapters' modules are in the model.
        weights: of the model.
        tensors: what this rank has read of them.
        space: how many slots, of which rank.
        virtual: whose part it is, and what virtual tokens must fit.
        ops: the model's.
        group: the ranks that divide it; None: there is one.
        folder: of the base's checkpoint.
    """
    table, shard = tensors["embedding"], virtual.shard
    assert isinstance(table, torch.Tensor)
    products = {product.name: product for product in products_of(weights, shard)}
    named = {name: tensors[f"{name}_bias"] for name, p in products.items() if p.has_bias}
    biases = {
        name: bias.float().cpu() for name, bias in named.items() if isinstance(bias, torch.Tensor)
    }
    max_rank = space.rank if space.slots else 0
    base = Base(
        targets,
        products,
        shard,
        virtual.dtype,
        max_rank,
        biases,
        virtual,
        heads=bool(space.heads),
        vocabulary=vocabulary_products(weights, shard) if space.vocabulary else {},
        folder=folder,
    )
    shapes = copied_shapes(weights, shard)
    store = AdapterStore(base, space, ops, table.device, shapes, base.vocabulary, group)
    for name in products if space.slots else ():
        weight = tensors[name]
        assert not isinstance(weight, StackedWeight), name
        store.scales.measure(name, weight)
    return store
