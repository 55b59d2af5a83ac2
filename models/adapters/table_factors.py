"""Factors of the embedding and the head in an adapter's file: checked, read, and cut for one rank.

Of a head, whose weight is [vocabulary, width], PEFT keeps `lora_A` [r, width] and `lora_B`
[vocabulary, r]; of an embedding `lora_embedding_A` [r, vocabulary] and `lora_embedding_B`
[width, r]. A rank needs what belongs to its words. Where the base's head is its embedding, factors
of either leave the other as it is: an adapter whose two are tied has both in its file.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from tokenpod.models.adapters.base_tables import BASE, check_table
from tokenpod.models.adapters.config import LoraConfig
from tokenpod.models.adapters.names import DOWN, EMBEDDING_DOWN, EMBEDDING_UP, UP, module_name
from tokenpod.models.adapters.targets import EMBEDDING, Product, Targets
from tokenpod.models.adapters.virtual import read_tensor
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.tensor_file import Rest, TensorFile
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Weight

#: [r, inputs], and [r, outputs] with the scale: a rank's part, by our names.
TableFactors = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TableBase:
    """What they must fit, on one rank."""

    targets: Targets
    shard: Shard
    dtype: torch.dtype
    max_rank: int
    #: The embedding and the head, if there is room for factors of them.
    products: Mapping[str, Product]
    #: Of the base's checkpoint, with which tables in adapters are compared; None: they are not.
    folder: Path | None


def base_tables(file: TensorFile, targets: Targets) -> dict[str, str]:
    """Modules, and names of the base's own tables that an adapter's file has for them."""
    named = {
        module_name(name.removesuffix(BASE)): name for name in file.entries if name.endswith(BASE)
    }
    return {module: name for module, name in named.items() if module in targets.tables}


def read_tables(
    file: TensorFile,
    left: MutableMapping[str, str],
    config: LoraConfig,
    base: TableBase,
    rest: Rest,
) -> TableFactors:
    """The factors that there are; what is read is taken out of `left`, by the base's names.

    Raises ModelError for those of another base, of too large a rank, and where there is no room.
    """
    found: TableFactors = {}
    for module, weight in base.targets.tables.items():
        ends = (EMBEDDING_DOWN, EMBEDDING_UP) if weight.name == EMBEDDING else (DOWN, UP)
        names = [left.pop(module + end) for end in ends if module + end in left]
        if not names:
            continue
        if config.dora:
            raise ModelError(
                f"{file.name}: {names[0]}: use_dora is true, and DoRA of embedding and head is not"
                " served beside other adapters"
            )
        if not base.products:
            raise ModelError(
                f"{file.name}: {names[0]}: there is no room for LoRA on embedding and head"
                " (--lora-vocabulary takes it; --lora-fuse serves an adapter that is fused into its"
                " base)"
            )
        if len(names) < len(ends):
            raise ModelError(f"{file.name}: {names[0]}: {' and '.join(ends)} belong together")
        found[weight.name] = _read(file, module, weight, names, config, base)
        rest()
    if config.ties and base.targets.tied and len(found) == 1:
        raise ModelError(
            f"{file.name}: ensure_weight_tying is true, and of embedding and head it has factors of"
            f" the {next(iter(found))} alone"
        )
    for module, name in base_tables(file, base.targets).items():
        weight = base.targets.tables[module]
        if base.folder is not None:
            rows = base.shard.part(weight.sources[0].axes[0])
            check_table(file, name, base.folder, base.targets.stored[weight.name], rows, rest)
    return found


def _read(
    file: TensorFile,
    module: str,
    weight: Weight,
    names: list[str],
    config: LoraConfig,
    base: TableBase,
) -> tuple[torch.Tensor, torch.Tensor]:
    words, width = weight.sources[0].axes
    is_embedding, product = weight.name == EMBEDDING, base.products[weight.name]
    shape = (words.length, width.length) if is_embedding else (width.length, words.length)
    rank = checked_rank(file, module, shape, names, base.max_rank)
    rows = base.shard.part(words)
    down, up = (read_tensor(file, name) for name in names)
    # Products with a scale are rounded once, whatever the kind.
    up = ((up if up.dtype == base.dtype else up.float()) * config.scale(module, rank)).t()
    own = slice(rows.start, rows.stop)
    down, up = (down[:, own], up) if is_embedding else (down, up[:, own])
    return (
        _widened(down.to(base.dtype), product.inputs),
        _widened(up.to(base.dtype), product.outputs),
    )


def _widened(factor: torch.Tensor, numbers: int) -> torch.Tensor:
    """[r, n] and zeros for words beyond the vocabulary."""
    return functional.pad(factor, (0, numbers - factor.shape[1]))


def checked_rank(
    file: TensorFile, module: str, shape: tuple[int, int], names: list[str], most: int
) -> int:
    """The rank of a module of that many inputs and outputs, by its two tensors' shapes."""
    inputs, outputs = shape
    down, up = (file.entries[name].shape for name in names)
    if len(down) != 2 or len(up) != 2 or down[1] != inputs or up[0] != outputs:
        raise ModelError(
            f"{file.name}: {module} has lora_A {list(down)} and lora_B {list(up)}; the"
            f" base's has {inputs} inputs and {outputs} outputs"
        )
    rank = down[0]
    if up[1] != rank or not rank:
        raise ModelError(
            f"{file.name}: {module} has lora_A {list(down)} and lora_B {list(up)}:"
            " their ranks differ"
        )
    if rank > most:
        raise ModelError(
            f"{file.name}: {module} has rank {rank}; at most {most} is served (--max-adapter-rank)"
        )
    return rank
