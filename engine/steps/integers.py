"""All integers of a step in one piece of memory, so that one copy takes them to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.core.plan import GIVEN, StepPlan
from tokenpod.engine.steps.rounds import rounds

#: Fields begin at multiples of so many words (128 bytes): Triton compiles a kernel once more for a
#: pointer that is aligned otherwise.
ALIGNMENT = 16

Ints = npt.NDArray[np.int64]

#: A numpy array where the host fills them in, a tensor where the device reads them.
Array = Any


@dataclass(frozen=True, slots=True)
class Counts:
    """How long a step's fields are: T tokens, B rows, n rows that sample, numbers about tiles.

    Rows that sample several tokens sample `drafts` more than one each.
    """

    tokens: int
    rows: int
    samples: int
    tiles: int = 0
    drafts: int = 0
    #: Whether there is a column of adapters.
    adapters: bool = False
    #: Whether tokens have window slots.
    windows: bool = False
    #: Whether each token is a row, see `flatten`.
    flat: bool = False

    @property
    def words(self) -> int:
        """int64 words that hold all fields."""
        return sum(_words(bits, length) for bits, length in self.fields)

    @property
    def fields(self) -> list[tuple[int, int]]:
        """Bits of a number and how many, in the order of `Integers`."""
        wide = [self.tokens] * 4 + [self.samples + self.drafts, self.samples, self.samples]
        wide += [self.tokens * self.adapters, self.tokens * self.windows]
        narrow = [self.rows, self.rows, self.rows + 1, self.tiles]
        return [*((64, length) for length in wide), *((32, length) for length in narrow)]

    @classmethod
    def of(cls, plan: StepPlan, *, windows: bool) -> Counts:
        """Of a step that nothing is added to."""
        adapters = len(plan.r_adapter) > 0
        own = plan.tokens, plan.rows, plan.sampling, 0, plan.drafts
        return cls(*own, adapters=adapters, windows=windows)

    @classmethod
    def decode(cls, rows: int) -> Counts:
        """Of a step in which every row processes one token and samples the next."""
        return cls(rows, rows, rows)


@dataclass(frozen=True, slots=True)
class Integers:
    """Views of one int64 array."""

    #: [T] int64 each; `t_token` may be `plan.LAST`, and is 0 where an embedding is given.
    t_token: Array
    t_place: Array
    t_slot: Array
    t_row: Array
    #: [n + drafts] int64: which tokens are followed by one that is sampled: a row's first, then
    #: round by round the others.
    logit_index: Array
    #: [n] int64 each: which row and output number a row's first sample belongs to.
    sample_row: Array
    sample_position: Array
    #: [T] int64 each, or empty.
    t_adapter: Array
    t_window: Array
    #: [B], [B], [B + 1] int32.
    b_row: Array
    b_context: Array
    b_start: Array
    #: Of captured steps: see `ops.StepTiles`.
    tiles: Array


def views(words: Array, counts: Counts) -> Integers:
    """The fields in an int64 numpy array or tensor of at least `counts.words`, its last axis."""
    narrow = torch.int32 if isinstance(words, torch.Tensor) else np.int32
    at, fields = 0, []
    for bits, length in counts.fields:
        end = at + _words(bits, length)
        field = words[..., at:end]
        fields.append((field if bits == 64 else field.view(narrow))[..., :length])
        at = end
    return Integers(*fields)


class StepWords:
    """Memory for the integers of one step after the other.

    Args:
        words: int64, an array or a tensor, of at least the words of any step.
    """

    def __init__(self, words: Array) -> None:
        self.words = words
        self._last: tuple[Counts, Integers] | None = None

    def fit(self, counts: Counts) -> bool:
        """Whether there are enough words."""
        as_before = self._last is not None and self._last[0] == counts
        return as_before or counts.words <= len(self.words)

    def of(self, counts: Counts) -> Integers:
        """See `views`. Most steps are as long as the one before: they share its views."""
        if self._last is None or self._last[0] != counts:
            self._last = counts, views(self.words, counts)
        return self._last[1]


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
        into.t_place[:tokens] = plan.r_start
    else:
        into.t_row[:tokens] = np.repeat(plan.r_row, plan.r_tokens)
        offsets = np.repeat(plan.r_start - starts[:-1], plan.r_tokens)
        np.add(offsets, np.arange(tokens), out=into.t_place[:tokens])
    if plan.embeds:
        into.t_token[given_tokens(plan)] = 0
    if len(into.t_adapter):
        adapters = np.repeat(plan.r_adapter, plan.r_tokens) if len(plan.r_adapter) else 0
        into.t_adapter[:tokens] = adapters
    if plan.drafts:
        _fill_rounds(into, plan)
    elif plan.sampling == rows:
        np.subtract(starts[1:], 1, out=into.logit_index[:rows])
        into.sample_row[:rows] = plan.r_row
        into.sample_position[:rows] = plan.r_output
    else:
        which = np.flatnonzero(plan.r_samples)
        n = len(which)
        into.logit_index[:n] = starts[which + 1] - 1
        into.sample_row[:n] = plan.r_row[which]
        into.sample_position[:n] = plan.r_output[which]


def _fill_rounds(into: Integers, plan: StepPlan) -> None:
    at = 0
    for turn in rounds(plan):
        end = at + len(turn.rows)
        into.logit_index[at:end] = turn.behind
        if turn.place == 0:
            into.sample_row[:end] = plan.r_row[turn.rows]
            into.sample_position[:end] = plan.r_output[turn.rows]
            end = len(into.sample_row)
        at = end


def given_tokens(plan: StepPlan) -> Ints:
    """[g] which tokens of a plan have no id but a given embedding."""
    return np.flatnonzero(plan.t_token <= GIVEN)


def rows_of(part: Ints | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[m, width] a part of a plan's `given`, in the model's type."""
    if isinstance(part, torch.Tensor):
        return part.to(dtype)
    if part.dtype.itemsize == 2:
        return torch.from_numpy(part.astype(np.int16)).view(dtype)
    return torch.tensor(part, dtype=dtype)


def numbers_of(part: Ints | torch.Tensor) -> npt.NDArray[Any]:
    """The same for a follower: float32, or the bits of a type of half the size."""
    if isinstance(part, np.ndarray):
        return part
    return part.view(torch.int16).numpy() if part.itemsize == 2 else part.float().numpy()


def pad(
    into: Integers, plan: StepPlan | None, *, padding_row: int, sink: int, window_sink: int = 0
) -> None:
    """Fill what a plan leaves of a longer, captured step: tokens and rows that change nothing.

    Rows with several tokens are known to the device by their tiles only.

    Args:
        into: fields that `fill` has filled.
        plan: what it filled them with; None: nothing.
        padding_row: a row that belongs to nobody.
        sink: the slot that padding writes to.
        window_sink: the same of window slots, where tokens have any.
    """
    tokens, samples, drafts, singles = 0, 0, 0, 0
    room_for_drafts = len(into.logit_index) > len(into.sample_row)
    if plan is not None:
        tokens, singles = plan.tokens, plan.singles
        samples = plan.sampling
        drafts = plan.drafts if room_for_drafts else 0
    into.t_token[tokens:] = 0
    into.t_place[tokens:] = 0
    into.t_slot[tokens:] = sink
    into.t_row[tokens:] = padding_row
    # What is noted of a row's samples must not be another token's.
    sampled = into.logit_index[0] if samples else 0
    into.logit_index[samples : len(into.sample_row)] = sampled
    if room_for_drafts:
        into.logit_index[len(into.sample_row) + drafts :] = sampled
    into.sample_row[samples:] = padding_row
    into.sample_position[samples:] = 0
    into.t_adapter[tokens:] = 0
    into.t_window[tokens:] = window_sink
    into.b_row[singles:] = padding_row
    into.b_context[singles:] = 0
    into.b_start[singles:] = singles


def flatten(into: Integers, plan: StepPlan) -> None:
    """Make each token a row of its own, whose context ends with it: fields are filled and padded.

    Keys and values of a step are stored before any is read.
    """
    n = plan.tokens
    into.b_row[:n] = into.t_row[:n]
    np.add(into.t_place[:n], 1, out=into.b_context[:n], casting="same_kind")
    into.b_start[:n] = np.arange(n)
    into.b_start[n:] = n


def _words(bits: int, length: int) -> int:
    """int64 words that hold `length` numbers, up to the next field."""
    words = -(-length * bits // 64)
    return -(-words // ALIGNMENT) * ALIGNMENT
