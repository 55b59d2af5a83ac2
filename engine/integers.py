"""All integers of a step in one piece of memory, so that one copy takes them to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.core.plan import StepPlan

#: Fields begin at multiples of so many words (128 bytes): Triton compiles a kernel once more for a
#: pointer that is aligned otherwise.
ALIGNMENT = 16

Ints = npt.NDArray[np.int64]

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

    #: [T] int64 each; `t_token` may be `plan.LAST`.
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


def fill(into: Integers, plan: StepPlan) -> None:
    """Write what a plan says at the beginning of the fields, which may be longer (see `pad`)."""
    rows, tokens = plan.rows, plan.tokens
    starts = into.b_start[: rows + 1]
    starts[0] = 0
    np.cumsum(plan.r_tokens, out=starts[1:])
    into.b_row[:rows] = plan.r_row
    np.add(plan.r_start, plan.r_tokens, out=into.b_context[:rows])
    into.t_token[:tokens] = plan.t_token
    into.t_slot[:tokens] = plan.t_slot
    if rows == tokens:
        into.t_row[:tokens] = plan.r_row
        into.t_position[:tokens] = plan.r_start
    else:
        into.t_row[:tokens] = np.repeat(plan.r_row, plan.r_tokens)
        offsets = np.repeat(plan.r_start - starts[:-1], plan.r_tokens)
        np.add(offsets, np.arange(tokens), out=into.t_position[:tokens])
    which, place = sampled(plan)
    samples = len(which)
    into.logit_index[:samples] = starts[which + 1] - plan.r_samples[which] + place
    into.sample_row[:samples] = plan.r_row[which]
    into.sample_position[:samples] = plan.r_output[which] + place


def sampled(plan: StepPlan) -> tuple[Ints, Ints]:
    """[n] for each token that is sampled: its row of the step, and which of the row's it is."""
    if not (plan.r_samples > 1).any():
        which = np.flatnonzero(plan.r_samples)
        return which, np.zeros_like(which)
    which = np.repeat(np.arange(plan.rows), plan.r_samples)
    firsts = np.cumsum(plan.r_samples) - plan.r_samples
    return which, np.arange(len(which)) - firsts[which]


def pad(into: Integers, plan: StepPlan | None, *, padding_row: int, sink: int) -> None:
    """Fill what a plan leaves of a longer, captured step: tokens and rows that change nothing.

    Rows with several tokens are known to the device by their tiles only.

    Args:
        into: fields that `fill` has filled.
        plan: what it filled them with; None: nothing.
        padding_row: a row that belongs to nobody.
        sink: the slot that padding writes to.
    """
    tokens, samples, singles = 0, 0, 0
    if plan is not None:
        tokens, samples, singles = plan.tokens, int(plan.r_samples.sum()), plan.singles
    into.t_token[tokens:] = 0
    into.t_position[tokens:] = 0
    into.t_slot[tokens:] = sink
    into.t_row[tokens:] = padding_row
    into.logit_index[samples:] = 0
    into.sample_row[samples:] = padding_row
    into.sample_position[samples:] = 0
    into.b_row[singles:] = padding_row
    into.b_context[singles:] = 0
    into.b_start[singles:] = singles


def _words(bits: int, length: int) -> int:
    """int64 words that hold `length` numbers, up to the next field."""
    words = -(-length * bits // 64)
    return -(-words // ALIGNMENT) * ALIGNMENT
