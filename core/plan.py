"""What the leader tells every executor about one step: columns of numbers in one buffer.

The scheduler fills them once. Executors read views of them, on the leader and, from the same bytes,
on every follower.

    r_  one number per row of the step    t_  one per token, row after row    n_  one per new row

Columns that few steps need (adapters, masks, copies, given embeddings) are empty in the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenpod.core.new_row import NewRow

Ints = npt.NDArray[np.int32]

Floats = npt.NDArray[np.float32]

#: In place of a token: the one that the row sampled last; in place of a draft: none is known yet.
LAST = -1
#: From here downwards, in place of a token: row `GIVEN - token` of the step's given embeddings,
#: those of the plan before those that adapters have.
GIVEN = -2

#: In place of a sampled token: none was, since a draft before it was wrong or its mask was late.
UNSAMPLED = -2


class Counts(NamedTuple):
    """How long a plan's columns are; its header has these numbers in this order."""

    rows: int
    tokens: int
    #: Prompt tokens whose log probabilities are asked for.
    scored: int = 0
    freed: int = 0
    new: int = 0
    #: Slots of new rows' cached prefixes.
    prefix: int = 0
    copies: int = 0
    #: As many as rows, or none.
    adapters: int = 0
    masked: int = 0
    #: Given embeddings, and how many numbers one has.
    given: int = 0
    width: int = 0
    #: Adapters that are put into slots.
    puts: int = 0
    #: Tokens whose embeddings an adapter has, and slots of tokens whose keys and values one has.
    soft: int = 0
    ready: int = 0
    #: 1 or none: copies that it relies on.
    awaited: int = 0

    @property
    def words(self) -> int:
        """Words of all columns together."""
        return (
            6 * self.rows
            + 2 * self.tokens
            + self.scored
            + self.freed
            + 3 * self.new
            + self.prefix
            + 2 * self.copies
            + self.adapters
            + self.masked
            + self.given * self.width
            + 2 * (self.puts + self.soft)
            + 3 * self.ready
            + self.awaited
        )


_NOTHING: Ints = np.empty(0, np.int32)
_NO_VECTORS: Floats = np.empty((0, 0), np.float32)

#: The buffer begins with the step's number, in two halves, and the counts.
_HEADER = 2 + len(Counts._fields)


class StepPlan:
    """One step.

    Rows with a single token come first; of these, those with the most context before others.

    Args:
        buffer: header and columns, int32.
        asks: of each new row; empty on followers.
    """

    def __init__(self, buffer: Ints, asks: Sequence[NewRow] = ()) -> None:
        self.buffer = buffer
        self.asks = asks
        low, high, *counts = buffer[:_HEADER].tolist()
        self.step = high << 31 | low
        rows, tokens, scored, freed, new, prefix, *fewer = counts
        at = _HEADER

        def column(length: int) -> Ints:
            nonlocal at
            at += length
            return buffer[at - length : at]

        self.r_row = column(rows)
        #: Position of the first token.
        self.r_start = column(rows)
        self.r_tokens = column(rows)
        #: Of how many of its last positions a token is sampled; the first one sampled is the
        #: sequence's output number `r_output`.
        self.r_samples = column(rows)
        self.r_output = column(rows)
        #: For how many of its tokens the log probability of the one that follows is asked for;
        #: `scored_token` has those that follow, row after row.
        self.r_scored = column(rows)
        #: A token's id, `LAST`, or `GIVEN` and below. Drafts that are `LAST` the executor finds; it
        #: has entered them here by the time that the step's results are there.
        self.t_token = column(tokens)
        #: Where keys and values go.
        self.t_slot = column(tokens)
        self.scored_token = column(scored)
        #: Rows to forget first.
        self.freed = column(freed)
        #: Rows that sequences take, their `NewRow.flags`, and how many tokens of their prompts were
        #: found in the cache, at which slots.
        self.n_row = column(new)
        self.n_flags = column(new)
        self.n_prefix = column(new)
        self.prefix_slot = column(prefix)
        #: Keys and values to be copied before anything else, from slot to slot: one of the two is
        #: behind the pool's last one, in the host's memory. First all go out that do, then all come
        #: in that do, which may take longer than the step.
        self.copy_from = self.copy_to = _NOTHING
        #: Empty, or [1]: what was to come in with the step so many steps ago, and before, must be
        #: there before anything of this step is read or copied (0: it is this step).
        self.awaited = _NOTHING
        #: Adapters to be put into slots before anything else: slots, from 1, and adapters' numbers.
        self.put_slot = self.put_adapter = _NOTHING
        #: Empty if no row has one: the slot of each row's adapter, from 1; 0: none.
        self.r_adapter = _NOTHING
        #: Empty if no row is: whether a row is sampled under a mask, which comes after the plan.
        self.r_masked = _NOTHING
        #: [given, width] what stands in for rows of the embedding's table.
        self.given: Floats = _NO_VECTORS
        #: What follows them: numbers of adapters, and which of each one's virtual tokens.
        self.soft_adapter = self.soft_index = _NOTHING
        #: Slots that get the keys and values of adapters' virtual tokens before anything else.
        self.ready_slot = self.ready_adapter = self.ready_index = _NOTHING
        if any(fewer):
            copies, adapters, masked, given, width, puts, soft, ready, awaited = fewer
            self.copy_from, self.copy_to = column(copies), column(copies)
            self.r_adapter, self.r_masked = column(adapters), column(masked)
            self.given = column(given * width).view(np.float32).reshape(given, width)
            self.put_slot, self.put_adapter = column(puts), column(puts)
            self.soft_adapter, self.soft_index = column(soft), column(soft)
            self.ready_slot, self.ready_adapter = column(ready), column(ready)
            self.ready_index = column(ready)
            self.awaited = column(awaited)
        if at != len(buffer):
            raise ValueError(f"a step's plan of {len(buffer)} words; its columns take {at}")

    @classmethod
    def empty(cls, step: int, counts: Counts, asks: Sequence[NewRow] = ()) -> StepPlan:
        """A plan whose columns are yet to be filled."""
        buffer = np.empty(_HEADER + counts.words, np.int32)
        buffer[:_HEADER] = (step & 0x7FFFFFFF, step >> 31, *counts)
        return cls(buffer, asks)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        """What `to_bytes` wrote. Raises ValueError for what it can't have written."""
        buffer = np.frombuffer(data, "<i4")
        if len(buffer) < _HEADER or (buffer[:_HEADER] < 0).any():
            raise ValueError(f"a step's plan of {len(buffer)} words without a header")
        return cls(buffer.astype(np.int32))

    def to_bytes(self) -> bytes:
        """Little-endian, without `asks`."""
        return self.buffer.astype("<i4", copy=False).tobytes()

    @property
    def rows(self) -> int:
        """B."""
        return len(self.r_row)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.t_token)

    @property
    def waits_for_masks(self) -> bool:
        """Whether all rows that are sampled wait for their masks, and there are some."""
        return len(self.r_masked) > 0 and bool((self.r_masked[self.r_samples > 0] != 0).all())

    @property
    def embeds(self) -> bool:
        """Whether some tokens have an embedding in place of an id."""
        return len(self.given) + len(self.soft_index) > 0

    @property
    def singles(self) -> int:
        """Leading rows with one token."""
        return self.rows if self.rows == self.tokens else int((self.r_tokens == 1).sum())

    # All parts of a turn ask these, once the columns have been filled.

    @cached_property
    def sampling(self) -> int:
        """How many rows are sampled."""
        return int(np.count_nonzero(self.r_samples))

    @cached_property
    def samples(self) -> int:
        """How many tokens are sampled."""
        return int(self.r_samples.sum())

    @property
    def drafts(self) -> int:
        """How many of them are sampled behind drafts: besides each row's first."""
        return self.samples - self.sampling


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A row of a plan that is written by hand: warm-up steps, tests."""

    row: int
    #: Position of the first token.
    start: int
    #: [n] where keys and values go.
    slots: Sequence[int] | npt.NDArray[Any]
    #: The n tokens, of which those from `GIVEN` downwards are rows of `given`; None: the one that
    #: the row sampled last.
    tokens: Sequence[int] | None = None
    #: Of how many of the last positions a token is sampled, from output number `output` on.
    samples: int = 1
    output: int = 0
    #: What follows the first of them, where log probabilities are asked for.
    following: Sequence[int] = ()
    #: The sequence that takes the row with this step, and where its cached prefix lies.
    new: NewRow | None = None
    prefix: Sequence[int] | npt.NDArray[Any] = ()
    adapter: int = 0
    masked: bool = False
    #: [m, width]
    given: Floats | None = None


def plan_of(
    step: int,
    rows: Sequence[PlanRow],
    freed: Sequence[int] = (),
    copies: Sequence[tuple[int, int]] = (),
    puts: Sequence[tuple[int, int]] = (),
    awaited: Sequence[int] = (),
) -> StepPlan:
    """A plan of these rows; those with a single token come first.

    `copies`: slots from and to; `puts`: slots of adapters, and their numbers; `awaited`: see
    `StepPlan`.
    """
    fresh = [(row, row.new) for row in rows if row.new is not None]
    given = [row.given for row in rows if row.given is not None]
    counts = Counts(
        rows=len(rows),
        tokens=sum(len(row.slots) for row in rows),
        scored=sum(len(row.following) for row in rows),
        freed=len(freed),
        new=len(fresh),
        prefix=sum(len(row.prefix) for row, _ in fresh),
        copies=len(copies),
        adapters=len(rows) if any(row.adapter for row in rows) else 0,
        masked=len(rows) if any(row.masked for row in rows) else 0,
        given=sum(map(len, given)),
        width=given[0].shape[1] if given else 0,
        puts=len(puts),
        awaited=len(awaited),
    )
    plan = StepPlan.empty(step, counts, [new for _, new in fresh])
    plan.r_row[:] = [row.row for row in rows]
    plan.r_start[:] = [row.start for row in rows]
    plan.r_tokens[:] = [len(row.slots) for row in rows]
    plan.r_samples[:] = [row.samples for row in rows]
    plan.r_output[:] = [row.output for row in rows]
    plan.r_scored[:] = [len(row.following) for row in rows]
    plan.t_token[:] = [token for row in _numbered(rows) for token in row]
    plan.t_slot[:] = [slot for row in rows for slot in row.slots]
    plan.scored_token[:] = [token for row in rows for token in row.following]
    plan.freed[:] = freed
    plan.n_row[:] = [row.row for row, _ in fresh]
    plan.n_flags[:] = [new.flags for _, new in fresh]
    plan.n_prefix[:] = [len(row.prefix) for row, _ in fresh]
    plan.prefix_slot[:] = [slot for row, _ in fresh for slot in row.prefix]
    plan.copy_from[:] = [slot for slot, _ in copies]
    plan.copy_to[:] = [slot for _, slot in copies]
    plan.put_slot[:] = [slot for slot, _ in puts]
    plan.put_adapter[:] = [adapter for _, adapter in puts]
    plan.awaited[:] = awaited
    if counts.adapters:
        plan.r_adapter[:] = [row.adapter for row in rows]
    if counts.masked:
        plan.r_masked[:] = [row.masked for row in rows]
    if given:
        np.concatenate(given, out=plan.given)
    return plan


def _numbered(rows: Sequence[PlanRow]) -> Iterator[list[int]]:
    """Each row's tokens, rows of given embeddings numbered throughout the step."""
    given = 0
    for row in rows:
        yield [token - given if token <= GIVEN else token for token in row.tokens or [LAST]]
        given += 0 if row.given is None else len(row.given)
