"""Runs step plans: one rank's model, KV pool and sampler.

An executor does as it is told: it owns tensors and no policy. What a step needs of earlier ones
(the last sampled token of each row, penalties' token histories) stays on the device, so that a step
can be launched before the host has seen the tokens of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tokenpod.engine.batch import ForwardBatch, Run
from tokenpod.engine.plan import NewRow, RowWork, StepPlan
from tokenpod.engine.pool import KVPool
from tokenpod.engine.sampler import Sampler, prompt_logprobs


class Model(Protocol):
    """What an executor asks of a model."""

    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """[T, hidden]: hidden states after the last norm."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab] float32."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, on the host. Parallel to the works that sample, in order."""

    #: -1 where the logits held NaN or Inf.
    tokens: list[int]
    logprobs: list[float]
    #: (index into `tokens`, ids, logprobs) where top tokens were asked for.
    tops: list[tuple[int, list[int], list[float]]]
    #: By index into the plan's works: log probabilities of the tokens that follow.
    prompt_logprobs: dict[int, list[float]] = field(default_factory=dict)
    forward_ns: int = 0
    sample_ns: int = 0


class Launched:
    """A step under way. On a CPU it is complete when `launch` returns."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        """The result, once the device has it."""
        return self._result


class Executor:
    """The model on one device.

    Args:
        model: what computes hidden states and logits.
        pool: keys and values; slots are given by the plans.
        rows: sequences that can be live at once.
        max_positions: longest sequence, in tokens.
        vocab_size: width of the logits.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        rows: int,
        max_positions: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pool = pool
        self._device = device
        self._sampler = Sampler(rows=rows, vocab_size=vocab_size, device=device)
        self._last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        #: Kernels that gather by pointer read the table; a CPU reads the runs.
        self._paged = device.type != "cpu"
        table = (rows, max_positions) if self._paged else (0, 0)
        self._row_table = torch.zeros(table, dtype=torch.int32, device=device)
        #: Where each row's keys and values lie, in order of position: the table as runs.
        self._runs: list[list[Run]] = [[] for _ in range(rows)]

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step."""
        with torch.inference_mode():
            return Launched(self._run(plan))

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
        logits = self._model.logits(hidden[batch.logit_index])
        forwarded = time.monotonic_ns()
        rows = [work.row for work in sampling]
        samples = self._sampler.sample(logits, rows, [work.output_index for work in sampling])
        # A bad row's token is never used; zero keeps the next step's embedding in bounds.
        where = torch.tensor(rows, device=self._device)
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
        _append_slots(runs, fresh.prefix_slots)
        if self._paged:
            prefix = torch.from_numpy(fresh.prefix_slots).to(self._device, torch.int32)
            self._row_table[fresh.row, : len(fresh.prefix_slots)] = prefix
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
        resumed: list[int] = []  # tokens that the device knows, by index
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
            _append_slots(self._runs[work.row], work.slots)
        t_token = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        t_position = torch.tensor(positions, dtype=torch.int64, device=self._device)
        slots = np.concatenate([work.slots for work in works])
        t_slot = torch.from_numpy(slots).to(self._device)
        if resumed:
            rows = torch.tensor(resumed_rows, device=self._device)
            where = torch.tensor(resumed, device=self._device)
            t_token.index_copy_(0, where, self._last_token.index_select(0, rows))
        if self._paged:
            t_row = np.repeat([work.row for work in works], [len(work.slots) for work in works])
            row = torch.from_numpy(t_row).to(self._device)
            self._row_table[row, t_position] = t_slot.to(torch.int32)
        return ForwardBatch(
            t_token=t_token,
            t_position=t_position,
            t_slot=t_slot,
            b_start=b_start,
            b_context=[work.start + len(work.slots) for work in works],
            b_runs=[self._runs[work.row] for work in works],
            b_row=[work.row for work in works],
            row_table=self._row_table,
            single_rows=singles,
            logit_index=torch.tensor(logit_index, dtype=torch.int64, device=self._device),
        )

    def _score_prompt(self, work: RowWork, hidden: torch.Tensor) -> list[float]:
        assert work.next_tokens is not None
        following = torch.tensor(work.next_tokens, dtype=torch.int64, device=self._device)
        scores: list[float] = []
        # In pieces: the logits of a whole prompt over a large vocabulary would be gigabytes.
        for at in range(0, len(following), 128):
            part = following[at : at + 128]
            logits = self._model.logits(hidden[at : at + len(part)])
            scores += prompt_logprobs(logits, part).tolist()
        return scores


def _append_slots(runs: list[Run], slots: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    """Add `slots` at the end of `runs`, joining what is adjacent."""
    if len(slots) == 1:
        pieces = [(int(slots[0]), int(slots[0]) + 1)]
    elif len(slots) == 0:
        return
    else:
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        firsts = slots[np.concatenate(([0], breaks))].tolist()
        lasts = slots[np.concatenate((breaks - 1, [len(slots) - 1]))].tolist()
        pieces = [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
    for first, end in pieces:
        if runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((first, end))
