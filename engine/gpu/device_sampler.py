"""Choosing tokens on a device, without waiting for the host.

A row's columns go to the device once, when a sequence takes it; a step's sampling is then two to
seven launches whose shapes depend on nothing but the batch size, so that a CUDA graph can hold
them. It draws what `CpuSampler`, the specification, draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton

from tokenpod.core.new_row import NewRow
from tokenpod.core.sampling import (
    COUNTED,
    DRAWS,
    MOST_TOP_TOKENS,
    PROCESSED_TOPS,
    ROW_WORDS,
    TABLE,
    SamplingTable,
)
from tokenpod.engine.gpu.device_launches import Asked, Launches, SamplerTiles
from tokenpod.engine.gpu.device_rows import enter_rows
from tokenpod.engine.sampling.sampler import LeaderTokens, Sampler, Samples, edits_of
from tokenpod.engine.steps.mailbox import upload
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.sampling import sampling, sampling_rows, top_tokens
from tokenpod.kernels.sampling.token_rank import find_ranks

#: The largest vocabulary.
MOST_TOKENS = 1 << 18


def device_sampler(
    group: Group | None, *, rows: int, vocab_size: int, device: torch.device, most_edits: int
) -> DeviceSampler | LeaderTokens:
    """The sampler of a rank, or what followers have in place of one."""
    if group is not None and group.rank > 0:
        return LeaderTokens(group, rows=rows, device=device)
    return DeviceSampler(
        rows=rows, vocab_size=vocab_size, device=device, most_edits=most_edits, group=group
    )


class DeviceSampler(Sampler):
    """Draws on a device; see `Sampler` for the other arguments.

    It keeps 4 bytes for each row and vocabulary entry, the counts of tokens in prompt and output
    (16 bits each, which end at 65,535): 131 MB for 256 rows of 128,256. While it draws for rows
    that sample it takes 8 more, for candidates of truncated rows. These torch lends from what the
    layers' activations have just given back: the device's peak grows by what they exceed those.

    Args:
        rows: how many sequences can be live at once, and be in a step.
        vocab_size: width of the logits, at most 262,144.
        device: where logits come from.
        most_edits: how many logit biases, end and allowed tokens, and tokens of bad words one row
            can have in all.
    """

    def __init__(
        self,
        *,
        rows: int,
        vocab_size: int,
        device: torch.device,
        most_edits: int = 4096,
        tiles: SamplerTiles | None = None,
        group: Group | None = None,
        table: SamplingTable = TABLE,
    ) -> None:
        super().__init__(rows=rows, vocab_size=vocab_size, group=group, table=table)
        assert vocab_size <= MOST_TOKENS, f"{vocab_size} tokens; at most {MOST_TOKENS} are handled"
        assert tiles is None or tiles.split >= MOST_TOP_TOKENS, f"splits of {tiles.split} tokens"
        self._device = device
        self._tiles = tiles or SamplerTiles()
        #: None: a row has been set or cleared since they were found.
        self._launches: Launches | None = None
        self._most_edits = triton.next_power_of_2(most_edits)
        self._splits = triton.cdiv(vocab_size, self._tiles.split)
        self._most_splits = triton.next_power_of_2(self._splits)
        #: How kernels that read scores are launched.
        self._by_split = {"MOST_EDITS": self._most_edits, "SPLIT": self._tiles.split}
        self._by_split |= {"num_warps": self._tiles.warps, "enable_fp_fusion": False}
        #: The rows' words on the device. One row more: the greedy row of a graph's padding.
        self.device_words = self._empty(rows + 1, ROW_WORDS, dtype=torch.int64).zero_()
        self._edit_ids = self._empty(rows + 1, self._most_edits, dtype=torch.int32)
        self._edit_values = self._empty(rows + 1, self._most_edits, dtype=torch.float32)
        self._counts = self._empty(rows, vocab_size, dtype=torch.int32)
        self._found = self._empty(rows, dtype=torch.int32)
        self._stats = self._empty(rows, int(sampling.STATS.value), dtype=torch.float64)
        self._best, self._mass, self._moment, self._fitness, self._winner_score = (
            self._empty(rows, self._splits, dtype=torch.float32) for _ in range(5)
        )
        self._best_id = self._empty(rows, self._splits, dtype=torch.int32)
        self._winner = self._empty(rows, self._splits, dtype=torch.int32)
        self._group_best = self._empty(rows, self._splits * self._tiles.groups, dtype=torch.float32)
        self._ranks = self._empty(rows, self._splits, MOST_TOP_TOKENS, dtype=torch.int64)
        self._tokens = self._empty(rows, dtype=torch.int64)
        self._token_ranks = self._empty(rows, dtype=torch.int64)
        self._logprobs = self._empty(rows, dtype=torch.float32)
        self._top_ids = self._empty(rows, MOST_TOP_TOKENS, dtype=torch.int64)
        self._top_logprobs = self._empty(rows, MOST_TOP_TOKENS, dtype=torch.float32)

    @property
    def padding_row(self) -> int:
        """A row that belongs to nobody, greedy: what fills up a captured batch."""
        return len(self._words)

    @property
    def launches(self) -> Launches:
        """What the live rows need."""
        if self._launches is None:
            names = "flags", "top_n", "ranks"
            flags, top_n, ranks = (self._words[:, self._table.place(n)] for n in names)
            draws, processed = ((flags & bit).any() for bit in (DRAWS, PROCESSED_TOPS))
            found = draws, top_n.any(), processed, ranks.any()
            self._launches = Launches(*map(bool, found))
        return self._launches

    @property
    def draws(self) -> bool:
        """Whether some live row draws at random."""
        return self.launches.draws

    def set_rows(self, rows: Sequence[int], asks: Sequence[NewRow]) -> None:
        """Give rows to sequences.

        Copies are in the order of the current stream, so steps before it are not disturbed.

        Raises:
            ValueError: one has more logit biases, end and allowed tokens, and tokens of bad words
                than a row has room for. No row has changed.
        """
        edits = [edits_of(new) for new in asks]
        for ids, _ in edits:
            if len(ids) > self._most_edits:
                problem = f"{len(ids)} logit biases, end and allowed tokens, and tokens of bad"
                raise ValueError(f"{problem} words; a row has room for {self._most_edits}")
        self._launches = None
        for row, new in zip(rows, asks, strict=True):
            super()._set_row(row, new)
            if self._words[row, self._table.place("flags")] & COUNTED:
                prompt, outputs = new.request.prompt, new.outputs
                counts = sampling_rows.pack_counts(prompt, outputs, self._vocab_size)
                self._counts[row].copy_(upload(counts, self._device))
        own = self.device_words, self._edit_ids, self._edit_values
        enter_rows(rows, self._words[[*rows]], edits, *own)

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        super().clear_row(row)
        self._launches = None

    def begin(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw for rows that are greedy. Its launches are the same for any: a graph can hold them.

        Returns [n] tokens, which are right for greedy rows, and broadcasts them. Such rows' tokens
        enter their history here: a row whose mask is not there yet must not be among them,
        `padding_row` may stand in its place.

        Args:
            logits: [n, vocab_size] floats, each row contiguous; not changed.
            rows: [n] int64 on the device; no row twice but `padding_row`.
            positions: [n] int64 on the device; which output token of its sequence is drawn, from 0.
            masks: [n, ceil(vocab_size / 32)] int32 on the device, contiguous: bit v % 32 of word
                v // 32 says whether token v may be drawn. None: all may. Raw top tokens are of the
                logits as they are.
        """
        assert logits.stride(1) == 1
        self._draw_greedy(Asked(logits, rows, positions, masks))
        tokens = self._tokens[: len(rows)]
        self._broadcast(tokens)
        return tokens

    def finish(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        launches: Launches | None = None,
        masks: torch.Tensor | None = None,
    ) -> Samples:
        """Draw for the others, and find what is reported: as many rows as `begin` had, or fewer.

        Broadcasts all tokens once more if some row draws at random. Returns before the device has
        the samples. `launches`: no less than `rows` need; by default what the live rows do. The
        other arguments are those of `begin`.
        """
        launches, asked = launches or self.launches, Asked(logits, rows, positions, masks)
        if launches.draws:
            self._draw_sampled(asked)
        if launches.tops:
            self._find_tops(asked, processed=launches.processed_tops)
        if launches.draws:
            self._broadcast(self._tokens[: len(rows)])
        n, k = len(rows), MOST_TOP_TOKENS if launches.tops else 0
        if launches.ranks:
            find_ranks(logits, rows, self.device_words, self._tokens, self._token_ranks)
        tops = self._top_ids[:n, :k], self._top_logprobs[:n, :k]
        ranks = self._token_ranks[:n] if launches.ranks else None
        return Samples(self._tokens[:n], self._logprobs[:n], *tops, ranks)

    def draw(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, masks: torch.Tensor
    ) -> torch.Tensor:
        """[n] tokens of `begin` and `finish`, broadcast once.

        Its launches are the same for any rows, so a captured step can hold them; see `drawn`.
        """
        asked = Asked(logits, rows, positions, masks)
        self._draw_greedy(asked)
        self._draw_sampled(asked)
        tokens = self._tokens[: len(rows)]
        self._broadcast(tokens)
        return tokens

    def drawn(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, masks: torch.Tensor
    ) -> Samples:
        """The samples of `draw`, which had the same arguments, or more of them."""
        launches = replace(self.launches, draws=False)
        return self.finish(logits, rows, positions, launches, masks)

    def propose(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[n] drafts for these rows, broadcast: see `CpuSampler.propose`.

        Its launches are the same for any rows, so a captured step can hold them. The arguments are
        those of `begin`; a draft is good until the next one is drawn.
        """
        asked = Asked(logits, rows, positions, None)
        self._draw_greedy(asked, note=False)
        self._draw_sampled(asked, note=False)
        drafts = self._tokens[: len(rows)].clamp_(min=0)
        self._broadcast(drafts)
        return drafts

    def launch_all(self, asked: Asked) -> None:
        """Launch what any rows may need, one after the other."""
        self._draw_greedy(asked)
        self._draw_sampled(asked)
        self._find_tops(asked, processed=True)

    # -- launches ------------------------------------------------------------------------------

    def _scored(self, asked: Asked) -> tuple[object, ...]:
        """What kernels that read scores are given first."""
        return (
            *(asked.logits, asked.logits.stride(0), asked.masks, asked.rows, asked.positions),
            *self._histories,
        )

    @property
    def _histories(self) -> tuple[torch.Tensor, ...]:
        """Of all rows: columns, counts and edits, which a drawn token changes."""
        return self.device_words, self._counts, self._edit_ids, self._edit_values

    def _draw_greedy(self, asked: Asked, *, note: bool = True) -> None:
        tiles, n = self._tiles, len(asked.rows)
        sums = self._best, self._best_id, self._mass, self._moment, self._group_best
        sampling.prepare[(self._splits, n)](
            *self._scored(asked),
            *sums,
            self._vocab_size,
            GROUPS=tiles.groups,
            **self._by_split,
        )
        sampling.summarise[(n,)](
            *(asked.rows, asked.positions, *self._histories),
            *sums,
            *(self._stats, self._found, self._tokens, self._logprobs),
            *(self._vocab_size, self._splits),
            MOST_EDITS=self._most_edits,
            SPLITS=self._most_splits,
            GROUPS=tiles.groups,
            NOTE=note,
            num_warps=tiles.warps,
            enable_fp_fusion=False,
        )

    def _draw_sampled(self, asked: Asked, *, note: bool = True) -> None:
        tiles, n = self._tiles, len(asked.rows)
        winners = self._fitness, self._winner, self._winner_score
        candidates = self._empty(n, self._vocab_size, dtype=torch.int64)
        sampling.race[(self._splits, n)](
            *self._scored(asked),
            *(self._best, self._stats),
            *winners,
            *(self._found, candidates, self._vocab_size),
            **self._by_split,
        )
        sampling.finish[(n,)](
            *(asked.rows, asked.positions, *self._histories, self._stats),
            *winners,
            *(self._found, candidates, self._tokens, self._logprobs),
            *(self._vocab_size, self._splits),
            MOST_EDITS=self._most_edits,
            SPLITS=self._most_splits,
            BLOCK=tiles.block,
            PIVOTS=tiles.pivots,
            NOTE=note,
            num_warps=tiles.finish_warps,
            enable_fp_fusion=False,
        )

    def _find_tops(self, asked: Asked, *, processed: bool) -> None:
        tiles, n = self._tiles, len(asked.rows)
        # `prepare` is through with these two: its sums are joined.
        best, mass = self._best, self._mass
        top_tokens.split_tops[(self._splits, n)](
            *(asked.logits, asked.logits.stride(0), asked.rows, self.device_words),
            *(self._ranks, best, mass, self._vocab_size),
            SPLIT=tiles.split,
            num_warps=tiles.warps,
        )
        if processed:
            top_tokens.split_processed_tops[(self._splits, n)](
                *self._scored(asked),
                *(self._stats, self._ranks, self._vocab_size),
                **self._by_split,
            )
        top_tokens.join_tops[(n,)](
            *(asked.rows, *self._histories, self._stats, self._ranks, best, mass),
            *(self._tokens, self._top_ids, self._top_logprobs, self._vocab_size, self._splits),
            MOST_EDITS=self._most_edits,
            SPLITS=self._most_splits,
            num_warps=tiles.finish_warps,
        )

    # -- memory --------------------------------------------------------------------------------

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)
