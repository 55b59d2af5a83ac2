"""What running a step is on any device; see `executor.Executor` for the contract.

    launch:  free rows, copy slots, give rows -> note slots -> find drafts
             -> forward -> draw -> send
    sample:  draw for rows that waited for masks -> send
    wait:    receive

The executors of hosts and devices differ in where integers lie, how tokens of earlier steps are
found, which kernels draw, and in what is captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from tokenpod.core.plan import GIVEN, Ints, StepPlan
from tokenpod.core.positions import AXES
from tokenpod.engine.sampling.prompt_scores import (
    NOTHING_ELSE,
    PromptScores,
    Wanted,
    joined,
    score,
)
from tokenpod.engine.sampling.sampler import LeaderTokens, Sampler
from tokenpod.engine.steps.drafter import Drafter
from tokenpod.engine.steps.executor import Model, PooledRows
from tokenpod.engine.steps.integers import Integers, fill, given_tokens, rows_of
from tokenpod.engine.steps.mailbox import Flight, Mailbox
from tokenpod.engine.steps.offload_copies import OffloadCopies
from tokenpod.engine.steps.open_drafts import Unknown
from tokenpod.engine.steps.rounds import Drawing, Round
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.batch import (
    ForwardBatch,
    GivenEmbeddings,
    PagedRows,
    RaggedRows,
    Run,
    WindowRows,
    append_slots,
)
from tokenpod.models.pooling.head import PieceOfText, TextSoFar

#: Prompt tokens whose logits are made at a time: those of a whole prompt over a large vocabulary
#: would be gigabytes.
_SCORED_AT_ONCE = 128


class PlannedAdapters(Protocol):
    """Adapters by their numbers, as plans speak of them. All happens in the device's queue."""

    def put(self, slot: int, number: int) -> None:
        """Put an adapter into a slot, from 1."""
        ...

    def embeddings(self, numbers: Ints, indices: Ints) -> torch.Tensor:
        """[n, width] on the host: embeddings of virtual tokens, in the model's dtype."""
        ...

    def fill(
        self,
        pool: KVPool,
        slots: Ints,
        numbers: Ints,
        indices: Ints,
        window_slots: Ints | None = None,
    ) -> None:
        """Write the keys and values of virtual tokens to slots [n].

        `window_slots`: [n]; None: there are none.
        """
        ...


S = TypeVar("S", bound=Sampler | LeaderTokens)


class StepExecutor(ABC, Generic[S]):
    """One rank's model, KV pool and sampler.

    Args:
        model: what computes hidden states and logits.
        pool: keys and values; slots are given by the plans.
        sampler: for as many rows.
        rows: sequences that can be live at once.
        device: where the model is.
        row_table: [rows + 1, max_positions] int32 slots, the last row padding's; or of no size
            where runs are read.
        window_table: the same of window slots, where there may be any; None: there are none.
        copies: makes the copies that plans ask for; None: they ask for none.
        adapters: those that plans may name; None: they name none.
        draft: finds drafts that plans leave open; None: plans leave none open.
        own_positions: whether positions may be other than places, see `core.positions`.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        sampler: S,
        *,
        rows: int,
        device: torch.device,
        row_table: torch.Tensor,
        window_table: torch.Tensor | None = None,
        copies: OffloadCopies | None = None,
        adapters: PlannedAdapters | None = None,
        draft: Drafter | None = None,
        own_positions: bool = False,
    ) -> None:
        self._copies = copies
        self._adapters = adapters
        self._draft = draft
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._rows = rows
        self._device = device
        self._row_table, self._window_table = row_table, window_table
        #: What each row sampled last. The last row is padding's.
        self._last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        #: By how much each row's positions are further on than places, and what the host knows of
        #: it; None: they are the same. Padding's are.
        self._row_shift = torch.zeros_like(self._last_token) if own_positions else None
        self._shifts = np.zeros(rows + 1, np.int64)
        #: Where rows' keys and values lie, in order of position.
        self._runs: list[list[Run]] = [[] for _ in range(rows)]
        #: The same of window slots; those of positions that are not read again may be anybody's.
        self._window_runs: list[list[Run]] = [[] for _ in range(rows)]
        #: Of rows whose prompt is scored: what is asked of its tokens. Followers report nothing.
        self._wanted: dict[int, Wanted] = {}
        #: Of rows whose texts are read for their vectors: what has been. Followers report nothing.
        self._texts: dict[int, TextSoFar] = {}
        #: Drafts for the step that is being launched, see `_propose`.
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None
        #: The last step, if it may wait for masks.
        self._unsampled: Flight | None = None

    def launch(self, plan: StepPlan) -> Flight:
        """Start one step."""
        with torch.inference_mode():
            if self._unsampled is not None:
                self._unsampled.sample({})
                self._unsampled = None
            self.release(plan.freed.tolist())
            if len(plan.copy_from) or len(plan.awaited):
                assert self._copies is not None, "a plan copies to memory that there is not"
                self._copies.begin(plan)
            self._place_adapters(plan)
            if len(plan.saved_row):
                self._pool.copy_states(plan.saved_row.tolist(), plan.saved_to.tolist())
            if len(plan.n_row):
                self._take_rows(plan)
            if len(plan.loaded_row):
                self._pool.copy_states(plan.loaded_from.tolist(), plan.loaded_row.tolist())
            mailbox = self._free_mailbox(plan)
            mailbox.begin()
            if self._keeps:
                self._note_slots(plan)
            unknown = Unknown.of(plan) if plan.drafts else None
            if unknown is not None:
                assert self._draft is not None, "a plan leaves drafts open without a draft model"
                self._found = self._propose(plan, mailbox, unknown, self._draft)
                mailbox.post_drafts(self._found[1])
            flight = self._run(plan, mailbox, unknown)
            flight.copies, self._found = self._copies, None
            return flight

    def release(self, rows: Sequence[int]) -> None:
        """Forget these rows, as a plan's `freed` does."""
        if not rows:
            return
        self._pool.release_rows(rows)
        for row in rows:
            self._sampler.clear_row(row)
            self._texts.pop(row, None)
            self._runs[row], self._window_runs[row] = [], []

    # -- what devices do differently -----------------------------------------------------------

    @abstractmethod
    def _free_mailbox(self, plan: StepPlan) -> Mailbox:
        """Where the step's integers and results have room."""

    @abstractmethod
    def _note_slots(self, plan: StepPlan) -> None:
        """Note in `_runs` where the step's keys and values go."""

    @abstractmethod
    def _propose(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown, draft: Drafter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the drafts that a plan leaves open; the mailbox is marked when they are there.

        Returns which tokens of the step they are, row after row, and the drafts: [n] int64 each.
        """

    @abstractmethod
    def _run(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown | None) -> Flight:
        """Forward a step, whose rows and slots are known, and draw what need not wait."""

    @abstractmethod
    def _integers(self, plan: StepPlan, mailbox: Mailbox) -> tuple[Integers, Integers]:
        """A step's integers, filled in, and the same where the model reads them."""

    @abstractmethod
    def _resolve(self, integers: Integers) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T] tokens: in the place of `plan.LAST` what the row sampled last; and `_positions`."""

    def _paged(self, integers: Integers) -> PagedRows | None:
        """The rows for kernels that gather by pointer."""
        return None

    def _upload(self, values: np.ndarray | torch.Tensor) -> torch.Tensor:
        """The values on the device, in the order of its queue."""
        return torch.as_tensor(values)

    # -- positions -----------------------------------------------------------------------------

    def _positions(self, integers: Integers) -> torch.Tensor | None:
        """[T] int64: positions of tokens, as far as their rows say; None: they are places."""
        if self._row_shift is None:
            return None
        shifts = self._row_shift.index_select(0, integers.t_row)
        return shifts.add_(integers.t_place)

    def _take_shifts(self, plan: StepPlan) -> None:
        """Note by how much positions of new rows are further on than places."""
        if self._row_shift is None:
            return
        shifts = plan.n_shift if len(plan.n_shift) else np.zeros_like(plan.n_row)
        if (self._shifts[plan.n_row] == shifts).all():
            return
        self._shifts[plan.n_row] = shifts
        rows, found = self._upload(np.stack((plan.n_row, shifts)).astype(np.int64))
        self._row_shift.index_copy_(0, rows, found)

    def _own_positions(self, plan: StepPlan, batch: ForwardBatch) -> ForwardBatch:
        """The step, some of whose tokens bring positions of three axes."""
        columns = plan.own_token, plan.own_time, plan.own_height, plan.own_width
        numbers = self._upload(np.stack(columns).astype(np.int64))
        positions = batch.t_position.repeat(AXES, 1)
        positions.index_copy_(1, numbers[0], numbers[1:])
        return replace(batch, t_own_position=positions)

    # -- window slots --------------------------------------------------------------------------

    @property
    def _keeps(self) -> bool:
        """Whether slots matter: not where each text is read in one step."""
        return self._model.pooling is None or bool(self._pool.keys)

    @property
    def _windowed(self) -> bool:
        """Whether layers with a window have slots of their own."""
        return self._pool.window_slots > 0

    def _in_windows(self, named: Ints, slots: Ints) -> Ints:
        """[n] the window slots of slots [n]: those that a plan names.

        Plans that are written by hand name none, and nobody minds what they compute.
        """
        return np.maximum(named, 0) if len(named) else slots % self._pool.window_slots

    # -- a step --------------------------------------------------------------------------------

    def _place_adapters(self, plan: StepPlan) -> None:
        """Put adapters into slots, and their ready keys and values into the pool."""
        if not len(plan.put_slot) + len(plan.ready_slot):
            return
        assert self._adapters is not None, "a plan names adapters of a model without any"
        for slot, adapter in zip(plan.put_slot, plan.put_adapter, strict=True):
            self._adapters.put(int(slot), int(adapter))
        if len(plan.ready_slot):
            ready = plan.ready_slot, plan.ready_adapter, plan.ready_index
            windows = plan.ready_window if self._windowed else None
            self._adapters.fill(self._pool, *ready, windows)

    def _take_rows(self, plan: StepPlan) -> None:
        if self._model.pooling is None:  # else no row is sampled
            self._sampler.take_rows(plan)
        self._take_shifts(plan)
        prompts = [len(new.request.prompt) for new in plan.asks] or [0] * len(plan.n_row)
        for row, prompt in zip(plan.n_row.tolist(), prompts, strict=True):
            self._pool.take_row(row, prompt)
        for row, new in zip(plan.n_row.tolist(), plan.asks, strict=False):  # followers have none
            if new.request.prompt_logprobs:
                self._wanted[row] = Wanted.of(new.request)
            if (asked := new.request.pooling) is not None:
                length = len(new.request.prompt)
                self._texts[row] = TextSoFar(length, asked.left_out, asked.tokens, asked.weights)
        if self._keeps:
            _begin_runs(plan, self._runs, plan.prefix_slot)
        if self._windowed:
            windows = self._in_windows(plan.prefix_window, plan.prefix_slot)
            _begin_runs(plan, self._window_runs, windows)
        if len(plan.prefix_slot) and self._row_table.numel():
            self._enter_prefixes(plan)

    def _enter_prefixes(self, plan: StepPlan) -> None:
        """Enter the slots of new rows' cached prefixes in the row table: one copy for all rows."""
        n, lengths = len(plan.prefix_slot), plan.n_prefix
        rows = plan.n_row.astype(np.int64) * self._row_table.shape[1]
        begins = lengths.cumsum() - lengths
        numbers = np.empty((2 + self._windowed, n), np.int64)
        numbers[0] = np.repeat(rows - begins, lengths) + np.arange(n)
        numbers[1] = plan.prefix_slot
        if self._windowed:
            numbers[2] = self._in_windows(plan.prefix_window, plan.prefix_slot)
        at, *slots = self._upload(numbers)
        for table, own in zip((self._row_table, self._window_table), slots, strict=False):
            assert table is not None
            table.view(-1).index_copy_(0, at, own.to(table.dtype))

    def _forward(
        self, plan: StepPlan, mailbox: Mailbox
    ) -> tuple[torch.Tensor | None, Integers, dict[int, PromptScores], list[PooledRows]]:
        """Logits of what is sampled, if anything is; scores of prompts, by row; vectors."""
        host, integers = self._integers(plan, mailbox)
        self._enter_drafts(integers)
        batch = self._batch(integers, self._ragged(host, plan))
        if plan.embeds:
            batch = replace(batch, given=self._given(plan))
        if len(plan.own_token):
            batch = self._own_positions(plan, batch)
        if self._draft is None:
            hidden = self._model.forward(batch, self._pool)
        else:
            hidden = self._draft.compute(self._model, batch, self._pool, batch)
        scored: dict[int, PromptScores] = {}
        if len(plan.scored_token):
            for at, following in scored_rows(plan):
                asked = self._wanted.get(int(plan.r_row[at]), NOTHING_ELSE)
                first = int(plan.r_tokens[:at].sum())
                scored[at] = self._score_prompt(following, hidden, batch, first, asked)
        logits = self._model.logits(hidden, batch) if plan.sampling else None
        pooled = self._pooled(plan, hidden) if self._texts else []
        return logits, integers, scored, pooled

    def _pooled(self, plan: StepPlan, hidden: torch.Tensor) -> list[PooledRows]:
        """The vectors of texts that end with this step, and of tokens where these are asked for."""
        head = self._model.pooling
        assert head is not None, "a text is read for its vectors by a model that makes none"
        ends = plan.r_tokens.cumsum().tolist()
        pieces = {
            at: PieceOfText(self._texts[row], start, ends[at] - n, ends[at])
            for at, (row, start, n) in enumerate(
                zip(plan.r_row.tolist(), plan.r_start.tolist(), plan.r_tokens.tolist(), strict=True)
            )
            if row in self._texts
        }
        found = []
        whole = {at: piece for at, piece in pieces.items() if not piece.text.tokens}
        if whole:
            vectors = head.texts(hidden, [*whole.values()])
            rows = [at for at, piece in whole.items() if piece.last]
            found.append(PooledRows(rows, [1] * len(rows), vectors))
        each = {}
        for at, piece in pieces.items():
            if piece.text.tokens and (own := head.tokens(hidden, piece)) is not None:
                each[at] = own
        if each:
            counts = [len(own) for own in each.values()]
            found.append(PooledRows([*each], counts, torch.cat([*each.values()])))
        weighed = {at: piece for at, piece in pieces.items() if piece.text.weights}
        if weighed:
            weights = [head.weights(hidden, piece) for piece in weighed.values()]
            counts = [len(own) for own in weights]
            found.append(PooledRows([*weighed], counts, torch.cat(weights), weights=True))
        return found

    def _enter_drafts(self, integers: Integers) -> None:
        """Put the drafts that were found into the step's tokens."""
        if self._found is not None:
            integers.t_token.index_copy_(0, *self._found)

    def _fill(self, host: Integers, plan: StepPlan) -> None:
        fill(host, plan)
        if len(host.t_window):
            host.t_window[: plan.tokens] = self._in_windows(plan.t_window, plan.t_slot)
        if len(plan.r_masked):
            # The first round draws for nobody in their place.
            samples = np.flatnonzero(plan.r_samples)
            host.sample_row[: len(samples)][plan.r_masked[samples] != 0] = self._rows

    def _ragged(self, host: Integers, plan: StepPlan) -> RaggedRows:
        rows = plan.r_row.tolist()
        return RaggedRows(
            b_start=host.b_start[: len(rows) + 1].tolist(),
            b_context=host.b_context[: len(rows)].tolist(),
            b_runs=[self._runs[row] for row in rows],
            b_row=rows,
            single_rows=plan.singles,
            b_window_runs=[self._window_runs[row] for row in rows] if self._windowed else None,
            b_drafts=np.maximum(plan.r_samples - 1, 0).tolist() if plan.drafts else None,
            b_mutual=plan.r_mutual.astype(bool).tolist() if len(plan.r_mutual) else None,
        )

    def _batch(
        self, integers: Integers, rows: RaggedRows, t_token: torch.Tensor | None = None
    ) -> ForwardBatch:
        if t_token is None:
            t_token, positions = self._resolve(integers)
        else:
            positions = self._positions(integers)
        return ForwardBatch(
            t_token=t_token,
            t_place=integers.t_place,
            t_slot=integers.t_slot,
            b_start=rows.b_start,
            b_context=rows.b_context,
            b_runs=rows.b_runs,
            b_row=rows.b_row,
            row_table=self._row_table,
            single_rows=rows.single_rows,
            logit_index=integers.logit_index,
            paged=self._paged(integers),
            t_adapter=integers.t_adapter if len(integers.t_adapter) else None,
            windows=self._window_rows(integers, rows) if len(integers.t_window) else None,
            b_drafts=rows.b_drafts,
            b_mutual=rows.b_mutual,
            t_own_position=positions,
        )

    def _window_rows(self, integers: Integers, rows: RaggedRows) -> WindowRows:
        table = self._row_table if self._window_table is None else self._window_table
        return WindowRows(integers.t_window, rows.b_window_runs or rows.b_runs, table)

    def _given(self, plan: StepPlan) -> GivenEmbeddings:
        index, dtype = given_tokens(plan), self._model.dtype
        # Each by itself: what lies in pinned memory crosses without a copy on the host.
        parts = [self._upload(rows_of(part, dtype)) for part in plan.given]
        if len(plan.soft_index):
            assert self._adapters is not None, "a plan names adapters of a model without any"
            soft = self._adapters.embeddings(plan.soft_adapter, plan.soft_index)
            more = max((part.shape[1] for part in parts), default=0) - soft.shape[1]
            parts.append(self._upload(torch.nn.functional.pad(soft, (0, max(more, 0)))))
        rows, order = parts[0] if len(parts) == 1 else torch.cat(parts), GIVEN - plan.t_token[index]
        if (order != np.arange(len(rows))).any():
            rows = rows[self._upload(order.astype(np.int64))]
        return GivenEmbeddings(self._upload(index), rows)

    def _score_prompt(
        self, tokens: Ints, hidden: torch.Tensor, batch: ForwardBatch, first: int, asked: Wanted
    ) -> PromptScores:
        """Of a row whose tokens begin with the step's `first`, what follows them."""
        following = self._upload(tokens.astype(np.int64))
        pieces = []
        for at in range(0, len(following), _SCORED_AT_ONCE):
            part = following[at : at + _SCORED_AT_ONCE]
            wanted = torch.arange(first + at, first + at + len(part), device=self._device)
            logits = self._model.logits(hidden, replace(batch, logit_index=wanted))
            pieces.append(score(logits.float(), part, asked))
        return joined(pieces)

    def _finish(self, flight: Flight, drawing: Drawing, turns: list[Round]) -> Flight:
        """Draw these rounds, and those under masks once the leader has the masks."""
        drawing.draw(turns)
        if not (len(flight.plan.r_masked) and flight.plan.r_masked.any()):
            flight.send(drawing.drawn)
            return flight
        flight.later = drawing
        if isinstance(self._sampler, LeaderTokens):
            flight.sample(None)
        else:
            self._unsampled = flight
        return flight


def _begin_runs(plan: StepPlan, runs: list[list[Run]], slots: Ints) -> None:
    """Let the runs of rows that sequences take begin with their cached prefixes, at these slots."""
    rows = plan.n_row.tolist()
    for row in rows:
        runs[row] = []
    append_slots([runs[row] for row in rows], plan.n_prefix, slots)


def scored_rows(plan: StepPlan) -> Iterator[tuple[int, Ints]]:
    """Each row of the plan whose tokens' log probabilities are asked for, and what follows them."""
    ends = plan.r_scored.cumsum()
    for row in np.flatnonzero(plan.r_scored).tolist():
        yield row, plan.scored_token[ends[row] - plan.r_scored[row] : ends[row]]
