"""Runs step plans on a CPU: nothing is asynchronous, and attention reads runs of slots."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from tokenpod.core.plan import NewRow, RowWork, StepPlan
from tokenpod.engine.executor import Model, StepResult
from tokenpod.engine.sampler import prompt_logprobs
from tokenpod.engine.shared_sampler import host_sampler
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
        self.release(plan.freed)
        for fresh in plan.fresh:
            self._take_row(fresh)
        batch = self._batch(plan)
        hidden = self._model.forward(batch, self._pool)
        scored = {
            i: self._score_prompt(work, hidden[batch.b_start[i] : batch.b_start[i + 1]])
            for i, work in enumerate(plan.works)
            if work.next_tokens
        }
        sampling = [work for work in plan.works if work.samples]
        if not sampling:
            return StepResult([], [], [], scored, forward_ns=time.monotonic_ns() - began)
        logits = self._model.logits(hidden[batch.logit_index]).float()
        forwarded = time.monotonic_ns()
        rows = [work.row for work in sampling]
        samples = self._sampler.sample(logits, rows, [work.output_index for work in sampling])
        # A bad row's token is never used; zero keeps the next step's embedding in bounds.
        where = torch.tensor(rows)
        self._last_token.index_copy_(0, where, samples.tokens.clamp(min=0))
        return StepResult(
            tokens=samples.tokens.tolist(),
            logprobs=samples.logprobs.tolist(),
            tops=[(at, list(ids), list(logprobs)) for at, ids, logprobs in samples.tops],
            prompt_logprobs=scored,
            forward_ns=forwarded - began,
            sample_ns=time.monotonic_ns() - forwarded,
        )

    def _take_row(self, fresh: NewRow) -> None:
        runs: list[Run] = []
        self._runs[fresh.row] = runs
        append_slots(runs, fresh.prefix_slots)
        self._sampler.set_row(
            fresh.row,
            fresh.sampling,
            stream=fresh.stream,
            prompt=fresh.prompt,
            eos_token_ids=fresh.eos_token_ids,
            stop_token_ids=fresh.stop_token_ids,
            min_new_tokens=fresh.min_new_tokens,
            logprobs=fresh.logprobs,
            top_n=fresh.top_n_tokens,
        )

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        works = plan.works
        b_start = [0]
        tokens: list[int] = []
        positions: list[int] = []
        resumed: list[int] = []  # rows' last tokens, by index
        resumed_rows: list[int] = []
        logit_index: list[int] = []
        singles = 0
        for work in works:
            n = len(work.slots)
            singles += n == 1
            if work.tokens is None:
                resumed.append(len(tokens))
                resumed_rows.append(work.row)
                tokens.append(0)
                positions.append(work.start)
            else:
                tokens += work.tokens
                positions += range(work.start, work.start + n)
            b_start.append(len(tokens))
            if work.samples:
                logit_index.append(len(tokens) - 1)
            append_slots(self._runs[work.row], work.slots)
        t_token = torch.tensor(tokens, dtype=torch.int64)
        t_position = torch.tensor(positions, dtype=torch.int64)
        slots = np.concatenate([work.slots for work in works])
        t_slot = torch.from_numpy(slots)
        if resumed:
            rows = torch.tensor(resumed_rows)
            where = torch.tensor(resumed)
            t_token.index_copy_(0, where, self._last_token.index_select(0, rows))
        return ForwardBatch(
            t_token=t_token,
            t_position=t_position,
            t_slot=t_slot,
            b_start=b_start,
            b_context=[work.start + len(work.slots) for work in works],
            b_runs=[self._runs[work.row] for work in works],
            b_row=[work.row for work in works],
            row_table=_NO_TABLE,
            single_rows=singles,
            logit_index=torch.tensor(logit_index, dtype=torch.int64),
        )

    def _score_prompt(self, work: RowWork, hidden: torch.Tensor) -> list[float]:
        assert work.next_tokens is not None
        following = torch.tensor(work.next_tokens, dtype=torch.int64)
        scores: list[float] = []
        # In pieces: the logits of a whole prompt over a large vocabulary would be gigabytes.
        for at in range(0, len(following), 128):
            part = following[at : at + 128]
            logits = self._model.logits(hidden[at : at + len(part)]).float()
            scores += prompt_logprobs(logits, part).tolist()
        return scores
