"""An adapter's files: checked against the base, read, and cut for one rank.

PEFT keeps of a module with weight [out, in] two factors, `lora_A` [r, in] and `lora_B` [out, r]. Of
a product whose outputs ranks divide a rank needs rows of B, of one whose inputs they divide columns
of A: then what a rank adds is its part of the sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from tokenpod.core.adapter_files import CONFIG, WEIGHTS, Digesting
from tokenpod.core.adapters import AdapterKind
from tokenpod.models.adapters.config import LoraConfig, read_lora
from tokenpod.models.adapters.names import (
    DOWN,
    EMBEDDING_DOWN,
    EMBEDDING_UP,
    LENGTHS,
    UP,
    module_name,
)
from tokenpod.models.adapters.scales import Factors
from tokenpod.models.adapters.table_factors import (
    TableBase,
    TableFactors,
    base_tables,
    checked_rank,
    read_tables,
)
from tokenpod.models.adapters.targets import Place, Product, Targets
from tokenpod.models.adapters.virtual import KINDS, Virtual, VirtualBase, read_tensor, read_virtual
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.checkpoints.tensor_file import Rest, TensorFile, no_rest
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Division


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter that has been read, for one rank."""

    #: Largest of all modules of layers.
    rank: int
    #: SHA-256 of its files, in hexadecimal digits.
    digest: str
    #: By product, then by part of it.
    factors: dict[str, dict[int, Factors]] = field(default_factory=dict)
    #: By product, [out] float32: added to the base's own bias.
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    #: This rank's part of an embedding and a head of its own, [rows, width] by our names.
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    #: This rank's part of what it adds to the base's embedding and head, by our names.
    tables: TableFactors = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Base:
    """What an adapter must fit, on one rank."""

    targets: Targets
    products: dict[str, Product]
    shard: Shard
    dtype: torch.dtype
    #: Largest rank that fits into a slot; 0: there are no slots.
    max_rank: int
    #: The base's own biases, by product; [out] float32.
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    #: What virtual tokens must fit; None: they are not taken.
    virtual: VirtualBase | None = None
    #: Whether there is room for an embedding and a head of an adapter's own.
    heads: bool = False
    #: The embedding and the head, where there is room for factors of them.
    vocabulary: Mapping[str, Product] = field(default_factory=dict)
    #: Of the base's checkpoint, with which tables in adapters are compared; None: they are not.
    folder: Path | None = None

    @property
    def tables(self) -> TableBase:
        """What factors of the embedding and the head must fit."""
        return TableBase(
            self.targets, self.shard, self.dtype, self.max_rank, self.vocabulary, self.folder
        )


def read_adapter(folder: Path, base: Base, rest: Rest = no_rest) -> HostAdapter | Virtual:
    """This rank's part of the adapter in `folder`.

    Raises ModelError, in one line, for what is not understood, for an adapter of another base, and
    for ranks above the largest.
    """
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: there is no {CONFIG}: it is no adapter in PEFT's layout")
    fields = read_fields(folder / CONFIG)
    kind = fields.choice("peft_type", {"LORA": AdapterKind.LORA, **KINDS})
    if kind is AdapterKind.LORA and not base.max_rank:
        raise ModelError(f"{fields.source}: there are no slots for LoRA (--max-adapters is 0)")
    if not (folder / WEIGHTS).is_file():
        others = sorted(path.name for path in folder.glob("adapter_model.*"))
        found = f"; {', '.join(others)} is not read" if others else ""
        raise ModelError(f"{folder}: there is no {WEIGHTS}{found}")
    with Digesting(folder) as digesting, closing(TensorFile(folder / WEIGHTS, rest=rest)) as file:
        made: HostAdapter | Virtual
        if kind is AdapterKind.LORA:
            made = _Reader(file, read_lora(fields, heads=base.heads), base, rest).read()
        else:
            assert base.virtual is not None, "who makes a store says what virtual tokens must fit"
            made = read_virtual(file, fields, base.virtual)
        try:
            return replace(made, digest=digesting.result())
        except OSError as error:
            raise ModelError(f"{folder}: can't be read ({error.strerror})") from None


class _Reader:
    def __init__(self, file: TensorFile, config: LoraConfig, base: Base, rest: Rest) -> None:
        self._file, self._config, self._base, self._rest = file, config, base, rest
        beside = base_tables(file, base.targets).values()
        self._left = {module_name(name): name for name in file.entries if name not in beside}
        self._rank = 0

    def read(self) -> HostAdapter:
        """All but its digest."""
        tables = read_tables(self._file, self._left, self._config, self._base.tables, self._rest)
        factors: dict[str, dict[int, Factors]] = {}
        biases: dict[str, torch.Tensor] = {}
        modules = [name.removesuffix(DOWN) for name in self._left if name.endswith(DOWN)]
        for module in modules:
            self._read_module(module, factors)
            self._rest()
        if self._config.biases:
            for name in [name for name in self._left if name.endswith(".bias")]:
                self._read_bias(name.removesuffix(".bias"), biases)
        copies = self._copies() if self._config.saves else {}
        if both := sorted(copies.keys() & tables.keys()):
            raise ModelError(f"{self._file.name}: it has a whole {both[0]}, and factors of it")
        if self._left:
            raise self._foreign(sorted(self._left)[0])
        if not factors and not biases and not copies and not tables:
            raise ModelError(f"{self._file.name}: it has no tensor of an adapter")
        return HostAdapter(max(self._rank, 1), "", factors, biases, copies, tables)

    def _copies(self) -> dict[str, torch.Tensor]:
        """This rank's rows of whole tables; those beyond the vocabulary are zeros."""
        found = {}
        for module, weight in self._base.targets.copied.items():
            name = self._left.pop(f"{module}.weight", None)
            if name is None:
                continue
            source, shard = weight.sources[0], self._base.shard
            whole, stored = tuple(axis.length for axis in source.axes), self._file.entries[name]
            if stored.shape != whole:
                found_shape, shape = list(stored.shape), list(whole)
                raise ModelError(
                    f"{self._file.name}: {name} is {found_shape}; the base's is {shape}"
                )
            if stored.kind not in ("F32", "F16", "BF16"):
                raise ModelError(f"{self._file.name}: {name} holds {stored.kind} numbers")
            rows = shard.part(source.axes[0])
            table = torch.zeros(shard.shape(source), dtype=self._base.dtype)
            self._file.read(table[: len(rows)], name, rows.start, whole[1:])
            found[weight.name] = table
        return found

    def _foreign(self, name: str) -> ModelError:
        """What is wrong with a tensor that was not read."""
        module = name
        for end in (DOWN, UP, EMBEDDING_DOWN, EMBEDDING_UP, *LENGTHS, ".bias", ".weight"):
            module = module.removesuffix(end)
        reason = self._base.targets.refused.get(module)
        if reason is None:
            of = f"{self._base.targets.architecture} has no module of that name"
            reason = of if module not in self._base.targets.places else "it is not understood"
        return ModelError(f"{self._file.name}: {name}: {reason}")

    def _read_module(self, module: str, factors: dict[str, dict[int, Factors]]) -> None:
        places = self._base.targets.places.get(module)
        if places is None:
            raise self._foreign(module + DOWN)
        names = [self._left.pop(module + end, None) for end in (DOWN, UP)]
        down_name, up_name = names
        if down_name is None or up_name is None:
            raise ModelError(f"{self._file.name}: {module} has a lora_A and no lora_B")
        rank = self._check(module, places, down_name, up_name)
        scale = self._config.scale(module, rank)
        kind, shard = self._base.dtype, self._base.shard
        down, up = self._tensor(down_name), self._tensor(up_name)
        lengths = self._lengths(module, len(up)) if self._config.dora else None
        # Products with a scale are rounded once, whatever the kind.
        up = (up if up.dtype == kind else up.float()) * scale
        for place in places:
            rows, columns = (shard.part(axis) for axis in place.source.axes)
            stored = place.source.stored_rows(rows)
            own_up = up[rows.start : rows.stop] if stored is None else up[torch.from_numpy(stored)]
            own_down = down[:, columns.start : columns.stop]
            own = factors.setdefault(place.weight, {})
            own_lengths = None
            if lengths is not None:
                all_rows = np.arange(rows.start, rows.stop) if stored is None else stored
                own_lengths = lengths[torch.from_numpy(all_rows)]
            own[place.part] = Factors(own_down.to(kind), own_up.to(kind), own_lengths)

    def _lengths(self, module: str, outputs: int) -> torch.Tensor:
        """[outputs] float32: what lengths a module's outputs get."""
        found = (self._left.pop(module + end, None) for end in LENGTHS)
        name = next((name for name in found if name is not None), None)
        if name is None:
            raise ModelError(
                f"{self._file.name}: use_dora is true, and there is no {module}{LENGTHS[0]}"
            )
        shape = self._file.entries[name].shape
        if shape != (outputs,):
            raise ModelError(
                f"{self._file.name}: {name} is {list(shape)}; {module} has {outputs} outputs"
            )
        return self._tensor(name).float()

    def _check(self, module: str, places: list[Place], down_name: str, up_name: str) -> int:
        """Shapes against the base's, before anything is read; the module's rank."""
        first = places[0].source
        outputs = first.axes[0].length
        if first.segment is not None:
            outputs = sum(first.segment.sizes) * first.segment.groups
        shape, names = (first.axes[1].length, outputs), [down_name, up_name]
        rank = checked_rank(self._file, module, shape, names, self._base.max_rank)
        self._rank = max(self._rank, rank)
        return rank

    def _read_bias(self, module: str, biases: dict[str, torch.Tensor]) -> None:
        """A bias that takes the place of the base's: what it adds to that."""
        base, places = self._base, self._base.targets.places.get(module)
        if places is None or not base.products[places[0].weight].has_bias:
            raise self._foreign(f"{module}.bias")
        name = self._left.pop(f"{module}.bias")
        for place in places:
            product, source = base.products[place.weight], place.source
            length = math.prod(self._file.entries[name].shape)
            whole = source.axes[0].length
            if source.segment is not None:
                whole = sum(source.segment.sizes) * source.segment.groups
            if length != whole:
                raise ModelError(
                    f"{self._file.name}: {name} has {length} numbers; the base's has {whole}"
                )
            own = biases.setdefault(place.weight, torch.zeros(product.outputs))
            # Of what ranks sum, one of them adds it.
            if source.axes[1].division is not Division.WHOLE and base.shard.rank:
                continue
            rows = base.shard.part(source.axes[0])
            stored = source.stored_rows(rows)
            read = self._tensor(name).float()
            read = (
                read[rows.start : rows.stop] if stored is None else read[torch.from_numpy(stored)]
            )
            first = sum(product.rows[: place.part])
            at = slice(first, first + len(read))
            own[at] = read - base.biases[place.weight][at]

    def _tensor(self, name: str) -> torch.Tensor:
        return read_tensor(self._file, name)
