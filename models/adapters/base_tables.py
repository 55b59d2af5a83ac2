"""Tables of the base that an adapter's file has beside its factors: the same, or it is refused.

PEFT saves the base's own embedding and head, as `MODULE.base_layer.weight`, with an adapter that
has factors of either (`save_embedding_layers` of huggingface/peft, version 0.21,
src/peft/utils/save_and_load.py), and puts them in the place of the base's when it loads that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from tokenpod.models.checkpoints.checkpoint import files_of
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.tensor_file import DTYPES, Rest, TensorFile

#: What names of such tensors end in.
BASE = ".base_layer.weight"
#: Of the base's table, read at once.
_PIECE_BYTES = 2 << 20
_KINDS = ("F32", "F16", "BF16")


def check_table(
    file: TensorFile,
    name: str,
    folder: Path,
    stored: Collection[str],
    rows: range,
    rest: Rest,
) -> None:
    """Raise ModelError unless these rows of a table are the base's, but for rounding.

    Args:
        file: of the adapter, whose tensor has the shape of the base's table.
        name: of the table in it.
        folder: of the base's checkpoint.
        stored: names that the checkpoint may have for it.
        rows: to be compared.
        rest: between pieces.
    """
    with _found(folder, stored, rest) as (base, base_name):
        entry, base_entry = file.entries[name], base.entries[base_name]
        if entry.kind not in _KINDS:
            raise ModelError(f"{file.name}: {name} holds {entry.kind} numbers")
        if base_entry.shape != entry.shape:
            raise ModelError(
                f"{file.name}: {name} is {list(entry.shape)}; the base's is"
                f" {list(base_entry.shape)}"
            )
        shape = entry.shape[1:]
        step = max(_PIECE_BYTES // (shape[0] * DTYPES[base_entry.kind].itemsize), 1)
        for first in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - first)
            own = torch.empty((count, *shape), dtype=DTYPES[entry.kind])
            other = torch.empty((count, *shape), dtype=DTYPES[base_entry.kind])
            file.read(own, name, first, shape)
            base.read(other, base_name, first, shape)
            if not _same(own, other):
                raise ModelError(
                    f"{file.name}: {name} is not the base's own in rows {first} to"
                    f" {first + count - 1}: a table of an adapter's own is one of modules_to_save"
                )
            rest()


def _same(own: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one of the two is the other, rounded to its kind of numbers if need be."""
    return torch.equal(own, other.to(own.dtype)) or torch.equal(own.to(other.dtype), other)


@contextmanager
def _found(folder: Path, names: Collection[str], rest: Rest) -> Iterator[tuple[TensorFile, str]]:
    """The base's file that has a tensor of one of these names, and which."""
    for path in files_of(folder):
        with closing(TensorFile(path, rest=rest)) as file:
            name = next((name for name in names if name in file.entries), None)
            if name is not None:
                yield file, name
                return
    raise ModelError(f"{folder}: there is no tensor {' or '.join(names)} to compare with")
