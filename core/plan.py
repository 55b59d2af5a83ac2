"""What the leader tells every executor about one step: columns of numbers in one buffer.

`StepPlan` declares each column once. The scheduler writes a plan in one go (`StepPlan.of`), and
nobody changes it afterwards. Executors read views of it, on the leader and, from the same bytes, on
every follower.

    r_  one number per row of the step    t_  one per token, row after row    n_  one per new row

Columns that few steps need (adapters, masks, copies, given embeddings) are empty in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Final, get_type_hints

import numpy as np
import numpy.typing as npt

from tokenpod.core.new_row import NewRow

Ints = npt.NDArray[np.int32]

Floats = npt.NDArray[np.float32]

NDArray = npt.NDArray[Any]

#: In place of a token: the one that the row sampled last; in place of a draft: none is known yet.
LAST = -1
#: From here downwards, in place of a token: row `GIVEN - token` of the step's given embeddings,
#: those of the plan before those that adapters have.
GIVEN = -2

#: In place of a sampled token: none was, since a draft before it was wrong or its mask was late.
UNSAMPLED = -2

# What a column has a number for. Columns of the same are equally long.
_PerRow = Annotated[Ints, "rows"]
_PerToken = Annotated[Ints, "tokens"]
_PerTokenInWindow = Annotated[Ints, "tokens, if they have window slots"]
_PerScoring = Annotated[Ints, "rows, if any is scored"]
_PerScored = Annotated[Ints, "scored tokens of prompts"]
_PerFreed = Annotated[Ints, "freed rows"]
_PerNew = Annotated[Ints, "new rows"]
_PerShifted = Annotated[Ints, "new rows, if positions of any are not its places"]
_PerOwnPosition = Annotated[Ints, "tokens of prompts that bring positions"]
_PerPrefix = Annotated[Ints, "slots of cached prefixes"]
_PerPrefixInWindow = Annotated[Ints, "slots of cached prefixes, if they have window slots"]
_PerSaved = Annotated[Ints, "rows' states that are kept"]
_PerLoaded = Annotated[Ints, "rows that begin with kept states"]
_PerCopy = Annotated[Ints, "copies"]
_PerAdapted = Annotated[Ints, "rows, if any has an adapter"]
_PerMasked = Annotated[Ints, "rows, if any is masked"]
_PerMutual = Annotated[Ints, "rows, if tokens of any see each other"]
_PerPut = Annotated[Ints, "adapters that are put into slots"]
_PerSoft = Annotated[Ints, "tokens with an adapter's embedding"]
_PerReady = Annotated[Ints, "slots filled by an adapter"]
_PerReadyInWindow = Annotated[Ints, "slots filled by an adapter, if they have window slots"]
_PerAwaited = Annotated[Ints, "1, if copies are awaited"]


_NOTHING: Final[Ints] = np.empty(0, np.int32)


class StepPlan:
    """One step.

    Rows with a single token come first; of these, those with the most context before others.

    Args:
        buffer: int32: a header of lengths, and the columns in the order of their declaration. It
            is write-protected from now on.
        asks: of each new row; empty on followers.
        given: see there.

    Raises:
        ValueError: the buffer is not as long as it says.
    """

    # Read by the model and the sampler, in every step.
    r_row: _PerRow
    #: Place of the first token.
    r_start: _PerRow
    r_tokens: _PerRow
    #: Of how many of its last positions a token is sampled; the first one sampled is the sequence's
    #: output number `r_output`.
    r_samples: _PerRow
    r_output: _PerRow
    #: A token's id, `LAST`, or `GIVEN` and below. Drafts that are `LAST` the executor finds:
    #: `StepResult.drafts` has them.
    t_token: _PerToken
    #: Where keys and values go.
    t_slot: _PerToken
    #: The same in layers with a window, where these have slots of their own.
    t_window: _PerTokenInWindow
    #: For how many of a row's tokens the log probability of the one that follows is asked for;
    #: `scored_token` has those that follow, row after row.
    r_scored: _PerScoring
    scored_token: _PerScored

    # Read by the executor, before the step.
    #: Rows to forget first.
    freed: _PerFreed
    #: Rows that sequences take, their `NewRow.flags`, and how many tokens of their prompts were
    #: found in the cache, at which slots.
    n_row: _PerNew
    n_flags: _PerNew
    n_prefix: _PerNew
    #: By how much positions of their tokens are further on than places, but for tokens that have
    #: `own_time` and so on: see `core.positions`.
    n_shift: _PerShifted
    prefix_slot: _PerPrefix
    #: The window slots of these; of tokens that the row does not read again, any, or -1.
    prefix_window: _PerPrefixInWindow
    #: Where rows keep states: of which rows they are copied to which snapshots, before rows are
    #: taken; and which snapshots new rows begin with. Snapshots are numbered behind all rows.
    saved_row: _PerSaved
    saved_to: _PerSaved
    loaded_from: _PerLoaded
    loaded_row: _PerLoaded
    #: Keys and values to be copied before anything else, from slot to slot: one of the two is
    #: behind the pool's last one, in the host's memory. First all go out that do, then all come in
    #: that do, which may take longer than the step.
    copy_from: _PerCopy
    copy_to: _PerCopy

    # Read by the model and the sampler, in steps that need them.
    #: The slot of each row's adapter, from 1; 0: none.
    r_adapter: _PerAdapted
    #: Whether a row is sampled under a mask, which comes after the plan.
    r_masked: _PerMasked
    #: Whether a row's tokens see those behind them, too.
    r_mutual: _PerMutual
    #: Which of the step's tokens have positions of their own, and these.
    own_token: _PerOwnPosition
    own_time: _PerOwnPosition
    own_height: _PerOwnPosition
    own_width: _PerOwnPosition

    # Read by the executor's adapters and copies, before the step.
    #: Slots, from 1, and the numbers of the adapters that are put there before anything else.
    put_slot: _PerPut
    put_adapter: _PerPut
    #: What follows `given`: numbers of adapters, and which of each one's virtual tokens.
    soft_adapter: _PerSoft
    soft_index: _PerSoft
    #: Slots that get the keys and values of adapters' virtual tokens before anything else.
    ready_slot: _PerReady
    ready_adapter: _PerReady
    ready_index: _PerReady
    ready_window: _PerReadyInWindow
    #: Empty, or [1]: what was to come in with the step so many steps ago, and before, must be there
    #: before anything of this step is read or copied (0: it is this step).
    awaited: _PerAwaited

    #: [m, width] each, one behind the other: what stands in for rows of the embedding's table, and
    #: behind that, where a model has it, what is added behind its first layers. Read by the model.
    #: Images have megabytes of them, so they stay where they are, until a plan is written for a
    #: follower: numpy's float32, or tensors of the engine. A follower has float32 or uint16, the
    #: bits of the model's type.
    given: tuple[Any, ...] = ()

    buffer: Ints
    asks: Sequence[NewRow]
    step: int

    def __init__(
        self, buffer: Ints, asks: Sequence[NewRow] = (), given: tuple[Any, ...] = ()
    ) -> None:
        buffer.flags.writeable = False
        low, high, _, _, *counts = buffer[:_HEADER].tolist()
        own = self.__dict__
        own["buffer"], own["asks"], own["step"] = buffer, asks, high << 31 | low
        own["given"] = given
        at = _HEADER
        for n, names in zip(counts, _COLUMNS, strict=True):
            if n:
                for name in names:
                    own[name] = buffer[at : at + n]
                    at += n
        if at != len(buffer):
            raise ValueError(f"a step's plan of {len(buffer)} words; its columns take {at}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a plan does not change")

    @classmethod
    def of(
        cls,
        step: int,
        asks: Sequence[NewRow] = (),
        given: Sequence[Any] = (),
        **columns: Sequence[int] | NDArray,
    ) -> StepPlan:
        """A plan of these columns, integers; those that are not there are empty.

        Raises TypeError for what is no column or not of integers, ValueError for columns of the
        same that are not equally long.
        """
        if not columns.keys() <= _NAMES:
            raise TypeError(f"a plan has no {', '.join(columns.keys() - _NAMES)}")
        counts, parts = [], []
        for names in _COLUMNS:
            n = len(columns.get(names[0], ()))
            counts.append(n)
            if n:
                parts += [columns[name] for name in names]
        kind = given[0].shape[1] * 2 + (given[0].itemsize == 2) if given else 0
        header = (step & 0x7FFFFFFF, step >> 31, sum(map(len, given)), kind, *counts)
        words = np.concatenate((header, *parts), dtype=np.int32, casting="same_kind")
        return cls(words, asks, tuple(given))

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        """What `to_bytes` wrote. Raises ValueError for what it can't have written."""
        buffer = np.frombuffer(data, "<i4")
        if len(buffer) < _HEADER or (buffer[:_HEADER] < 0).any():
            raise ValueError(f"a step's plan of {len(buffer)} words without a header")
        count, width, half = int(buffer[2]), *divmod(int(buffer[3]), 2)
        end = max(len(buffer) - (count * width + half) // (1 + half), _HEADER)
        numbers = buffer[end:].view("<u2" if half else "<f4")[: count * width]
        given = (numbers.reshape(count, width),) if len(numbers) else ()
        return cls(buffer[:end].astype(np.int32), (), given)

    def to_bytes(self, numbers: Callable[[Any], NDArray] = np.asarray) -> bytes:
        """Little-endian, without `asks`.

        `numbers`: of a tensor of the engine, float32 or the bits of a type of half the size.
        """
        parts = [self.buffer, *map(numbers, self.given)]
        data = b"".join(np.ascontiguousarray(part).data.cast("B") for part in parts)
        return data + bytes(-len(data) % 4)

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
        return bool(self.given) or len(self.soft_index) > 0

    @property
    def singles(self) -> int:
        """Leading rows with one token."""
        return self.rows if self.rows == self.tokens else int((self.r_tokens == 1).sum())

    # All parts of a turn ask these.

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


def _by_kind() -> list[list[str]]:
    """Names of columns of integers, together those of the same; both in order of declaration."""
    found: dict[str, list[str]] = {}
    for name, hint in get_type_hints(StepPlan, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            found.setdefault(hint.__metadata__[0], []).append(name)
            setattr(StepPlan, name, _NOTHING)
    return [*found.values()]


_COLUMNS: Final = _by_kind()
_NAMES: Final = frozenset(chain.from_iterable(_COLUMNS))
#: The step's number, how many `given` has, twice its width, one more if its numbers have 16 bits,
#: and the lengths of the columns.
_HEADER: Final = 4 + len(_COLUMNS)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A row of a plan that is written by hand: warm-up steps, tests."""

    row: int
    #: Place of the first token.
    start: int
    #: [n] where keys and values go.
    slots: Sequence[int] | NDArray
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
    prefix: Sequence[int] | NDArray = ()
    adapter: int = 0
    masked: bool = False
    #: [m, width]
    given: Floats | None = None
    #: Of a new row, by how much positions are further on than places.
    shift: int = 0
    #: Its tokens see each other.
    mutual: bool = False


def plan_of(
    step: int,
    rows: Sequence[PlanRow],
    freed: Sequence[int] = (),
    copies: Sequence[tuple[int, int]] = (),
    puts: Sequence[tuple[int, int]] = (),
    awaited: Sequence[int] = (),
) -> StepPlan:
    """A plan of these rows; those with a single token come first.

    `copies`: slots from and to; `puts`: slots of adapters, and their numbers; `awaited`: as in
    `StepPlan`.
    """
    fresh = [(row, row.new) for row in rows if row.new is not None]
    given = [row.given for row in rows if row.given is not None]
    return StepPlan.of(
        step,
        [new for _, new in fresh],
        r_row=[row.row for row in rows],
        r_start=[row.start for row in rows],
        r_tokens=[len(row.slots) for row in rows],
        r_samples=[row.samples for row in rows],
        r_output=[row.output for row in rows],
        r_scored=[len(row.following) for row in rows],
        t_token=[token for row in _numbered(rows) for token in row],
        t_slot=[int(slot) for row in rows for slot in row.slots],
        scored_token=[token for row in rows for token in row.following],
        freed=freed,
        n_row=[row.row for row, _ in fresh],
        n_flags=[new.flags for _, new in fresh],
        n_prefix=[len(row.prefix) for row, _ in fresh],
        n_shift=[row.shift for row, _ in fresh] if any(row.shift for row, _ in fresh) else [],
        prefix_slot=[int(slot) for row, _ in fresh for slot in row.prefix],
        copy_from=[slot for slot, _ in copies],
        copy_to=[slot for _, slot in copies],
        r_adapter=[row.adapter for row in rows] if any(row.adapter for row in rows) else [],
        r_masked=[row.masked for row in rows] if any(row.masked for row in rows) else [],
        r_mutual=[row.mutual for row in rows] if any(row.mutual for row in rows) else [],
        given=given,
        put_slot=[slot for slot, _ in puts],
        put_adapter=[adapter for _, adapter in puts],
        awaited=awaited,
    )


def _numbered(rows: Sequence[PlanRow]) -> Iterator[list[int]]:
    """Each row's tokens, rows of given embeddings numbered throughout the step."""
    given = 0
    for row in rows:
        yield [token - given if token <= GIVEN else token for token in row.tokens or [LAST]]
        given += 0 if row.given is None else len(row.given)
