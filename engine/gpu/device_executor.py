"""Runs step plans on a GPU, asynchronously.

`launch` queues a step and returns: one copy of integers from pinned memory, the model, sampling,
and copies of the results into pinned memory behind them. Tokens that one step samples and the next
one processes never leave the device, so the next step can be launched before `wait` is called for
this one. Most steps replay captured graphs (`captured_steps`): of rows that decode, of these beside
prompts, and with drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from tokenpod.core.plan import LAST, StepPlan
from tokenpod.engine.drafts.draft import BothTiles
from tokenpod.engine.gpu.captured_steps import CapturedSteps
from tokenpod.engine.gpu.device_copies import DeviceCopies
from tokenpod.engine.gpu.device_drafts import Proposals
from tokenpod.engine.gpu.device_masked import MaskedDrawing, MaskedDraws, drawn_late
from tokenpod.engine.gpu.device_rounds import DeviceDrawing
from tokenpod.engine.gpu.device_sampler import DeviceSampler
from tokenpod.engine.gpu.graphs import Captured, single_rows
from tokenpod.engine.sampling.prompt_scores import PromptScores
from tokenpod.engine.sampling.sampler import LeaderTokens
from tokenpod.engine.steps.drafter import Drafter
from tokenpod.engine.steps.executor import CapturableModel, PooledRows
from tokenpod.engine.steps.integers import Counts, Integers, flatten, pad, views
from tokenpod.engine.steps.mailbox import Flight, Mailbox, upload
from tokenpod.engine.steps.offload_copies import pools_of
from tokenpod.engine.steps.open_drafts import Unknown
from tokenpod.engine.steps.rounds import unmasked_rounds
from tokenpod.engine.steps.step_executor import PlannedAdapters, StepExecutor
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.cache.offload_pool import OffloadPool
from tokenpod.kernels.gpu.steps import remember, resolve
from tokenpod.kernels.operations.attention_ops import StepTiles
from tokenpod.kernels.operations.batch import (
    ForwardBatch,
    PagedRows,
    RaggedRows,
    Run,
    append_slots,
    cut_runs,
)

#: Steps that can be under way: one computes, one waits behind it, one is being filled in.
_DEPTH = 3


class DeviceExecutor(StepExecutor[DeviceSampler | LeaderTokens]):
    """The model on one GPU; see `StepExecutor` for the other arguments.

    Args:
        max_positions: longest sequence, in tokens.
        max_tokens: most tokens of a step.
        device: a GPU. (A CPU will do where kernels are interpreted: tests.)
        drafts: most samples of a step besides each row's first; steps with any have graphs of
            their own, since others would make their logits too.
        adapted: whether steps in which rows have adapters are captured too.
        offload: holds keys and values for later; None: nothing is held.
        windowed: whether a pool may have window slots.
        flat: whether tokens of one row may be rows of their own: not where rows have states.
    """

    def __init__(
        self,
        model: CapturableModel,
        pool: KVPool,
        sampler: DeviceSampler | LeaderTokens,
        *,
        rows: int,
        max_positions: int,
        max_tokens: int,
        device: torch.device,
        drafts: int = 0,
        adapted: bool = False,
        adapters: PlannedAdapters | None = None,
        draft: Drafter | None = None,
        offload: OffloadPool | None = None,
        windowed: bool = False,
        flat: bool = True,
        own_positions: bool = False,
    ) -> None:
        table = torch.zeros((rows + 1, max_positions), dtype=torch.int32, device=device)
        copies: DeviceCopies | None = None
        if offload is not None:
            copies = DeviceCopies(pools_of(pool, draft), offload, device)
        super().__init__(
            model,
            pool,
            sampler,
            rows=rows,
            device=device,
            row_table=table,
            window_table=torch.zeros_like(table) if windowed else None,
            copies=copies,
            adapters=adapters,
            draft=draft,
            own_positions=own_positions,
        )
        self._masked_draws = MaskedDraws(sampler, self._last_token)
        self._first_layers = model.first_layers
        self._tiles: StepTiles | BothTiles = model.prepare_capture(rows)
        self._proposals: Proposals | None = None
        #: How many drafts of each row's last step were right.
        self._accepted = torch.zeros_like(self._last_token)
        if draft is not None:
            self._proposals = Proposals(
                draft,
                sampler,
                self._small_batch,
                row_table=table,
                last_token=self._last_token,
                accepted=self._accepted,
                upload=self._upload,
            )
            self._proposals.use(pool.slots)
            if (own := draft.prepare_capture(rows)) is not None:
                self._tiles = BothTiles(self._tiles, own, draft.tile_rows)
        self._captured = CapturedSteps(
            rows=rows,
            max_tokens=max_tokens,
            captured=model.captures,
            tiles=self._tiles.count,
            drafts=drafts,
            adapted=adapted,
            # A head can only follow a step; where the host waits, it does so behind its results.
            behind=draft is not None and draft.behind,
            windowed=windowed,
            flat=flat,
            texts=model.pooling is not None,
        )
        words = self._captured.words
        self._words = torch.empty(words, dtype=torch.int64, device=device)
        found = self._proposals.room if self._proposals else (0, 0)
        self._mailboxes = [Mailbox(rows + drafts, words, device, found) for _ in range(_DEPTH)]
        self._turn = 0

    def use(self, pool: KVPool, of_draft: KVPool | None = None) -> None:
        """Keep keys and values there from now on. No step is under way, no row is taken."""
        assert not self._captured, "captured steps know the pool that they were captured with"
        self._pool = pool
        if not pool.window_slots:
            self._window_table = None
        if self._draft is not None and of_draft is not None:
            self._draft.pool = of_draft
        if self._proposals is not None:
            self._proposals.use(pool.slots)
        if self._copies is not None:
            self._copies.use(pools_of(pool, self._draft))

    def capture(self, *, some: bool = False) -> None:
        """Capture steps of up to the model's `captures` tokens; others' kernels go singly.

        `some`: a few sizes of these alone; each call of `capture_next` captures one of the others.
        """
        if self._device.type == "cuda":
            # Graphs have memory of their own: it comes from what torch keeps for steps.
            torch.cuda.empty_cache()
        memory = self._captured.capture(self, windows=self._windowed, some=some)
        if self._proposals is not None:
            with torch.inference_mode():
                self._proposals.capture(memory)

    def capture_next(self) -> bool:
        """Capture one more size, while no step is under way; False: all are captured.

        Waits until the device has run it: what comes meanwhile waits for one size at most.
        """
        more = self._captured.capture_next()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return more

    def first_layers(self) -> AbstractContextManager[None]:
        """In which steps run as many of the first layers as launch all kernels.

        All, where a draft model reads what is behind others or rows may have adapters.
        """
        alike = self._draft is None and self._adapters is None
        return self._first_layers() if alike else nullcontext()

    # -- a step --------------------------------------------------------------------------------

    def _free_mailbox(self, plan: StepPlan) -> Mailbox:
        self._turn += 1
        mailbox = self._mailboxes[self._turn % _DEPTH]
        mailbox.staging.begin()
        return mailbox

    def release(self, rows: Sequence[int]) -> None:
        """Forget these rows, as a plan's `freed` does."""
        super().release(rows)
        if self._proposals is not None:
            self._proposals.ahead.forget(rows)

    def _propose(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown, draft: Drafter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._proposals is not None
        return self._proposals.find(plan, mailbox, unknown)

    def _run(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown | None) -> Flight:
        scored: dict[int, PromptScores] = {}
        pooled: list[PooledRows] = []
        logits: torch.Tensor | None
        captured = self._filled(plan, mailbox)
        if captured is not None:
            logits = captured.replay(mailbox.words[: captured.counts.words], self._enter_drafts)
            integers = captured.integers
            if self._texts:
                pooled = self._pooled(plan, logits)
        else:
            logits, integers, scored, pooled = self._forward(plan, mailbox)
        mailbox.forwarded()
        flight = Flight(mailbox, plan, scored, pooled)
        if logits is None or not plan.sampling:
            flight.send(None)
            return flight
        flight = self._draw(flight, logits, integers, mailbox, captured)
        if captured is not None and captured.run_behind is not None:
            captured.run_behind()
        if self._proposals is not None:
            self._proposals.find_ahead(plan, mailbox, unknown)
        return flight

    def _draw(
        self,
        flight: Flight,
        logits: torch.Tensor,
        integers: Integers,
        mailbox: Mailbox,
        captured: Captured | None,
    ) -> Flight:
        """Draw round after round; a captured step has begun the first."""
        plan, staging = flight.plan, mailbox.staging
        if captured is not None and captured.run_on is not None and drawn_late(plan):
            run, draws = captured.run_on, self._masked_draws
            alone = MaskedDrawing(plan, logits, draws=draws, run=run, staging=staging)
            return self._finish(flight, alone, [])
        n = plan.sampling
        firsts, rows, positions = logits[:n], integers.sample_row[:n], integers.sample_position[:n]
        drawn = None
        if not plan.waits_for_masks:
            if captured is None:
                self._sampler.begin(firsts, rows, positions)
            drawn = self._sampler.finish(firsts, rows, positions)
            if captured is None or self._sampler.draws:
                remember(drawn.tokens, rows, self._last_token)
            if not plan.drafts and not len(plan.r_masked):
                flight.send(drawn)
                return flight
        drawing = DeviceDrawing(
            plan,
            logits,
            len(integers.sample_row),
            drawn,
            integers.t_token,
            sampler=self._sampler,
            last_token=self._last_token,
            accepted=self._accepted,
            staging=staging,
        )
        return self._finish(flight, drawing, unmasked_rounds(plan)[1:])

    def _filled(self, plan: StepPlan, mailbox: Mailbox) -> Captured | None:
        """The captured step for a plan, if there is one, its integers in the mailbox."""
        captured = self._captured.fitting(plan)
        if captured is None:
            return None
        host = mailbox.integers.of(captured.counts)
        self._fill(host, plan)
        if captured.counts.tiles and not self._tiles.fill(self._ragged(host, plan), host.tiles):
            return None
        pad(host, plan, **self._padding)
        if drawn_late(plan):
            # The first draw, which is captured with the step, draws for nobody.
            host.sample_row[: plan.sampling] = self._rows
        if captured.counts.flat:
            flatten(host, plan)
        return captured

    def computed(
        self, integers: Integers, rows: RaggedRows, *, decode: bool, follow: bool
    ) -> torch.Tensor:
        """Launch the model, and the first draw, which is that of greedy rows; of texts no draw.

        Of mixed steps, rows that decode are fewer than there is room for; what their kernel writes
        beyond them, zeros, is overwritten by the one that follows, for rows of several tokens.
        """
        batch = self._batch(integers, rows)
        if self._model.pooling is not None:
            return self._model.forward(batch, self._pool)
        if decode:
            # Every token's logits are wanted: there is nothing to gather.
            batch = replace(batch, logit_index=None)
        if self._draft is None:
            hidden = self._model.forward(batch, self._pool)
        else:
            own = self._of_draft(batch, integers)
            hidden = self._draft.compute(self._model, batch, self._pool, own, follow=follow)
        if not follow:
            # The draft model reads them once others have been drawn.
            integers.t_token.copy_(batch.t_token)
        logits = self._model.logits(hidden, batch)
        firsts = logits[: len(integers.sample_row)]
        tokens = self._sampler.begin(firsts, integers.sample_row, integers.sample_position)
        remember(tokens, integers.sample_row, self._last_token)
        return logits

    def follow(self, integers: Integers, rows: RaggedRows) -> None:
        """Launch what follows a step with drafts."""
        assert self._draft is not None
        batch = self._batch(integers, rows, integers.t_token)
        self._draft.follow(self._of_draft(batch, integers))

    def draw_masked(self, counts: Counts, integers: Integers, logits: torch.Tensor) -> None:
        """Launch the draws of rows under masks."""
        self._masked_draws.launch(counts, integers, logits)

    @property
    def _padding(self) -> dict[str, int]:
        """What padding is, for `pad`."""
        pool = self._pool
        return {"padding_row": self._rows, "sink": pool.sink, "window_sink": pool.window_sink}

    def padding(self, counts: Counts) -> torch.Tensor:
        """[words] int64: the integers of a step of padding alone."""
        host = np.zeros(counts.words, np.int64)
        pad(views(host, counts), None, **self._padding)
        return torch.from_numpy(host).to(self._device)

    def _of_draft(self, batch: ForwardBatch, integers: Integers) -> ForwardBatch:
        """The step with the draft model's tiles."""
        tiled = batch.paged is not None and batch.paged.tiles is not None
        if not (tiled and isinstance(self._tiles, BothTiles)):
            return batch
        assert batch.paged is not None
        tiles = self._tiles.of_draft(integers.tiles)
        return replace(batch, paged=replace(batch.paged, tiles=tiles))

    def _small_batch(self, integers: Integers, t_token: torch.Tensor) -> ForwardBatch:
        # Every token's logits are wanted: there is nothing to gather.
        batch = self._batch(integers, single_rows(Counts.decode(len(t_token))), t_token)
        return replace(batch, logit_index=None)

    def _paged(self, integers: Integers) -> PagedRows:
        tiles = self._tiles.by_kind(integers.tiles) if len(integers.tiles) else None
        return PagedRows(
            integers.b_row, integers.b_start, integers.b_context, tiles, integers.t_row
        )

    def _integers(self, plan: StepPlan, mailbox: Mailbox) -> tuple[Integers, Integers]:
        counts = Counts.of(plan, windows=self._windowed)
        host, words = mailbox.integers.of(counts), counts.words
        self._fill(host, plan)
        self._words[:words].copy_(mailbox.words[:words], non_blocking=True)
        return host, views(self._words, counts)

    def _note_slots(self, plan: StepPlan) -> None:
        """Note where prompts' tokens go; where the KV of rows that decode lies is not needed here.

        A row that has decoded meanwhile and has several tokens again, as drafts make it, is no
        longer known to the host: the row table has its slots.
        """
        ends = plan.r_tokens.cumsum()
        prompts = plan.t_token[ends - plan.r_tokens] != LAST
        if not prompts.any():
            return
        self._note_prompts(plan, prompts, self._runs, plan.t_slot)
        if self._windowed:
            windows = self._in_windows(plan.t_window, plan.t_slot)
            self._note_prompts(plan, prompts, self._window_runs, windows)

    def _note_prompts(
        self, plan: StepPlan, prompts: np.ndarray, runs: list[list[Run]], slots: np.ndarray
    ) -> None:
        """Add a step's slots [T] to the runs of these rows of the plan [B], where they go on."""
        goes_on = prompts.copy()
        for at in np.flatnonzero(prompts).tolist():
            goes_on[at] = cut_runs(runs[plan.r_row[at]], int(plan.r_start[at]))
        tokens = slots[np.repeat(goes_on, plan.r_tokens)]
        rows = [runs[row] for row in plan.r_row[goes_on].tolist()]
        append_slots(rows, plan.r_tokens[goes_on], tokens)

    def _resolve(self, integers: Integers) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The slots of a step's tokens are entered in the row table on the way."""
        return resolve(
            integers.t_token,
            integers.t_row,
            integers.t_place,
            integers.t_slot,
            self._row_table,
            self._last_token,
            t_window=integers.t_window if self._windowed else None,
            window_table=self._window_table if self._windowed else None,
            row_shift=self._row_shift,
        )

    def _upload(self, values: np.ndarray | torch.Tensor) -> torch.Tensor:
        return upload(values, self._device)
