"""Runs step plans on a GPU, asynchronously.

`launch` queues a step and returns: one copy of integers from pinned memory, the model, sampling,
and copies of the results into pinned memory behind them. Tokens that one step samples and the next
one processes never leave the device, so the next step can be launched before `wait` is called for
this one. A step in which every row decodes replays a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tokenpod.core.branches import MOST_BRANCHES
from tokenpod.core.plan import LAST, StepPlan
from tokenpod.engine.device_branches import BranchLines
from tokenpod.engine.device_copies import DeviceCopies
from tokenpod.engine.device_drafts import Proposals
from tokenpod.engine.device_masked import MaskedDrawing, MaskedDraws
from tokenpod.engine.device_parallel import ParallelProposals
from tokenpod.engine.device_rounds import DeviceDrawing
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.draft import BothTiles, Draft
from tokenpod.engine.executor import CapturableModel
from tokenpod.engine.graphs import (
    Captured,
    Graphs,
    decode_counts,
    flat_counts,
    mixed_counts,
    mixed_rows,
    single_rows,
    with_adapters,
)
from tokenpod.engine.host_copies import pools_of
from tokenpod.engine.integers import Counts, Integers, flatten, pad, views
from tokenpod.engine.mailbox import Flight, Mailbox, upload
from tokenpod.engine.parallel_draft import ParallelDraft
from tokenpod.engine.prompt_scores import PromptScores
from tokenpod.engine.rounds import Unknown, unmasked_rounds
from tokenpod.engine.sampler import LeaderTokens
from tokenpod.engine.step_executor import PlannedAdapters, StepExecutor
from tokenpod.kernels.attention_ops import StepTiles
from tokenpod.kernels.batch import ForwardBatch, PagedRows, RaggedRows, append_slots, cut_runs
from tokenpod.kernels.host_pool import HostPool
from tokenpod.kernels.pool import KVPool
from tokenpod.kernels.triton.steps import remember, resolve

#: Steps that can be under way: one computes, one waits behind it, one is being filled in.
_DEPTH = 3
#: Mixed steps of more tokens than this take a GPU longer than Python takes to launch them.
_MOST_CAPTURED_TOKENS = 1024
#: Of the captured steps with drafts: as many tokens as drafts, and rows that have them.
_MOST_DRAFTED_TOKENS = 384
#: In those of fewer tokens each is a row of its own, whose context many programs share: a row of a
#: few tokens would walk along its context alone. More would read contexts too often.
_MOST_FLAT_TOKENS = 32


class DeviceExecutor(StepExecutor[DeviceSampler | LeaderTokens]):
    """The model on one GPU; see `StepExecutor` for the other arguments.

    Args:
        max_positions: longest sequence, in tokens.
        max_tokens: most tokens of a step.
        device: a GPU. (A CPU will do where kernels are interpreted: tests.)
        drafts: most samples of a step besides each row's first; steps with any have graphs of
            their own, since others would make their logits too.
        ranks: most drafts that follow one token; more than 1: they may be trees.
        adapted: whether steps in which rows have adapters are captured too.
        host: holds keys and values for later; None: nothing is held.
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
        ranks: int = 1,
        adapted: bool = False,
        adapters: PlannedAdapters | None = None,
        draft: Draft | None = None,
        host: HostPool | None = None,
    ) -> None:
        # Behind the rows' lines are padding's and those of branches.
        lines = rows + 1 + (MOST_BRANCHES if ranks > 1 else 0)
        table = torch.zeros((lines, max_positions), dtype=torch.int32, device=device)
        super().__init__(
            model,
            pool,
            sampler,
            rows=rows,
            device=device,
            row_table=table,
            copies=DeviceCopies(pools_of(pool, draft), host, device),
            adapters=adapters,
            draft=draft,
        )
        self._masked_draws = MaskedDraws(sampler, self._last_token)
        self._branches = BranchLines(table, rows + 1)
        self._tiles: StepTiles | BothTiles = model.prepare_capture(rows)
        self._proposals: Proposals | ParallelProposals | None = None
        #: Drafts for the step that is being launched, see `Proposals.find`.
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None
        self._unknown: Unknown | None = None
        if isinstance(draft, ParallelDraft):
            self._proposals = ParallelProposals(
                draft, sampler, last_token=self._last_token, upload=self._upload
            )
        elif draft is not None:
            self._tiles = BothTiles(self._tiles, draft.prepare_capture(rows), draft.tile_rows)
            self._proposals = Proposals(
                draft,
                sampler,
                self._small_batch,
                row_table=table,
                last_token=self._last_token,
                upload=self._upload,
                ranks=ranks,
            )
        self._drafts, self._adapted = drafts, adapted
        most = self._tiles.count(min(max_tokens, _MOST_CAPTURED_TOKENS))
        counts = [Counts(max_tokens, rows, rows, most, drafts, adapters=True)]
        if drafts:
            counts += with_adapters(flat_counts(rows, _MOST_FLAT_TOKENS, drafts), True).values()
        words = max(each.words for each in counts)
        self._words = torch.empty(words, dtype=torch.int64, device=device)
        found = self._proposals.room if self._proposals else (0, 0)
        self._mailboxes = [Mailbox(rows + drafts, words, device, found) for _ in range(_DEPTH)]
        self._turn = 0
        self._max_tokens = max_tokens
        #: By whether some row has an adapter: of mixed steps, of those that decode alone, and of
        #: those with drafts, few and many.
        self._graphs: dict[bool, tuple[Graphs, Graphs, Graphs | None, Graphs | None]] = {}

    def use(self, pool: KVPool, of_draft: KVPool | None = None) -> None:
        """Keep keys and values there from now on. No step is under way, no row is taken."""
        assert not self._graphs, "captured steps know the pool that they were captured with"
        self._pool = pool
        if self._draft is not None and of_draft is not None:
            self._draft.pool = of_draft
        self._copies.use(pools_of(pool, self._draft))

    def capture(self) -> None:
        """Capture steps of up to 1,024 tokens; before this, and for others, kernels go singly."""
        most = min(self._max_tokens, _MOST_CAPTURED_TOKENS)
        memory = None
        # Steps in which no row has an adapter do without the launches for them.
        for adapted in (False, True)[: 1 + self._adapted]:
            mixed = with_adapters(mixed_counts(self._rows, most, self._tiles.count), adapted)
            decode = with_adapters(decode_counts(self._rows), adapted)
            # Each draft is a token of the step.
            drafted = {
                size: replace(counts, drafts=min(self._drafts, size))
                for size, counts in mixed.items()
                if _MOST_FLAT_TOKENS < size <= _MOST_DRAFTED_TOKENS
            }
            flat = flat_counts(self._rows, min(most, _MOST_FLAT_TOKENS), self._drafts)
            flat = with_adapters(flat, adapted)
            with torch.inference_mode():
                first = Graphs(self._forward_mixed, mixed, self._padding, memory)
                memory = first.memory
                on = self._masked_draws.launch
                second = Graphs(self._forward_decode, decode, self._padding, memory, on=on)
                third = fourth = None
                if self._drafts:
                    third = self._drafted(self._forward_flat, flat, memory, single_rows)
                    fourth = self._drafted(self._forward_mixed, drafted, memory, mixed_rows)
            self._graphs[adapted] = first, second, third, fourth
        if self._proposals is not None:
            with torch.inference_mode():
                self._proposals.capture(memory)
        if len(self._row_table) > self._rows + 1:
            self._branches.load()

    def _drafted(
        self,
        forward: Callable[..., torch.Tensor],
        counts: dict[int, Counts],
        memory: object,
        rows_of: Callable[[Counts], RaggedRows],
    ) -> Graphs:
        """Steps with drafts, behind which the host is waited for: then a draft model follows."""
        draft = self._draft
        if draft is None or isinstance(draft, ParallelDraft):
            return Graphs(forward, counts, self._padding, memory)

        def follow(counts: Counts, integers: Integers) -> None:
            batch = self._batch(integers, rows_of(counts), integers.t_token)
            draft.follow(self._of_draft(batch, integers))

        forward = partial(forward, follow=False)
        return Graphs(forward, counts, self._padding, memory, follow)

    # -- a step --------------------------------------------------------------------------------

    def _free_mailbox(self, plan: StepPlan) -> Mailbox:
        self._turn += 1
        mailbox = self._mailboxes[self._turn % _DEPTH]
        mailbox.staging.begin()
        return mailbox

    def _fill(self, host: Integers, plan: StepPlan) -> None:
        super()._fill(host, plan)
        self._branches.name(plan, host)

    def _propose(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown, draft: Draft) -> None:
        assert self._proposals is not None
        self._found = self._proposals.find(plan, mailbox, unknown)
        self._unknown = unknown

    def _enter_drafts(self, integers: Integers) -> None:
        if self._found is not None:
            integers.t_token.index_copy_(0, *self._found)

    def _run(self, plan: StepPlan, mailbox: Mailbox) -> Flight:
        scored: dict[int, PromptScores] = {}
        logits: torch.Tensor | None
        captured = self._captured(plan, mailbox)
        if captured is not None:
            logits = captured.replay(mailbox.words[: captured.counts.words], self._enter_drafts)
            integers = captured.integers
        else:
            logits, integers, scored = self._forward(plan, mailbox)
        mailbox.forwarded()
        flight = Flight(mailbox, plan, scored, unknown=self._unknown)
        self._found = self._unknown = None
        if logits is None or not plan.sampling:
            flight.send(None)
            return flight
        flight = self._draw(flight, logits, integers, mailbox, captured)
        if captured is not None and captured.run_behind is not None:
            captured.run_behind()
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
        if plan.waits_for_masks and captured is not None and captured.run_on is not None:
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
            staging=staging,
        )
        return self._finish(flight, drawing, unmasked_rounds(plan)[1:])

    def _captured(self, plan: StepPlan, mailbox: Mailbox) -> Captured | None:
        """The graph for this step, if there is one, its integers in the mailbox."""
        graphs = self._graphs.get(len(plan.r_adapter) > 0)
        if graphs is None or len(plan.scored_token) or plan.embeds:
            return None
        mixed, decode, few, many = graphs
        if plan.rows == plan.tokens == plan.sampling:
            captured = decode.fitting(plan.rows)
        elif plan.drafts:
            captured = few.fitting(plan.tokens) if few else None
            captured = captured or (many.fitting(plan.tokens) if many else None)
        else:
            captured = mixed.fitting(plan.tokens)
        if captured is None:
            return None
        host = mailbox.integers.of(captured.counts)
        self._fill(host, plan)
        if captured.counts.tiles and not self._tiles.fill(self._ragged(host, plan), host.tiles):
            return None
        pad(host, plan, padding_row=self._rows, sink=self._pool.sink)
        if captured.counts.flat:
            flatten(host, plan)
        return captured

    def _forward_flat(
        self, counts: Counts, integers: Integers, *, follow: bool = True
    ) -> torch.Tensor:
        """The captured part of steps with few drafts: each token is a row."""
        batch = self._batch(integers, single_rows(counts))
        return self._computed(batch, integers, follow=follow)

    def _forward_decode(self, counts: Counts, integers: Integers) -> torch.Tensor:
        """The captured part of steps in which every row decodes."""
        # Every token's logits are wanted: there is nothing to gather.
        batch = replace(self._batch(integers, single_rows(counts)), logit_index=None)
        return self._computed(batch, integers)

    def _forward_mixed(
        self, counts: Counts, integers: Integers, *, follow: bool = True
    ) -> torch.Tensor:
        """The captured part of mixed steps.

        Rows that decode are fewer than `counts.rows`; what their kernel writes beyond them, zeros,
        is overwritten by the one that follows, for rows of several tokens.
        """
        batch = self._batch(integers, mixed_rows(counts))
        return self._computed(batch, integers, follow=follow)

    def _computed(
        self, batch: ForwardBatch, integers: Integers, *, follow: bool = True
    ) -> torch.Tensor:
        """A captured step: logits, and the tokens of rows that are greedy."""
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
        return replace(
            self._batch(integers, single_rows(Counts.decode(len(t_token))), t_token),
            logit_index=None,
        )

    def _paged(self, integers: Integers) -> PagedRows:
        tiles = self._tiles.by_window(integers.tiles) if len(integers.tiles) else None
        return PagedRows(
            integers.b_row, integers.b_start, integers.b_context, tiles, integers.t_row
        )

    def _integers(self, plan: StepPlan, mailbox: Mailbox) -> tuple[Integers, Integers]:
        counts = Counts.of(plan)
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
        for at in np.flatnonzero(prompts).tolist():
            runs = self._runs[plan.r_row[at]]
            if cut_runs(runs, int(plan.r_start[at])):
                append_slots(runs, plan.t_slot[ends[at] - plan.r_tokens[at] : ends[at]])
        self._branches.write(plan, self._mailboxes[self._turn % _DEPTH].staging)

    def _resolve(self, integers: Integers) -> torch.Tensor:
        """[T] tokens; the slots of a step's tokens are entered in the row table on the way."""
        return resolve(
            integers.t_token,
            integers.t_row,
            integers.t_position,
            integers.t_slot,
            self._row_table,
            self._last_token,
        )

    def _upload(self, values: np.ndarray | torch.Tensor) -> torch.Tensor:
        return upload(values, self._device)

    def _padding(self, counts: Counts) -> torch.Tensor:
        host = np.zeros(counts.words, np.int64)
        pad(views(host, counts), None, padding_row=self._rows, sink=self._pool.sink)
        return torch.from_numpy(host).to(self._device)
