"""Runs step plans on a CPU: nothing is asynchronous, and attention reads runs of slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tokenpod.core.plan import LAST, StepPlan
from tokenpod.core.plan import Ints as PlanInts
from tokenpod.core.sampling import MOST_TOP_TOKENS
from tokenpod.engine.cpu.cpu_sampler import CpuSampler, cpu_sampler
from tokenpod.engine.cpu.noted_steps import MOST_ROWS, NotedSteps, filled_to
from tokenpod.engine.sampling.prompt_scores import PromptScores
from tokenpod.engine.sampling.sampler import LeaderTokens, Samples
from tokenpod.engine.steps.drafter import Drafter
from tokenpod.engine.steps.executor import Masks, Model, PooledRows
from tokenpod.engine.steps.integers import Counts, Integers, StepWords
from tokenpod.engine.steps.mailbox import CpuMailbox, Flight, Mailbox
from tokenpod.engine.steps.offload_copies import OffloadCopies, pools_of
from tokenpod.engine.steps.open_drafts import Unknown
from tokenpod.engine.steps.rounds import (
    Drawing,
    Ints,
    Round,
    allowed,
    mask_words,
    unmasked_rounds,
)
from tokenpod.engine.steps.step_executor import PlannedAdapters, StepExecutor
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.cache.offload_pool import OffloadPool
from tokenpod.kernels.operations.batch import (
    ForwardBatch,
    RaggedRows,
    Run,
    append_run,
    append_slots,
    cut_runs,
)
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.products.cpu_product import filled_rows
from tokenpod.models.decoders.decoder import Decoder

_CPU = torch.device("cpu")


class CpuExecutor(StepExecutor[CpuSampler | LeaderTokens]):
    """The model on a CPU; see `StepExecutor` for the other arguments.

    Args:
        vocab_size: width of the logits.
        group: the ranks that the model is divided among, if it is.
        offload: holds keys and values for later; None: nothing is held.
        fills: steps have as many tokens as products are computed with, so that no product has to
            fill them up: encoders' long steps, all of whose operations leave such tokens alone.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        rows: int,
        vocab_size: int,
        group: Group | None = None,
        adapters: PlannedAdapters | None = None,
        draft: Drafter | None = None,
        offload: OffloadPool | None = None,
        own_positions: bool = False,
        fills: bool = False,
    ) -> None:
        sampler = cpu_sampler(group, rows=rows, vocab_size=vocab_size)
        no_table = torch.zeros((0, 0), dtype=torch.int32)
        super().__init__(
            model,
            pool,
            sampler,
            rows=rows,
            device=_CPU,
            row_table=no_table,
            copies=None if offload is None else OffloadCopies(pools_of(pool, draft), offload),
            adapters=adapters,
            draft=draft,
            own_positions=own_positions,
        )
        self._fills = fills
        #: As numpy sees it: to ask torch each time takes as long as to use it.
        self._last_drawn: Ints = self._last_token.numpy()
        #: None: no step of this model can be played.
        self._noted: NotedSteps | None = None
        if isinstance(model, Decoder) and model.repeats and draft is None and not own_positions:
            self._noted = NotedSteps()
        #: How many positions `_runs` has of each row.
        self._known = np.zeros(rows, np.int32)
        self._take_words(Counts.decode(rows).words)

    def _take_words(self, words: int) -> None:
        """Have memory for the integers of steps: as torch sees it, and as numpy does."""
        self._words = StepWords(torch.empty(words, dtype=torch.int64))
        self._cpu_words = StepWords(self._words.words.numpy())

    def _free_mailbox(self, plan: StepPlan) -> Mailbox:
        del plan
        return CpuMailbox()

    def _take_rows(self, plan: StepPlan) -> None:
        super()._take_rows(plan)
        self._known[plan.n_row] = plan.n_prefix

    def _note_slots(self, plan: StepPlan) -> None:
        """Note all slots, in the place of what rejected drafts left."""
        rows = plan.r_row.tolist()
        for at in (self._known[plan.r_row] != plan.r_start).nonzero()[0].tolist():
            row, start = rows[at], int(plan.r_start[at])
            there = cut_runs(self._runs[row], start)
            if self._windowed:
                there &= cut_runs(self._window_runs[row], start)
            assert there, f"row {row} goes on at {start}, but has {self._known[row]} positions"
        self._known[plan.r_row] = plan.r_start + plan.r_tokens
        _append(self._runs, rows, plan, plan.t_slot)
        if self._windowed:
            windows = self._in_windows(plan.t_window, plan.t_slot)
            _append(self._window_runs, rows, plan, windows)

    def _propose(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown, draft: Drafter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the drafts that a plan leaves open, small step after small step."""
        found = plan.t_token.astype(np.int64)
        for first in range(0, unknown.most, draft.each):
            which = unknown.counts > first
            planned, at = unknown.rows[which], unknown.firsts[which] + first
            rows, positions = plan.r_row[planned], plan.r_start[planned] + first
            tokens = self._resolved(found[at], rows)
            batch = self._small_step(rows, tokens, positions, plan.t_slot[at])
            n = min(draft.each, unknown.most - first)
            logits = draft.logits(batch, n).float().view(n, len(rows), -1)
            for i, scores in enumerate(logits):
                some = unknown.counts[which] > first + i
                outputs = plan.r_output[planned[some]] + first + i
                scores = scores[torch.from_numpy(some)]
                drafts = self._sampler.propose(scores, rows[some].tolist(), outputs.tolist())
                found[at[some] + 1 + i] = drafts.numpy()
        mailbox.drafted()
        where = unknown.tokens
        return torch.from_numpy(where), torch.from_numpy(found[where])

    def _resolved(self, tokens: Ints, rows: Ints) -> Ints:
        """[m] tokens, in the place of `LAST` what rows [m] sampled last."""
        return np.where(tokens == LAST, self._last_drawn[rows], tokens)

    def _small_step(self, rows: Ints, tokens: Ints, positions: Ints, slots: Ints) -> ForwardBatch:
        """A token of each of these rows [m], where all that is before it has been noted."""
        runs = [[*self._runs[row]] for row in rows.tolist()]
        for own, position in zip(runs, positions.tolist(), strict=True):
            cut_runs(own, position + 1)
        t_token, t_place, t_slot, t_row = (
            torch.from_numpy(column.astype(np.int64)) for column in (tokens, positions, slots, rows)
        )
        shift = self._row_shift
        return ForwardBatch(
            t_token=t_token,
            t_place=t_place,
            t_slot=t_slot,
            b_start=list(range(len(rows) + 1)),
            b_context=(positions + 1).tolist(),
            b_runs=runs,
            b_row=rows.tolist(),
            row_table=self._row_table,
            single_rows=len(rows),
            logit_index=torch.arange(len(rows)),
            t_own_position=None if shift is None else t_place + shift[t_row],
        )

    def _run(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown | None) -> Flight:
        del unknown
        logits, integers, scored, pooled = self._forward(plan, mailbox)
        mailbox.forwarded()
        flight = Flight(mailbox, plan, scored, pooled)
        if logits is None:
            flight.send(None)
            return flight
        if not plan.drafts and not len(plan.r_masked):
            flight.send(self._draw(plan, logits.float()))
            return flight
        tokens = integers.t_token.numpy()
        drawing = _CpuDrawing(plan, logits.float(), tokens, self._sampler, self._last_drawn)
        return self._finish(flight, drawing, unmasked_rounds(plan))

    def _forward(
        self, plan: StepPlan, mailbox: Mailbox
    ) -> tuple[torch.Tensor | None, Integers, dict[int, PromptScores], list[PooledRows]]:
        noted = self._noted
        if noted is None or not _is_plain(plan) or self._windowed:
            return super()._forward(plan, mailbox)
        host, integers = noted.integers(filled_to(plan.rows))
        self._fill(host, plan)
        rows, spare = self._ragged(host, plan), len(host.b_row) - plan.rows
        tokens = host.t_token[: plan.rows]
        tokens[:] = self._resolved(tokens, plan.r_row)
        if spare:
            # Rows that nobody reads: of one token, which is all that they see.
            sink, nobody = self._pool.sink, self._rows
            host.t_token[-spare:], host.t_place[-spare:] = 0, 0
            host.t_slot[-spare:], host.t_row[-spare:] = sink, nobody
            rows = RaggedRows(
                b_start=[*range(len(host.b_row) + 1)],
                b_context=rows.b_context + [1] * spare,
                b_runs=rows.b_runs + [[(sink, sink + 1)]] * spare,
                b_row=rows.b_row + [nobody] * spare,
                single_rows=len(host.b_row),
            )

        def compute() -> torch.Tensor:
            batch = self._batch(integers, rows, integers.t_token)
            # All tokens are followed by one that is sampled.
            batch = replace(batch, logit_index=None)
            return self._model.logits(self._model.forward(batch, self._pool), batch)

        logits = noted.logits(compute, rows.b_runs, rows.b_context)
        return logits[: plan.rows], integers, {}, []

    def _draw(self, plan: StepPlan, logits: torch.Tensor) -> Samples:
        """One token for each row that is sampled; none waits for a mask or follows a draft."""
        rows, outputs = plan.r_row, plan.r_output
        if plan.sampling < plan.rows:
            sampled = plan.r_samples.nonzero()[0]
            rows, outputs = rows[sampled], outputs[sampled]
        samples = self._sampler.sample(logits, rows.tolist(), outputs.tolist())
        self._last_drawn[rows] = samples.tokens.numpy()
        return samples

    def _integers(self, plan: StepPlan, mailbox: Mailbox) -> tuple[Integers, Integers]:
        del mailbox
        counts, tokens = Counts.of(plan, windows=self._windowed), plan.tokens
        if self._fills:
            counts = replace(counts, tokens=filled_rows(tokens))
        if not self._words.fit(counts):
            self._take_words(counts.words)
        host = self._cpu_words.of(counts)
        self._fill(host, plan)
        host.t_token[tokens:], host.t_place[tokens:] = 0, 0
        host.t_slot[tokens:], host.t_row[tokens:] = self._pool.sink, self._rows
        return host, self._words.of(counts)

    def _resolve(self, integers: Integers) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens: torch.Tensor = integers.t_token
        known = tokens.numpy()
        known[:] = self._resolved(known, integers.t_row.numpy())
        return tokens, self._positions(integers)


def _is_plain(plan: StepPlan) -> bool:
    """Whether few rows have one token each that the next one follows, and nothing else is asked."""
    if plan.tokens > MOST_ROWS or not plan.tokens == plan.rows == plan.sampling:
        return False
    others = plan.r_adapter, plan.r_masked, plan.scored_token, plan.own_token
    return not (plan.drafts or plan.embeds or any(map(len, others)))


def _append(runs: list[list[Run]], rows: list[int], plan: StepPlan, t_slot: PlanInts) -> None:
    """Note where the tokens of these rows go."""
    if plan.tokens == plan.rows:
        for row, slot in zip(rows, t_slot.tolist(), strict=True):
            append_run(runs[row], slot, slot + 1)
        return
    append_slots([runs[row] for row in rows], plan.r_tokens, t_slot)


class _CpuDrawing(Drawing):
    """Draws the samples of a step with drafts or masks on the CPU.

    Args:
        plan: the step's.
        logits: [n, vocab] float32.
        t_token: [T] int64, the step's tokens, drafts among them.
        sampler: of all rows.
        last_token: [rows] int64, where drawn tokens go too.
    """

    def __init__(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        t_token: Ints,
        sampler: CpuSampler | LeaderTokens,
        last_token: Ints,
    ) -> None:
        super().__init__(plan, logits, Samples.nothing(len(logits), MOST_TOP_TOKENS, ranks=True))
        self._t_token, self._sampler, self._last_token = t_token, sampler, last_token

    def draw(self, turns: Sequence[Round], masks: Masks | None = None) -> None:
        """Draw these rounds into `drawn`: nothing behind a wrong draft, or where `masks` forbid."""
        plan = self.plan
        for turn in turns:
            right: slice | np.ndarray = slice(None)
            if turn.place:
                right = self.drawn.tokens.numpy()[turn.before] == self._t_token[turn.behind]
            at, which = turn.at[right], turn.rows[right]
            if not len(at):
                continue
            logits = self.logits if len(at) == len(self.logits) else self.logits[at]
            bits = None
            if masks is not None:  # where there is none, nothing is allowed
                words = np.empty((len(turn.rows), mask_words(logits.shape[1])), np.int32)
                bits = torch.from_numpy(allowed(masks, turn, words)[right])
            rows = plan.r_row[which]
            outputs = (plan.r_output[which] + turn.place).tolist()
            samples = self._sampler.sample(logits, rows.tolist(), outputs, bits)
            self._put(samples, torch.from_numpy(at))
            tokens = samples.tokens.numpy()
            # A bad row's token is never used; that it stays is good for one that was not sampled.
            drew = slice(None) if masks is None and not turn.place else tokens >= 0
            self._last_token[rows[drew]] = tokens[drew]
