"""One step: planners add rows, which are put into columns once."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import GIVEN, LAST, StepPlan
from tokenpod.core.positions import shift_of
from tokenpod.core.step_limits import StepLimits
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.pool.given import VIRTUAL
from tokenpod.scheduler.pool.radix import Slots
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.sequences.table import Ints, Table
from tokenpod.scheduler.steps.machine_times import StepSize
from tokenpod.scheduler.steps.prompt_pieces import ChosenToken, Piece

#: By the names of `StepPlan`; all arrays but where few numbers are.
Columns = dict[str, Any]

#: Columns of what is ready, and of what `States.take` returns.
_READY = "ready_slot", "ready_adapter", "ready_index"
_OWN_POSITIONS = "own_time", "own_height", "own_width"
_STATE_COPIES = ("saved_row", "saved_to"), ("loaded_from", "loaded_row")
_NOBODY: Ints = np.empty(0, np.int64)


@dataclass(frozen=True)
class Step:
    """One step: the plan, and the sequences that its rows belong to."""

    plan: StepPlan
    #: [B], by row of the plan: sequences, and their places in the table.
    sequences: list[Sequence]
    places: Ints
    #: Tokens of prompts (or of preempted sequences) in it.
    prompt_tokens: int
    #: Time of planning, in nanoseconds.
    planned_at: int
    #: Nanoseconds since the step before had settled; None: it had not, or there was nothing to do.
    gap: int | None = None
    #: Rows of the plan whose drafts are forced, and so right.
    forced: frozenset[int] = frozenset()
    #: Rows whose vectors it brings: all of their texts has been read.
    pooled: tuple[int, ...] = ()

    @cached_property
    def size(self) -> StepSize:
        """What it holds, by which its time is estimated."""
        plan = self.plan
        if not self.prompt_tokens:
            return StepSize(plan.rows, int(plan.r_start.sum()))
        tokens, starts = plan.r_tokens.astype(np.int64), plan.r_start.astype(np.int64)
        decoding = tokens == 1
        long = ~decoding
        pairs = tokens[long] * starts[long] + tokens[long] * (tokens[long] + 1) // 2
        return StepSize(
            rows=int(decoding.sum()),
            context=int(starts[decoding].sum()),
            prompt_tokens=int(tokens[long].sum()),
            pairs=int(pairs.sum()),
        )

    @cached_property
    def sampled(self) -> list[Sequence]:
        """Of each token that is sampled, in order, the sequence."""
        if self.plan.sampling == self.plan.samples == self.plan.rows:
            return self.sequences
        rows = np.arange(self.plan.rows).repeat(self.plan.r_samples)
        return [*map(self.sequences.__getitem__, rows.tolist())]

    @cached_property
    def sampled_places(self) -> Ints:
        """[n] the same, their places in the table; no row has drafts."""
        if self.plan.sampling == self.plan.rows:
            return self.places
        return self.places[self.plan.r_samples > 0]

    @cached_property
    def drafting(self) -> list[tuple[int, int]]:
        """Rows whose drafts may be wrong: the row of the plan, and which sample is its first."""
        if not self.plan.drafts:
            return []
        rows = np.flatnonzero(self.plan.r_samples > 1)
        firsts = self.plan.r_samples.cumsum() - self.plan.r_samples
        found = zip(rows.tolist(), firsts[rows].tolist(), strict=True)
        return [(row, first) for row, first in found if row not in self.forced]

    def ended(self, table: Table) -> list[Sequence]:
        """Its sequences that have ended since it was planned."""
        return [self.sequences[at] for at in table.ended[self.places].nonzero()[0].tolist()]

    def drafts_of(self, row: int) -> int:
        """How many drafts a row of the plan has."""
        return max(int(self.plan.r_samples[row]) - 1, 0)

    @cached_property
    def rows_of_firsts(self) -> dict[int, int]:
        """By the first sample of each row that is sampled, the row of the plan."""
        samples = self.plan.r_samples
        rows = np.flatnonzero(samples)
        firsts = (samples.cumsum() - samples)[rows]
        return dict(zip(firsts.tolist(), rows.tolist(), strict=True))


class StepBuilder:
    """Collects the rows of a step; `finish` puts them into columns.

    All planners fill the same step, so what it has room for is counted here.

    Args:
        kv: gives the slots.
        now: in nanoseconds.
        limits: of the step.
        free_rows: rows that no sequence has: forced tokens are sampled in their place, so that
            steps take no more memory than they would with all rows.
    """

    def __init__(self, kv: KV, now: int, limits: StepLimits, free_rows: int) -> None:
        #: Tokens of prompts (or of preempted sequences) so far, and whether there may be any.
        self.prompt_tokens, self.takes_prompts = 0, True
        #: Drafts that may still be added, forced tokens among them; and forced tokens.
        self.drafts_left = limits.drafts
        self._forced_left = free_rows
        #: Nanoseconds since the step before had settled; None: it had not, or nothing could run.
        self.gap: int | None = None
        self._kv = kv
        self._now = now
        self._limits = limits
        self._decoding: list[Sequence] = []
        self._places: list[Ints] = []
        self._slots: list[Slots] = []
        self._pieces: list[Piece] = []

    @property
    def prompt_room(self) -> int:
        """Tokens of prompts that executors have room for besides these."""
        return self._limits.prompt - PROBE_TOKENS - self.prompt_tokens

    @property
    def forced_left(self) -> int:
        """Forced tokens that may still be added."""
        return min(self._forced_left, self.drafts_left)

    @contextmanager
    def kept_drafts(self, n: int) -> Iterator[None]:
        """Reserve n of the drafts that are left for the planners that add rows later."""
        self.drafts_left -= n
        yield
        self.drafts_left += n

    def decode(self, sequences: list[Sequence], places: Ints) -> None:
        """Add the next token of sequences whose needed positions have all been launched.

        Args:
            sequences: each at most once per step.
            places: [n] int64, their places in the table.

        Raises:
            OutOfSlots: fewer slots than sequences are available.
        """
        kv, table = self._kv, self._kv.table
        slots = kv.extend_each(sequences, places)
        table.computed[places] += 1
        table.launched[places] += 1
        self._decoding += sequences
        self._places.append(places)
        self._slots.append(slots)

    def prompt(self, sequence: Sequence, n: int) -> None:
        """Add the next `n` tokens that a sequence needs computed."""
        sequence.began_at = sequence.began_at or self._now
        start = sequence.computed
        slots = self._kv.extend(sequence, n)
        sequence.computed = start + n
        sequence.launched += not sequence.prefilling
        self._pieces.append(Piece(sequence, start, slots))
        self.prompt_tokens += n
        if self._kv.states is not None:
            self._kv.states.computed(sequence)

    def draft(self, sequence: Sequence, drafts: list[int], *, forced: bool = False) -> None:
        """Add the next token of a sequence that decodes, and what may follow it.

        It has no step in flight, and is in no other one before this has settled; or with `forced`,
        nothing else can follow it.
        """
        start, n = sequence.computed, 1 + len(drafts)
        slots = self._kv.extend(sequence, n)
        sequence.computed = start + n
        sequence.launched += n
        self.drafts_left -= len(drafts)
        if forced:
            self._forced_left -= len(drafts)
        else:
            self._kv.table.drafted[sequence.place] = len(drafts)
        self._pieces.append(Piece(sequence, start, slots, drafts, forced))

    def extend_beams(self, sequences: list[Sequence]) -> None:
        """Add the last output of each beam of a search. Raises OutOfSlots."""
        tails = sequences[0].tails
        assert tails is not None
        slots = tails.extend([sequence.id for sequence in sequences], sequences[0].computed)
        for at, sequence in enumerate(sequences):
            self._pieces.append(ChosenToken(sequence, sequence.computed, slots[at : at + 1]))
            sequence.computed += 1
            sequence.launched += 1

    def fetch(self, sequence: Sequence) -> None:
        """Have what the host's memory has of a sequence copied."""
        sequence.began_at = sequence.began_at or self._now
        self._kv.fetch(sequence)

    @property
    def empty(self) -> bool:
        """Whether nothing has been added."""
        return not (self._decoding or self._pieces)

    def finish(
        self,
        number: int,
        fresh: list[Sequence],
        freed: list[int],
        puts: Listing[tuple[int, int]] = (),
        ready: Listing[tuple[int, int, int]] = (),
    ) -> Step:
        """Make the plan.

        Args:
            number: of the step.
            fresh: sequences that got a row since the last step.
            freed: rows that were given back since then.
            puts: slots of adapters, and what is to be put there first.
            ready: KV slots, and whose adapter's virtual token gets its keys and values there.

        Raises:
            AssertionError: more than executors have room for has been added.
        """
        table = self._kv.table
        ones = [piece for piece in self._pieces if len(piece.slots) == 1]
        longer = [piece for piece in self._pieces if len(piece.slots) > 1]
        sequences = self._decoding + [piece.sequence for piece in ones]
        places = _joined([*self._places, _places(ones)] if ones else self._places)
        # A GPU begins rows in this order, and what takes longest must not begin last (Graham 1969).
        order = (-table.computed[places]).argsort(kind="stable")
        sequences = [*map(sequences.__getitem__, order.tolist())]
        places = places[order]
        if longer:
            sequences += [piece.sequence for piece in longer]
            places = _joined([places, _places(longer)])
        columns = self._rows(places, longer) | self._tokens(ones, longer, order)
        if any(x.scored or x.embeds or x.sequence.spans for x in self._pieces):
            by_row = _by_row(ones, longer, order)
            self._score(columns, by_row)
            self._embed(columns, by_row, sequences)
            self._place(columns, by_row)
            if mutual := [row for row, piece in by_row if piece.mutual]:
                columns["r_mutual"] = np.zeros_like(columns["r_row"])
                columns["r_mutual"][mutual] = 1
        if table.adapted and any(sequence.adapter_slot for sequence in sequences):
            columns["r_adapter"] = [sequence.adapter_slot for sequence in sequences]
        if table.constrained:
            columns["r_masked"] = table.masked[places] * (columns["r_samples"] > 0)
        asks = [NewRow(s.request, s.stream, tuple(s.outputs)) for s in fresh]
        if fresh:
            prefixes = [self._kv.prefix_slots(sequence) for sequence in fresh]
            columns["n_row"] = [sequence.row for sequence in fresh]
            columns["n_flags"] = [new.flags for new in asks]
            columns["n_prefix"] = [*map(len, prefixes)]
            columns["prefix_slot"] = np.concatenate(prefixes)
            if any(shifts := [shift_of(sequence.request) for sequence in fresh]):
                columns["n_shift"] = shifts
        if puts:
            columns["put_slot"], columns["put_adapter"] = zip(*puts, strict=True)
        if ready:
            columns |= zip(_READY, zip(*ready, strict=True), strict=True)
        if (windows := self._kv.windows) is not None:
            for name in "t_slot", "prefix_slot", "ready_slot":
                if name in columns:
                    columns[name.replace("slot", "window")] = windows.of[np.asarray(columns[name])]
        if (states := self._kv.states) is not None:
            for names, copies in zip(_STATE_COPIES, states.take(fresh), strict=True):
                if copies:
                    columns |= zip(names, zip(*copies, strict=True), strict=True)
        if (offload := self._kv.offload) is not None:
            columns["copy_from"], columns["copy_to"], columns["awaited"] = offload.take()
        pooled = self._pooled(columns, places) if table.pooling else ()
        plan = StepPlan.of(number, asks, freed=freed, **columns)
        self._limits.check(plan)
        table.in_flight[places] += 1
        first = len(places) - len(longer)
        forced = frozenset(first + at for at, piece in enumerate(longer) if piece.forced)
        return Step(
            plan, sequences, places, self.prompt_tokens, self._now, self.gap, forced, pooled
        )

    def _pooled(self, columns: Columns, places: Ints) -> tuple[int, ...]:
        """Sample nothing behind texts that are read for their vectors; the rows that end them."""
        pooled = self._kv.table.pooled[places] * columns["r_samples"]
        columns["r_samples"] -= pooled
        return tuple(pooled.nonzero()[0].tolist())

    def _rows(self, places: Ints, longer: list[Piece]) -> Columns:
        table, ends = self._kv.table, self._kv.table.computed[places]
        tokens, samples = np.ones_like(places), (ends >= table.needed[places]).astype(np.int64)
        # `launched` counts this step's tokens already.
        outputs = table.launched[places] - 1
        if longer:  # others have no drafts
            drafts = np.array([len(piece.drafts) for piece in longer])
            tokens[-len(longer) :] = [len(piece.slots) for piece in longer]
            samples[-len(longer) :] += drafts
            outputs[-len(longer) :] -= drafts
        return {
            "r_row": table.row[places],
            "r_start": ends - tokens,
            "r_tokens": tokens,
            "r_samples": samples,
            "r_output": outputs,
        }

    def _tokens(self, ones: list[Piece], longer: list[Piece], order: Ints) -> Columns:
        """`order`: [n] of the rows with one token: decoding sequences, then `ones`."""
        tokens = np.full(len(order), LAST, np.int32)
        slots = _joined([*self._slots, *(one.slots for one in ones)] if ones else self._slots)
        if ones:
            tokens[len(order) - len(ones) :] = [one.tokens[0] for one in ones]
            tokens = tokens[order]
        slots = slots[order]
        if longer:
            tokens = np.concatenate([tokens, *(piece.tokens for piece in longer)])
            slots = np.concatenate([slots, *(piece.slots for piece in longer)])
        return {"t_token": tokens, "t_slot": slots}

    @staticmethod
    def _score(columns: Columns, by_row: list[tuple[int, Piece]]) -> None:
        """Enter the tokens after those whose log probabilities are asked for."""
        scored = {row: piece.following for row, piece in by_row if piece.scored}
        if scored:
            columns["r_scored"] = np.zeros_like(columns["r_row"])
            columns["r_scored"][[*scored]] = [*map(len, scored.values())]
            columns["scored_token"] = np.concatenate([*scored.values()])

    @staticmethod
    def _embed(
        columns: Columns, by_row: list[tuple[int, Piece]], sequences: list[Sequence]
    ) -> None:
        """Let tokens without an id name rows of the step's table; the tree's ids stay here."""
        given = [part for _, piece in by_row for part in piece.given]
        tokens, n = columns["t_token"], sum(map(len, given))
        virtual = np.flatnonzero(tokens <= VIRTUAL)
        adapters = np.array([sequence.request.adapter for sequence in sequences])
        columns["soft_adapter"] = adapters.repeat(columns["r_tokens"])[virtual]
        columns["soft_index"] = VIRTUAL - tokens[virtual]
        if given:
            columns["given"] = given
        tokens[(tokens <= GIVEN) & (tokens > VIRTUAL)] = GIVEN - np.arange(n)
        tokens[virtual] = GIVEN - n - np.arange(len(virtual))

    @staticmethod
    def _place(columns: Columns, by_row: list[tuple[int, Piece]]) -> None:
        """Enter positions of tokens whose prompts bring some."""
        found = [(row, axes) for row, piece in by_row if (axes := piece.axes) is not None]
        if not found:
            return
        firsts = columns["r_tokens"].cumsum() - columns["r_tokens"]
        tokens = [firsts[row] + np.arange(axes.shape[1]) for row, axes in found]
        columns["own_token"] = np.concatenate(tokens)
        own = np.concatenate([axes for _, axes in found], axis=1)
        columns |= zip(_OWN_POSITIONS, own, strict=True)


def _by_row(ones: list[Piece], longer: list[Piece], order: Ints) -> list[tuple[int, Piece]]:
    """Pieces of prompts with their rows of the step, rising."""
    row_of = order.argsort()[len(order) - len(ones) :]
    rows = [*row_of.tolist(), *range(len(order), len(order) + len(longer))]
    return sorted(zip(rows, [*ones, *longer], strict=True), key=itemgetter(0))


def _places(pieces: list[Piece]) -> Ints:
    return np.array([piece.sequence.place for piece in pieces], np.int64)


def _joined(parts: list[Ints]) -> Ints:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else _NOBODY
