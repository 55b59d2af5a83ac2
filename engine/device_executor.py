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

from tokenpod.core.plan import NewRow, RowWork, StepPlan
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.executor import CapturableModel
from tokenpod.engine.graphs import Captured, Graphs, decode_counts, mixed_counts
from tokenpod.engine.integers import Counts, Integers, fill, pad, views
from tokenpod.engine.mailbox import Flight, Mailbox
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
        self.release(plan.freed)
        for fresh in plan.fresh:
            self._take_row(fresh)
        self._turn += 1
        mailbox = self._mailboxes[self._turn % _DEPTH]
        mailbox.begin()
        works = plan.works
        samples = sum(work.samples for work in works)
        for work in works:
            if work.tokens is not None:
                append_slots(self._runs[work.row], work.slots)
        scored: dict[int, torch.Tensor] = {}
        logits: torch.Tensor | None
        captured = self._captured(works, mailbox)
        if captured is not None:
            logits = captured.replay(mailbox.words[: captured.counts.words])[:samples]
            integers = captured.integers
        else:
            logits, integers, scored = self._forward(works, samples, mailbox)
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

    def _captured(self, works: Sequence[RowWork], mailbox: Mailbox) -> Captured | None:
        """The graph for these works, if there is one, its integers in the mailbox."""
        if self._decode is None or self._mixed is None or any(w.next_tokens for w in works):
            return None
        if all(len(work.slots) == 1 and work.samples for work in works):
            captured = self._decode.fitting(len(works))
        else:
            captured = self._mixed.fitting(sum(len(work.slots) for work in works))
        if captured is None:
            return None
        host = views(mailbox.host_words, captured.counts)
        fill(host, works)
        if captured.counts.tiles:
            tiles = self._model.tiles(
                self._ragged(host, works), self._most_tiles(captured.counts.tokens)
            )
            if tiles is None:
                return None
            host.tiles[:] = tiles.reshape(-1)
        pad(host, works, padding_row=self._rows, sink=self._pool.sink)
        return captured

    def _forward(
        self, works: Sequence[RowWork], samples: int, mailbox: Mailbox
    ) -> tuple[torch.Tensor | None, Integers, dict[int, torch.Tensor]]:
        """Logits of the rows that sample, if any; log probabilities of prompts by index of work."""
        counts = Counts(sum(len(work.slots) for work in works), len(works), samples)
        host = views(mailbox.host_words, counts)
        fill(host, works)
        words = self._words[: counts.words]
        words.copy_(mailbox.words[: counts.words], non_blocking=True)
        integers = views(words, counts)
        batch = self._batch(integers, self._ragged(host, works))
        hidden = self._model.forward(batch, self._pool)
        scored = {
            i: self._score_prompt(work, hidden[batch.b_start[i] : batch.b_start[i + 1]])
            for i, work in enumerate(works)
            if work.next_tokens
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

    def _ragged(self, host: Integers, works: Sequence[RowWork]) -> RaggedRows:
        return RaggedRows(
            b_start=host.b_start[: len(works) + 1].tolist(),
            b_context=host.b_context[: len(works)].tolist(),
            b_runs=[self._runs[work.row] for work in works],
            b_row=[work.row for work in works],
            single_rows=sum(len(work.slots) == 1 for work in works),
        )

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

    def _score_prompt(self, work: RowWork, hidden: torch.Tensor) -> torch.Tensor:
        assert work.next_tokens is not None
        following = self._upload(np.asarray(work.next_tokens, np.int64))
        # In pieces: the logits of a whole prompt over a large vocabulary would be gigabytes.
        pieces = [
            prompt_logprobs(self._model.logits(hidden[at : at + len(part)]).float(), part)
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

    def _padding(self, counts: Counts) -> torch.Tensor:
        host = np.zeros(counts.words, np.int64)
        pad(views(host, counts), [], padding_row=self._rows, sink=self._pool.sink)
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
