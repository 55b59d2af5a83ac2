"""Runs step plans on a GPU, asynchronously.

`launch` queues a step and returns: one copy of integers from pinned memory, the model, sampling,
and copies of the results into pinned memory behind them. Tokens that one step samples and the next
one processes never leave the device, so the next step can be launched before `wait` is called for
this one. A step in which every row decodes replays a captured graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tokenpod.engine.batch import ForwardBatch, PagedRows, Run, append_slots
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.executor import Model
from tokenpod.engine.graphs import DecodeGraphs, ladder
from tokenpod.engine.integers import LAST, Counts, Integers, fill, pad, views
from tokenpod.engine.mailbox import Flight, Mailbox
from tokenpod.engine.plan import NewRow, RowWork, StepPlan
from tokenpod.engine.pool import KVPool
from tokenpod.engine.sampler import prompt_logprobs

#: Steps that can be under way: one computes, one waits behind it, one is being filled in.
_DEPTH = 3
#: Prompt tokens whose logits are made at a time.
_SCORED_AT_ONCE = 128


class DeviceExecutor:
    """The model on one GPU.

    Args:
        model: what computes hidden states and logits.
        pool: keys and values; slots are given by the plans.
        sampler: for as many rows.
        rows: sequences that can be live at once.
        max_positions: longest sequence, in tokens.
        max_tokens: most tokens of a step.
        device: a GPU. (A CPU will do where kernels are interpreted: tests.)
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        sampler: DeviceSampler,
        *,
        rows: int,
        max_positions: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pool = pool
        self._device = device
        self._rows = rows
        self._sampler = sampler
        # The last row of both is padding's.
        self._last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._row_table = torch.zeros((rows + 1, max_positions), dtype=torch.int32, device=device)
        words = Counts(max_tokens, rows, rows).words
        self._words = torch.empty(words, dtype=torch.int64, device=device)
        self._mailboxes = [Mailbox(rows, words, device) for _ in range(_DEPTH)]
        self._turn = 0
        #: Where the KV of rows with a prompt under way lies.
        self._runs: list[list[Run]] = [[] for _ in range(rows)]
        self._graphs: DecodeGraphs | None = None

    def use(self, pool: KVPool) -> None:
        """Keep keys and values there from now on. No step is under way, no row is taken."""
        assert self._graphs is None, "captured steps know the pool that they were captured with"
        self._pool = pool

    def capture(self) -> None:
        """Capture the decode steps; before this, and for other steps, kernels go one by one."""
        with torch.inference_mode():
            self._graphs = DecodeGraphs(self._forward_decode, ladder(self._rows), self._padding)

    def launch(self, plan: StepPlan) -> Flight:
        """Queue one step."""
        with torch.inference_mode():
            return self._run(plan)

    def release(self, rows: Sequence[int]) -> None:
        """Forget these rows, as a plan's `freed` does."""
        for row in rows:
            self._sampler.clear_row(row)
            self._runs[row] = []

    # -- a step --------------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> Flight:
        self.release(plan.freed)
        for fresh in plan.fresh:
            self._take_row(fresh)
        self._turn += 1
        mailbox = self._mailboxes[self._turn % _DEPTH]
        mailbox.begin()
        works = plan.works
        samples = sum(work.samples for work in works)
        size = self._captured_size(works)
        scored: dict[int, torch.Tensor] = {}
        logits: torch.Tensor | None
        if size is not None:
            logits, integers = self._replay(works, size, mailbox)
        else:
            logits, integers, scored = self._forward(works, samples, mailbox)
        mailbox.forwarded()
        drawn = None
        if logits is not None:
            drawn = self._sampler.sample(
                logits, integers.sample_row[:samples], integers.sample_position[:samples]
            )
            # A bad row's token is never used; zero keeps the next step's embedding in bounds.
            self._last_token.index_copy_(
                0, integers.sample_row[:samples], drawn.tokens.clamp(min=0)
            )
        return mailbox.send(drawn, scored)

    def _captured_size(self, works: Sequence[RowWork]) -> int | None:
        """The graph for these works, if there is one."""
        if self._graphs is None:
            return None
        if all(len(w.slots) == 1 and w.samples and w.next_tokens is None for w in works):
            return self._graphs.size_for(len(works))
        return None

    def _replay(
        self, works: Sequence[RowWork], size: int, mailbox: Mailbox
    ) -> tuple[torch.Tensor, Integers]:
        assert self._graphs is not None
        counts, actual = Counts.decode(size), len(works)
        host = views(mailbox.host_words, counts)
        fill(host, works)
        pad(host, actual, padding_row=self._rows, sink=self._pool.sink)
        logits, integers = self._graphs.replay(size, mailbox.words[: counts.words])
        return logits[:actual], integers

    def _forward(
        self, works: Sequence[RowWork], samples: int, mailbox: Mailbox
    ) -> tuple[torch.Tensor | None, Integers, dict[int, torch.Tensor]]:
        """Logits of the rows that sample, if any; log probabilities of prompts by index of work."""
        counts = Counts(sum(len(work.slots) for work in works), len(works), samples)
        host = views(mailbox.host_words, counts)
        fill(host, works)
        for work in works:
            if work.tokens is not None:
                append_slots(self._runs[work.row], work.slots)
        words = self._words[: counts.words]
        words.copy_(mailbox.words[: counts.words], non_blocking=True)
        integers = views(words, counts)
        batch = self._batch(integers, host, works)
        hidden = self._model.forward(batch, self._pool)
        scored = {
            i: self._score_prompt(work, hidden[batch.b_start[i] : batch.b_start[i + 1]])
            for i, work in enumerate(works)
            if work.next_tokens
        }
        logits = self._model.logits(hidden[integers.logit_index]) if samples else None
        return logits, integers, scored

    def _forward_decode(self, counts: Counts, integers: Integers) -> torch.Tensor:
        """What is captured."""
        rows = counts.rows
        hidden = self._model.forward(
            ForwardBatch(
                t_token=self._resolve(integers),
                t_position=integers.t_position,
                t_slot=integers.t_slot,
                b_start=list(range(rows + 1)),
                b_context=[0] * rows,  # known on the device only
                b_runs=[[]] * rows,
                b_row=[0] * rows,
                row_table=self._row_table,
                single_rows=rows,
                logit_index=integers.logit_index,
                paged=PagedRows(integers.b_row, integers.b_start, integers.b_context),
            ),
            self._pool,
        )
        return self._model.logits(hidden)

    def _batch(self, integers: Integers, host: Integers, works: Sequence[RowWork]) -> ForwardBatch:
        return ForwardBatch(
            t_token=self._resolve(integers),
            t_position=integers.t_position,
            t_slot=integers.t_slot,
            b_start=host.b_start.tolist(),
            b_context=host.b_context.tolist(),
            b_runs=[self._runs[work.row] for work in works],
            b_row=[work.row for work in works],
            row_table=self._row_table,
            single_rows=sum(len(work.slots) == 1 for work in works),
            logit_index=integers.logit_index,
            paged=PagedRows(integers.b_row, integers.b_start, integers.b_context),
        )

    def _resolve(self, integers: Integers) -> torch.Tensor:
        """[T] tokens; the slots of a step's tokens are entered in the row table on the way."""
        self._row_table.index_put_(
            (integers.t_row, integers.t_position), integers.t_slot.to(torch.int32)
        )
        last = self._last_token.index_select(0, integers.t_row)
        return torch.where(integers.t_token == LAST, last, integers.t_token)

    def _score_prompt(self, work: RowWork, hidden: torch.Tensor) -> torch.Tensor:
        assert work.next_tokens is not None
        following = self._upload(np.asarray(work.next_tokens, np.int64))
        # In pieces: the logits of a whole prompt over a large vocabulary would be gigabytes.
        pieces = [
            prompt_logprobs(self._model.logits(hidden[at : at + len(part)]), part)
            for at, part in _pieces(following)
        ]
        return torch.cat(pieces)

    # -- rows ----------------------------------------------------------------------------------

    def _take_row(self, fresh: NewRow) -> None:
        runs: list[Run] = []
        self._runs[fresh.row] = runs
        append_slots(runs, fresh.prefix_slots)
        if len(fresh.prefix_slots):
            prefix = self._upload(fresh.prefix_slots.astype(np.int32))
            self._row_table[fresh.row, : len(prefix)] = prefix
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

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        source = torch.from_numpy(values)
        if self._device.type == "cuda":
            source = source.pin_memory()
        return source.to(self._device, non_blocking=True)

    def _padding(self, size: int) -> torch.Tensor:
        counts = Counts.decode(size)
        host = np.zeros(counts.words, np.int64)
        pad(views(host, counts), 0, padding_row=self._rows, sink=self._pool.sink)
        return torch.from_numpy(host).to(self._device)


def _pieces(following: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for at in range(0, len(following), _SCORED_AT_ONCE):
        yield at, following[at : at + _SCORED_AT_ONCE]
