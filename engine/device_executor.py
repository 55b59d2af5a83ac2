"""Runs step plans on a GPU, asynchronously.

`launch` queues a step and returns: one copy of integers from pinned memory, the model, sampling,
and copies of the results into pinned memory behind them. Tokens that one step samples and the next
one processes never leave the device, so the next step can be launched before `wait` is called for
this one. A step in which every row decodes replays a captured graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from tokenpod.core.plan import LAST, Ints, StepPlan
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.executor import CapturableModel, new_rows, scored_rows
from tokenpod.engine.graphs import Captured, Graphs, decode_counts, mixed_counts
from tokenpod.engine.integers import Counts, Integers, fill, pad, views
from tokenpod.engine.mailbox import Flight, Mailbox
from tokenpod.engine.row_sampling import RowSampling
from tokenpod.engine.sampler import prompt_logprobs
from tokenpod.engine.shared_device_sampler import FollowingDeviceSampler
from tokenpod.kernels.batch import ForwardBatch, PagedRows, RaggedRows, Run, append_slots
from tokenpod.kernels.pool import KVPool
from tokenpod.kernels.triton.steps import remember, resolve

#: Steps that can be under way: one computes, one waits behind it, one is being filled in.
_DEPTH = 3
#: Mixed steps of more tokens than this take a GPU longer than Python takes to launch them.
_MOST_CAPTURED_TOKENS = 1024
#: A captured mixed step has room for so many rows with several tokens.
_MOST_CAPTURED_EXTENDS = 64
#: Tiles of rows with several tokens have at least so many queries, but for a row's last.
_LEAST_TILE = 8
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
        model: CapturableModel,
        pool: KVPool,
        sampler: DeviceSampler | FollowingDeviceSampler,
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
        most = min(max_tokens, _MOST_CAPTURED_TOKENS)
        words = Counts(max_tokens, rows, rows, self._tile_numbers(most)).words
        self._words = torch.empty(words, dtype=torch.int64, device=device)
        self._mailboxes = [Mailbox(rows, words, device) for _ in range(_DEPTH)]
        self._turn = 0
        #: Where the KV of rows with a prompt under way lies.
        self._runs: list[list[Run]] = [[] for _ in range(rows)]
        self._max_tokens = max_tokens
        self._decode: Graphs | None = None
        self._mixed: Graphs | None = None

    def use(self, pool: KVPool) -> None:
        """Keep keys and values there from now on. No step is under way, no row is taken."""
        assert self._decode is None, "captured steps know the pool that they were captured with"
        self._pool = pool

    def capture(self) -> None:
        """Capture steps of up to 1,024 tokens; before this, and for others, kernels go singly."""
        most = min(self._max_tokens, _MOST_CAPTURED_TOKENS)
        with torch.inference_mode():
            self._mixed = Graphs(
                self._forward_mixed,
                mixed_counts(self._rows, most, self._tile_numbers),
                self._padding,
            )
            self._decode = Graphs(
                self._forward_decode, decode_counts(self._rows), self._padding, self._mixed.memory
            )

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
        self.release(plan.freed.tolist())
        self._take_rows(plan)
        self._turn += 1
        mailbox = self._mailboxes[self._turn % _DEPTH]
        mailbox.begin()
        samples = int(plan.r_samples.sum())
        self._extend_runs(plan)
        scored: dict[int, torch.Tensor] = {}
        logits: torch.Tensor | None
        captured = self._captured(plan, mailbox)
        if captured is not None:
            logits = captured.replay(mailbox.words[: captured.counts.words])[:samples]
            integers = captured.integers
        else:
            logits, integers, scored = self._forward(plan, samples, mailbox)
        mailbox.forwarded()
        drawn = None
        if samples:
            assert logits is not None
            rows, positions = integers.sample_row[:samples], integers.sample_position[:samples]
            if captured is None:
                self._sampler.begin(logits, rows, positions)
            drawn = self._sampler.finish(logits, rows, positions)
            if captured is None or self._sampler.launches.draws:
                remember(drawn.tokens, rows, self._last_token)
        return mailbox.send(drawn, scored)

    def _captured(self, plan: StepPlan, mailbox: Mailbox) -> Captured | None:
        """The graph for this step, if there is one, its integers in the mailbox."""
        if self._decode is None or self._mixed is None or len(plan.scored_token):
            return None
        if plan.rows == plan.tokens and plan.r_samples.all():
            captured = self._decode.fitting(plan.rows)
        else:
            captured = self._mixed.fitting(plan.tokens)
        if captured is None:
            return None
        host = views(mailbox.host_words, captured.counts)
        fill(host, plan)
        if captured.counts.tiles:
            tiles = self._model.tiles(
                self._ragged(host, plan), self._most_tiles(captured.counts.tokens)
            )
            if tiles is None:
                return None
            host.tiles[:] = tiles.reshape(-1)
        pad(host, plan, padding_row=self._rows, sink=self._pool.sink)
        return captured

    def _forward(
        self, plan: StepPlan, samples: int, mailbox: Mailbox
    ) -> tuple[torch.Tensor | None, Integers, dict[int, torch.Tensor]]:
        """Logits of the rows that sample, if any; log probabilities of prompts, by row."""
        counts = Counts(plan.tokens, plan.rows, samples)
        host = views(mailbox.host_words, counts)
        fill(host, plan)
        words = self._words[: counts.words]
        words.copy_(mailbox.words[: counts.words], non_blocking=True)
        integers = views(words, counts)
        batch = self._batch(integers, self._ragged(host, plan))
        hidden = self._model.forward(batch, self._pool)
        scored = {
            row: self._score_prompt(following, hidden[batch.b_start[row] :])
            for row, following in scored_rows(plan)
        }
        logits = self._model.logits(hidden[integers.logit_index]) if samples else None
        return logits, integers, scored

    def _forward_decode(self, counts: Counts, integers: Integers) -> torch.Tensor:
        """What is captured of steps in which every row decodes."""
        rows = RaggedRows(list(range(counts.rows + 1)), *_unknown(counts.rows), counts.rows)
        hidden = self._model.forward(self._batch(integers, rows), self._pool)
        return self._drawn(hidden, integers)

    def _forward_mixed(self, counts: Counts, integers: Integers) -> torch.Tensor:
        """What is captured of mixed steps.

        Rows that decode are fewer than `counts.rows`; what their kernel writes beyond them, zeros,
        is overwritten by the one that follows, for rows of several tokens.
        """
        singles = counts.rows
        rows = RaggedRows([*range(singles + 1), counts.tokens], *_unknown(singles + 1), singles)
        by_window = integers.tiles.view(len(self._model.windows), -1)
        tiles = dict(zip(self._model.windows, by_window, strict=True))
        hidden = self._model.forward(self._batch(integers, rows, tiles), self._pool)
        return self._drawn(hidden.index_select(0, integers.logit_index), integers)

    def _drawn(self, hidden: torch.Tensor, integers: Integers) -> torch.Tensor:
        """The end of a captured step: logits, and the tokens of rows that are greedy."""
        logits = self._model.logits(hidden)
        tokens = self._sampler.begin(logits, integers.sample_row, integers.sample_position)
        remember(tokens, integers.sample_row, self._last_token)
        return logits

    def _batch(
        self,
        integers: Integers,
        rows: RaggedRows,
        tiles: Mapping[int | None, torch.Tensor] | None = None,
    ) -> ForwardBatch:
        return ForwardBatch(
            t_token=self._resolve(integers),
            t_position=integers.t_position,
            t_slot=integers.t_slot,
            b_start=rows.b_start,
            b_context=rows.b_context,
            b_runs=rows.b_runs,
            b_row=rows.b_row,
            row_table=self._row_table,
            single_rows=rows.single_rows,
            logit_index=integers.logit_index,
            paged=PagedRows(integers.b_row, integers.b_start, integers.b_context, tiles),
        )

    def _ragged(self, host: Integers, plan: StepPlan) -> RaggedRows:
        rows = plan.r_row.tolist()
        return RaggedRows(
            b_start=host.b_start[: len(rows) + 1].tolist(),
            b_context=host.b_context[: len(rows)].tolist(),
            b_runs=[self._runs[row] for row in rows],
            b_row=rows,
            single_rows=plan.singles,
        )

    def _extend_runs(self, plan: StepPlan) -> None:
        """Note where prompts' tokens go; nobody asks where the KV of rows that decode lies."""
        ends = plan.r_tokens.cumsum()
        prompts = plan.t_token[ends - plan.r_tokens] != LAST
        for at in np.flatnonzero(prompts).tolist():
            runs = self._runs[plan.r_row[at]]
            append_slots(runs, plan.t_slot[ends[at] - plan.r_tokens[at] : ends[at]])

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

    def _score_prompt(self, tokens: Ints, hidden: torch.Tensor) -> torch.Tensor:
        following = self._upload(tokens.astype(np.int64))
        # In pieces: the logits of a whole prompt over a large vocabulary would be gigabytes.
        pieces = [
            prompt_logprobs(self._model.logits(hidden[at : at + len(part)]).float(), part)
            for at, part in _pieces(following)
        ]
        return torch.cat(pieces)

    # -- rows ----------------------------------------------------------------------------------

    def _take_rows(self, plan: StepPlan) -> None:
        for at, (row, prefix) in enumerate(new_rows(plan)):
            self._runs[row] = []
            append_slots(self._runs[row], prefix)
            if len(prefix):
                self._row_table[row, : len(prefix)] = self._upload(prefix)
            if isinstance(self._sampler, FollowingDeviceSampler):
                self._sampler.follow_row(row, draws=bool(plan.n_draws[at]))
            else:
                new = plan.asks[at]
                self._sampler.set_row(row, RowSampling.of(new), new.request.prompt, new.outputs)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        source = torch.from_numpy(values)
        if self._device.type == "cuda":
            source = source.pin_memory()
        return source.to(self._device, non_blocking=True)

    def _padding(self, counts: Counts) -> torch.Tensor:
        host = np.zeros(counts.words, np.int64)
        pad(views(host, counts), None, padding_row=self._rows, sink=self._pool.sink)
        return torch.from_numpy(host).to(self._device)

    def _tile_numbers(self, tokens: int) -> int:
        """How many numbers describe the tiles of a captured step."""
        nobody = RaggedRows([0], [], [], [], 0)
        tiles = self._model.tiles(nobody, self._most_tiles(tokens))
        assert tiles is not None
        return tiles.size

    def _most_tiles(self, tokens: int) -> int:
        """Room for tiles of either kind in a captured step of `tokens` tokens."""
        return tokens // _LEAST_TILE + min(self._rows, _MOST_CAPTURED_EXTENDS)


def _unknown(rows: int) -> tuple[list[int], list[list[Run]], list[int]]:
    """Contexts, runs and rows of a captured step, which the device is told."""
    return [0] * rows, [[]] * rows, [0] * rows


def _pieces(following: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for at in range(0, len(following), _SCORED_AT_ONCE):
        yield at, following[at : at + _SCORED_AT_ONCE]
