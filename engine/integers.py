"""All integers of a step in one piece of memory, so that one copy takes them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenpod.core.plan import RowWork

#: In place of a token: the one that the row sampled last, which the device knows.
LAST = -1

#: Fields begin at multiples of so many words (128 bytes): Triton compiles a kernel once more for a
#: pointer that is aligned otherwise.
ALIGNMENT = 16

#: A numpy array where the host fills them in, a tensor where the device reads them.
Array = Any


@dataclass(frozen=True, slots=True)
class Counts:
    """How long a step's fields are: T tokens, B rows, n rows that sample, numbers about tiles."""

    tokens: int
    rows: int
    samples: int
    tiles: int = 0

    @property
    def words(self) -> int:
        """int64 words that hold all fields."""
        return sum(_words(bits, length) for bits, length in self.fields)

    @property
    def fields(self) -> list[tuple[int, int]]:
        """Bits of a number and how many, in the order of `Integers`."""
        wide = [(64, self.tokens)] * 4 + [(64, self.samples)] * 3
        return [*wide, (32, self.rows), (32, self.rows), (32, self.rows + 1), (32, self.tiles)]

    @classmethod
    def decode(cls, rows: int) -> Counts:
        """Of a step in which every row processes one token and samples the next."""
        return cls(rows, rows, rows)


@dataclass(frozen=True, slots=True)
class Integers:
    """Views of one int64 array."""

    #: [T] int64 each; `t_token` may be LAST.
    t_token: Array
    t_position: Array
    t_slot: Array
    t_row: Array
    #: [n] int64 each: which token, row and output number a sample belongs to.
    logit_index: Array
    sample_row: Array
    sample_position: Array
    #: [B], [B], [B + 1] int32.
    b_row: Array
    b_context: Array
    b_start: Array
    #: Of captured steps: see `ops.TileExtends`.
    tiles: Array


def views(words: Array, counts: Counts) -> Integers:
    """The fields in an int64 numpy array or tensor of at least `counts.words`."""
    narrow = torch.int32 if isinstance(words, torch.Tensor) else np.int32
    at, fields = 0, []
    for bits, length in counts.fields:
        end = at + _words(bits, length)
        field = words[at:end] if bits == 64 else words[at:end].view(narrow)
        fields.append(field[:length])
        at = end
    return Integers(*fields)


def fill(into: Integers, works: Sequence[RowWork]) -> None:
    """Write what `works` say at the beginning of the fields, which may be longer (see `pad`)."""
    lengths = np.fromiter((len(work.slots) for work in works), np.int64, len(works))
    rows = np.fromiter((work.row for work in works), np.int64, len(works))
    firsts = np.fromiter((work.start for work in works), np.int64, len(works))
    starts = np.zeros(len(works) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    tokens = int(starts[-1])
    np.concatenate([work.slots for work in works], out=into.t_slot[:tokens])
    into.t_row[:tokens] = np.repeat(rows, lengths)
    into.t_position[:tokens] = np.arange(tokens) + np.repeat(firsts - starts[:-1], lengths)
    into.b_row[: len(works)] = rows
    into.b_start[: len(starts)] = starts
    into.b_context[: len(works)] = firsts + lengths
    into.t_token[:tokens] = LAST
    for i, work in enumerate(works):
        if work.tokens is not None:
            into.t_token[starts[i] : starts[i + 1]] = work.tokens
    which = [i for i, work in enumerate(works) if work.samples]
    into.logit_index[: len(which)] = starts[1:][which] - 1
    into.sample_row[: len(which)] = rows[which]
    into.sample_position[: len(which)] = [works[i].output_index for i in which]


def pad(into: Integers, works: Sequence[RowWork], *, padding_row: int, sink: int) -> None:
    """Fill what `works` leave of a longer, captured step: tokens and rows that change nothing.

    Rows with several tokens are known to the device by their tiles only.

    Args:
        into: fields that `fill` has filled.
        works: what it filled them with.
        padding_row: a row that belongs to nobody.
        sink: the slot that padding writes to.
    """
    tokens = sum(len(work.slots) for work in works)
    into.t_token[tokens:] = 0
    into.t_position[tokens:] = 0
    into.t_slot[tokens:] = sink
    into.t_row[tokens:] = padding_row
    samples = sum(work.samples for work in works)
    into.logit_index[samples:] = 0
    into.sample_row[samples:] = padding_row
    into.sample_position[samples:] = 0
    singles = sum(len(work.slots) == 1 for work in works)
    into.b_row[singles:] = padding_row
    into.b_context[singles:] = 0
    into.b_start[singles:] = singles


def _words(bits: int, length: int) -> int:
    """int64 words that hold `length` numbers, up to the next field."""
    words = -(-length * bits // 64)
    return -(-words // ALIGNMENT) * ALIGNMENT
