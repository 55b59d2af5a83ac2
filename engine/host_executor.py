"""Runs step plans on a CPU: nothing is asynchronous, and attention reads runs of slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tokenpod.core.plan import GIVEN, LAST, Ints, StepPlan
from tokenpod.engine.executor import Masks, Model, StepResult, new_rows, scored_rows
from tokenpod.engine.host_sampler import host_sampler
from tokenpod.engine.integers import Counts, fill, given_tokens, views
from tokenpod.engine.rounds import Ints as Rows
from tokenpod.engine.rounds import (
    Round,
    allowed,
    drafts_of,
    late_rows,
    masked_rounds,
    row_after_row,
    unmasked_rounds,
)
from tokenpod.engine.sampler import Samples, logprobs_of
from tokenpod.kernels.batch import ForwardBatch, GivenEmbeddings, Run, append_slots, cut_runs
from tokenpod.kernels.group import Group
from tokenpod.kernels.pool import KVPool

#: A CPU reads runs.
_NO_TABLE = torch.zeros((0, 0), dtype=torch.int32)


#: What is left to do once masks are there.
Rest = Callable[[Masks], StepResult]


class Done:
    """A step that was complete when `launch` returned, but for rows that wait for masks."""

    def __init__(self, plan: StepPlan, result: StepResult, rest: Rest | None = None) -> None:
        self._plan = plan
        self._result = result
        self._rest = rest
        self._late: frozenset[int] = frozenset()

    def sample(self, masks: Masks | None) -> None:
        """See `Launched.sample`; None: the leader has them."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._late = late_rows(self._plan, masks)
            with torch.inference_mode():
                self._result = rest(masks or {})

    def wait(self) -> StepResult:
        """The result."""
        self.sample({})
        return row_after_row(self._plan, self._result, self._late)


class _Drawing:
    """The samples of a step, round after round; -1 where nothing has been drawn."""

    def __init__(self, plan: StepPlan, logits: torch.Tensor) -> None:
        self.plan = plan
        #: [n, vocab] float32
        self.logits = logits
        self.tokens = torch.full((len(logits),), -1)
        self._logprobs = torch.zeros(len(logits))
        self._tops: list[tuple[int, list[int], list[float]]] = []
        self._began = time.monotonic_ns()

    def put(self, samples: Samples, at: Rows) -> None:
        """What was drawn as samples `at`."""
        index = torch.from_numpy(at)
        self.tokens[index], self._logprobs[index] = samples.tokens, samples.logprobs
        self._tops += [(int(at[i]), ids, logprobs) for i, ids, logprobs in samples.tops]

    def result(self, forwarded: StepResult) -> StepResult:
        """What the step brought, with this."""
        return replace(
            forwarded,
            tokens=self.tokens.tolist(),
            logprobs=self._logprobs.tolist(),
            tops=self._tops,
            sample_ns=time.monotonic_ns() - self._began,
        )


class HostExecutor:
    """The model on a CPU.

    Args:
        model: what computes hidden states and logits.
        pool: keys and values; slots are given by the plans.
        rows: sequences that can be live at once.
        vocab_size: width of the logits.
        group: the ranks that the model is divided among, if it is.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        rows: int,
        vocab_size: int,
        group: Group | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._sampler = host_sampler(group, rows=rows, vocab_size=vocab_size)
        self._last_token = torch.zeros(rows, dtype=torch.int64)
        #: Where each row's keys and values lie, in order of position.
        self._runs: list[list[Run]] = [[] for _ in range(rows)]
        #: How many positions that is.
        self._held = np.zeros(rows, np.int32)
        #: The last step, which may wait for masks.
        self._unsampled: Done | None = None
        self._follows = group is not None and group.rank > 0

    def launch(self, plan: StepPlan) -> Done:
        """Run one step."""
        with torch.inference_mode():
            if self._unsampled is not None:
                self._unsampled.sample({})
            self._unsampled = self._run(plan)
            return self._unsampled

    def release(self, rows: Sequence[int]) -> None:
        """Forget these rows, as a plan's `freed` does."""
        for row in rows:
            self._sampler.clear_row(row)
            self._runs[row] = []

    def _run(self, plan: StepPlan) -> Done:
        began = time.monotonic_ns()
        self.release(plan.freed.tolist())
        if len(plan.copy_from):
            self._pool.copy(torch.from_numpy(plan.copy_from), torch.from_numpy(plan.copy_to))
        self._take_rows(plan)
        batch = self._batch(plan)
        hidden = self._model.forward(batch, self._pool)
        result = StepResult([], [], [], self._score_prompts(plan, batch, hidden))
        if not plan.r_samples.any():
            return Done(plan, replace(result, forward_ns=time.monotonic_ns() - began))
        logits = self._model.logits(hidden, batch).float()
        result = replace(result, forward_ns=time.monotonic_ns() - began)
        drawing = _Drawing(plan, logits)
        self._draw(drawing, unmasked_rounds(plan))
        if not plan.r_masked.any():
            return Done(plan, drawing.result(result))

        def rest(masks: Masks) -> StepResult:
            self._draw(drawing, masked_rounds(plan), masks)
            return drawing.result(result)

        done = Done(plan, result, rest)
        if self._follows:
            done.sample(None)
        return done

    def _draw(self, drawing: _Drawing, turns: list[Round], masks: Masks | None = None) -> None:
        """Draw these rounds; nothing behind a wrong draft, or where masks forbid."""
        plan = drawing.plan
        for turn in turns:
            right = slice(None)
            if turn.place:
                drawn = drawing.tokens.numpy()[turn.before]
                right = drawn == drafts_of(plan, turn)
            at, which = turn.at[right], turn.rows[right]
            if not len(at):
                continue
            logits = drawing.logits if len(at) == len(drawing.logits) else drawing.logits[at]
            bits = None
            if masks is not None:  # where there is none, nothing is allowed
                bits = torch.from_numpy(allowed(masks, turn, logits.shape[1])[right])
            rows = plan.r_row[which].astype(np.int64)
            outputs = (plan.r_output[which] + turn.place).tolist()
            samples = self._sampler.sample(logits, rows.tolist(), outputs, bits)
            drawing.put(samples, at)
            # A bad row's token is never used; that it stays is good for one that was not sampled.
            drew = samples.tokens >= 0
            self._last_token[torch.from_numpy(rows)[drew]] = samples.tokens[drew]

    def _take_rows(self, plan: StepPlan) -> None:
        self._sampler.take_rows(plan)
        for row, prefix in new_rows(plan):
            self._runs[row] = []
            append_slots(self._runs[row], prefix)
            self._held[row] = len(prefix)

    def _note_slots(self, plan: StepPlan, starts: list[int]) -> None:
        """Note where the step's keys and values go, in the place of what rejected drafts left."""
        for at in np.flatnonzero(self._held[plan.r_row] != plan.r_start).tolist():
            row, start = int(plan.r_row[at]), int(plan.r_start[at])
            known = cut_runs(self._runs[row], start)
            assert known, f"row {row} goes on at {start}, but holds {self._held[row]} positions"
        self._held[plan.r_row] = plan.r_start + plan.r_tokens
        for row, start, end in zip(plan.r_row.tolist(), starts, starts[1:], strict=False):
            append_slots(self._runs[row], plan.t_slot[start:end])

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        counts = Counts.of(plan)
        words = torch.empty(counts.words, dtype=torch.int64)
        host, integers = views(words.numpy(), counts), views(words, counts)
        fill(host, plan)
        rows, starts = plan.r_row.tolist(), host.b_start.tolist()
        self._note_slots(plan, starts)
        resumed = torch.from_numpy(np.flatnonzero(plan.t_token == LAST))
        if len(resumed):
            last = self._last_token[integers.t_row[resumed]]
            integers.t_token.index_copy_(0, resumed, last)
        return ForwardBatch(
            t_token=integers.t_token,
            t_position=integers.t_position,
            t_slot=integers.t_slot,
            b_start=starts,
            b_context=host.b_context.tolist(),
            b_runs=[self._runs[row] for row in rows],
            b_row=rows,
            row_table=_NO_TABLE,
            single_rows=plan.singles,
            logit_index=integers.logit_index,
            given=self._given(plan),
            t_adapter=integers.t_adapter if counts.adapters else None,
        )

    def _given(self, plan: StepPlan) -> GivenEmbeddings | None:
        if not len(plan.given):
            return None
        index = given_tokens(plan)
        rows = torch.from_numpy(plan.given[GIVEN - plan.t_token[index]])
        return GivenEmbeddings(torch.from_numpy(index), rows.to(self._model.dtype))

    def _score_prompts(
        self, plan: StepPlan, batch: ForwardBatch, hidden: torch.Tensor
    ) -> dict[int, list[float]]:
        return {
            row: self._score_prompt(following, hidden, batch, batch.b_start[row])
            for row, following in scored_rows(plan)
        }

    def _score_prompt(
        self, following: Ints, hidden: torch.Tensor, batch: ForwardBatch, first: int
    ) -> list[float]:
        scores: list[float] = []
        # In pieces: the logits of a whole prompt over a large vocabulary would be gigabytes.
        for at in range(0, len(following), 128):
            part = torch.from_numpy(following[at : at + 128].astype(np.int64))
            wanted = torch.arange(first + at, first + at + len(part))
            logits = self._model.logits(hidden, replace(batch, logit_index=wanted)).float()
            scores += logprobs_of(logits, part).tolist()
        return scores
