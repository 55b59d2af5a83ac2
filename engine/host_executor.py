"""Runs step plans on a CPU: nothing is asynchronous, and attention reads runs of slots."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from tokenpod.core.plan import LAST, Ints, StepPlan
from tokenpod.engine.executor import Model, StepResult, new_rows, scored_rows
from tokenpod.engine.integers import Counts, fill, sampled, views
from tokenpod.engine.row_sampling import RowSampling
from tokenpod.engine.sampler import prompt_logprobs
from tokenpod.engine.shared_sampler import FollowingSampler, host_sampler
from tokenpod.kernels.batch import ForwardBatch, Run, append_slots
from tokenpod.kernels.group import Group
from tokenpod.kernels.pool import KVPool

#: A CPU reads runs.
_NO_TABLE = torch.zeros((0, 0), dtype=torch.int32)


class Done:
    """A step that was complete when `launch` returned."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        """The result."""
        return self._result


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

    def launch(self, plan: StepPlan) -> Done:
        """Run one step."""
        with torch.inference_mode():
            return Done(self._run(plan))

    def release(self, rows: Sequence[int]) -> None:
        """Forget these rows, as a plan's `freed` does."""
        for row in rows:
            self._sampler.clear_row(row)
            self._runs[row] = []

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.monotonic_ns()
        self.release(plan.freed.tolist())
        self._take_rows(plan)
        batch = self._batch(plan)
        hidden = self._model.forward(batch, self._pool)
        scored = self._score_prompts(plan, batch, hidden)
        which, places = sampled(plan)
        if not len(which):
            return StepResult([], [], [], scored, forward_ns=time.monotonic_ns() - began)
        logits = self._model.logits(hidden[batch.logit_index]).float()
        forwarded = time.monotonic_ns()
        outputs = (plan.r_output[which] + places).tolist()
        rows = plan.r_row[which].astype(np.int64)
        samples = self._sampler.sample(logits, rows.tolist(), outputs)
        # A bad row's token is never used; zero keeps the next step's embedding in bounds.
        where = torch.from_numpy(rows)
        self._last_token.index_copy_(0, where, samples.tokens.clamp(min=0))
        return StepResult(
            tokens=samples.tokens.tolist(),
            logprobs=samples.logprobs.tolist(),
            tops=[(at, list(ids), list(logprobs)) for at, ids, logprobs in samples.tops],
            prompt_logprobs=scored,
            forward_ns=forwarded - began,
            sample_ns=time.monotonic_ns() - forwarded,
        )

    def _take_rows(self, plan: StepPlan) -> None:
        for at, (row, prefix) in enumerate(new_rows(plan)):
            self._runs[row] = []
            append_slots(self._runs[row], prefix)
            if isinstance(self._sampler, FollowingSampler):
                self._sampler.follow_row(row, draws=bool(plan.n_draws[at]))
            else:
                new = plan.asks[at]
                self._sampler.set_row(row, RowSampling.of(new), new.request.prompt, new.outputs)

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        counts = Counts(plan.tokens, plan.rows, int(plan.r_samples.sum()))
        words = torch.empty(counts.words, dtype=torch.int64)
        host, integers = views(words.numpy(), counts), views(words, counts)
        fill(host, plan)
        rows, starts = plan.r_row.tolist(), host.b_start.tolist()
        for row, start, end in zip(rows, starts, starts[1:], strict=False):
            append_slots(self._runs[row], plan.t_slot[start:end])
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
        )

    def _score_prompts(
        self, plan: StepPlan, batch: ForwardBatch, hidden: torch.Tensor
    ) -> dict[int, list[float]]:
        return {
            row: self._score_prompt(following, hidden[batch.b_start[row] :])
            for row, following in scored_rows(plan)
        }

    def _score_prompt(self, following: Ints, hidden: torch.Tensor) -> list[float]:
        scores: list[float] = []
        # In pieces: the logits of a whole prompt over a large vocabulary would be gigabytes.
        for at in range(0, len(following), 128):
            part = torch.from_numpy(following[at : at + 128].astype(np.int64))
            logits = self._model.logits(hidden[at : at + len(part)]).float()
            scores += prompt_logprobs(logits, part).tolist()
        return scores
