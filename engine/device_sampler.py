"""Choosing tokens on the device, without a word to the host: `Sampler`'s asynchronous twin.

A row's parameters go to the device once, when a sequence takes it; a step's sampling is then two
to seven launches whose shapes depend on nothing but the batch size, so that a CUDA graph can hold
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from tokenpod.engine.device_rows import counts, words
from tokenpod.engine.row_sampling import RowSampling
from tokenpod.kernels.triton import sampling, sampling_rows, top_tokens

#: Tokens reported a row where any row asks for top tokens.
MOST_TOP_TOKENS = int(top_tokens.MOST_TOP_TOKENS.value)

#: The largest vocabulary.
MOST_TOKENS = 1 << 18

_WORDS = int(sampling_rows.WORDS.value)


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """What was drawn, on the device; good until the next step is sampled."""

    #: [n] int64; -1 where the logits held NaN, +Inf or nothing but -Inf.
    tokens: torch.Tensor
    #: [n] float32: log probability among the processed scores; 0 where the token is -1.
    logprobs: torch.Tensor
    #: [n, k] int64, k 64 or 0: by falling raw logit (or processed score, where the row asks for
    #: that), the lowest id first in ties; from the first -1 on there are no more. A row has its
    #: top_n tokens and those that tie with the last of them.
    top_ids: torch.Tensor
    #: [n, k] float32: their log probabilities, of the same.
    top_logprobs: torch.Tensor

    @classmethod
    def of_tokens(cls, tokens: torch.Tensor) -> DeviceSamples:
        """Tokens [n] of which no more is known."""
        n = len(tokens)
        logprobs = torch.zeros(n, dtype=torch.float32, device=tokens.device)
        return cls(tokens, logprobs, tokens.new_empty(n, 0), logprobs.new_empty(n, 0))


@dataclass(frozen=True, slots=True)
class Launches:
    """Which launches a step needs besides those of greedy rows. A captured graph has its own."""

    #: Some row samples.
    draws: bool
    #: Some row wants top tokens.
    tops: bool
    #: Some row wants those of its processed scores.
    processed_tops: bool = False


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the work is cut up. Powers of two.

    Tokens may depend on `split` where sums round differently; on the others nothing does.
    """

    #: Tokens of the vocabulary a program reads, at least 64.
    split: int = 2048
    #: Groups of a split whose best scores bound top_k.
    groups: int = 8
    #: Candidates of a truncated row at a time, and keys they are compared with in one pass.
    block: int = 2048
    pivots: int = 4
    warps: int = 4
    finish_warps: int = 16


class DeviceSampler:
    """The rows' parameters and histories, on the device.

    All memory is taken here: 12 bytes for each row and vocabulary entry (4 for the counts of tokens
    in prompt and output, 16 bits each, which end at 65,535; 8 for the candidates of truncated
    rows), so 394 MB for 256 rows of 128,256. A step allocates nothing.

    Args:
        rows: how many sequences can be live at once, and be in a step.
        vocab_size: width of the logits, at most 262,144.
        device: where logits come from.
        most_edits: how many logit biases and end tokens one row can have in all.
    """

    def __init__(
        self,
        *,
        rows: int,
        vocab_size: int,
        device: torch.device,
        most_edits: int = 4096,
        tiles: Tiles | None = None,
    ) -> None:
        assert vocab_size <= MOST_TOKENS, f"{vocab_size} tokens; at most {MOST_TOKENS} are handled"
        assert tiles is None or tiles.split >= MOST_TOP_TOKENS, f"splits of {tiles.split} tokens"
        self._vocab_size = vocab_size
        self._device = device
        self._tiles = tiles or Tiles()
        self._size = rows
        #: Live rows that sample, that want top tokens, and that want those of processed scores.
        self._drawing: set[int] = set()
        self._topping: set[int] = set()
        self._topping_processed: set[int] = set()
        self._most_edits = triton.next_power_of_2(most_edits)
        self._splits = triton.cdiv(vocab_size, self._tiles.split)
        # One row more: the greedy row of a graph's padding.
        self._words = self._empty(rows + 1, _WORDS, dtype=torch.int64).zero_()
        self._edit_ids = self._empty(rows + 1, self._most_edits, dtype=torch.int32)
        self._edit_values = self._empty(rows + 1, self._most_edits, dtype=torch.float32)
        self._counts = self._empty(rows, vocab_size, dtype=torch.int32)
        self._candidates = self._empty(rows, vocab_size, dtype=torch.int64)
        self._found = self._empty(rows, dtype=torch.int32)
        self._stats = self._empty(rows, int(sampling.STATS.value), dtype=torch.float64)
        self._best, self._mass, self._moment, self._fitness, self._winner_score = (
            self._empty(rows, self._splits, dtype=torch.float32) for _ in range(5)
        )
        self._best_id, self._winner = (
            self._empty(rows, self._splits, dtype=torch.int32) for _ in range(2)
        )
        groups = self._splits * self._tiles.groups
        self._group_best = self._empty(rows, groups, dtype=torch.float32)
        self._ranks = self._empty(rows, self._splits, MOST_TOP_TOKENS, dtype=torch.int64)
        self._tokens = self._empty(rows, dtype=torch.int64)
        self._logprobs = self._empty(rows, dtype=torch.float32)
        self._top_ids = self._empty(rows, MOST_TOP_TOKENS, dtype=torch.int64)
        self._top_logprobs = self._empty(rows, MOST_TOP_TOKENS, dtype=torch.float32)

    @property
    def padding_row(self) -> int:
        """A row that belongs to nobody, greedy: what fills up a captured batch."""
        return self._size

    @property
    def launches(self) -> Launches:
        """What the live rows need."""
        return Launches(
            draws=bool(self._drawing),
            tops=bool(self._topping),
            processed_tops=bool(self._topping_processed),
        )

    def set_row(
        self, row: int, asks: RowSampling, prompt: Sequence[int], outputs: Sequence[int] = ()
    ) -> None:
        """Give a row to a sequence. `outputs`: what it has sampled already, when it resumes.

        Copies are in the order of the current stream, so steps before it are not disturbed.
        """
        params = asks.params
        edits = sorted(params.logit_bias.items())
        if asks.min_new_tokens:
            edits += [(end, -math.inf) for end in asks.ends]
        if len(edits) > self._most_edits:
            raise ValueError(
                f"{len(params.logit_bias)} logit biases and {len(asks.ends)} end tokens;"
                f" a row has room for {self._most_edits}"
            )
        self.clear_row(row)
        if params.do_sample:
            self._drawing.add(row)
        if asks.top_n:
            self._topping.add(row)
        if asks.tops_processed:
            self._topping_processed.add(row)
        if edits:
            ids, values = zip(*edits, strict=True)
            self._upload(self._edit_ids[row], np.array(ids, np.int32))
            self._upload(self._edit_values[row], np.array(values, np.float32))
        if asks.counted:
            self._upload(self._counts[row], counts(prompt, outputs, self._vocab_size))
        self._upload(self._words[row], words(asks, prompt, outputs, self._vocab_size))

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        self._drawing.discard(row)
        self._topping.discard(row)
        self._topping_processed.discard(row)

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        launches: Launches | None = None,
    ) -> DeviceSamples:
        """Draw one token a row. Returns before the device has them.

        Args:
            logits: [n, vocab_size] floats, each row contiguous; not changed.
            rows: [n] int64 on the device; no row twice but `padding_row`.
            positions: [n] int64 on the device; which output token of its sequence is drawn, from 0.
            launches: what to launch, no less than `rows` need; by default what the live rows do.
        """
        self.begin(logits, rows, positions)
        return self.finish(logits, rows, positions, launches)

    def begin(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The first part of `sample`, the same for any rows: what a captured step can hold.

        Returns [n] tokens, which are those of rows that are greedy.
        """
        assert logits.stride(1) == 1
        self._draw_greedy(logits, rows, positions)
        return self._tokens[: len(rows)]

    def finish(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        launches: Launches | None = None,
    ) -> DeviceSamples:
        """The rest of `sample`, with as many rows as `begin` had or the first of them."""
        launches = launches or self.launches
        if launches.draws:
            self._draw_sampled(logits, rows, positions)
        if launches.tops:
            self._find_tops(logits, rows, positions, launches)
        n, k = len(rows), MOST_TOP_TOKENS if launches.tops else 0
        return DeviceSamples(
            tokens=self._tokens[:n],
            logprobs=self._logprobs[:n],
            top_ids=self._top_ids[:n, :k],
            top_logprobs=self._top_logprobs[:n, :k],
        )

    # -- launches ------------------------------------------------------------------------------

    def _draw_greedy(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> None:
        tiles = self._tiles
        sampling.prepare[(self._splits, len(rows))](
            logits,
            logits.stride(0),
            rows,
            positions,
            self._words,
            self._counts,
            self._edit_ids,
            self._edit_values,
            self._best,
            self._best_id,
            self._mass,
            self._moment,
            self._group_best,
            self._vocab_size,
            MOST_EDITS=self._most_edits,
            SPLIT=tiles.split,
            GROUPS=tiles.groups,
            num_warps=tiles.warps,
            enable_fp_fusion=False,
        )
        sampling.summarise[(len(rows),)](
            rows,
            positions,
            self._words,
            self._counts,
            self._best,
            self._best_id,
            self._mass,
            self._moment,
            self._group_best,
            self._stats,
            self._found,
            self._tokens,
            self._logprobs,
            self._vocab_size,
            self._splits,
            SPLITS=triton.next_power_of_2(self._splits),
            GROUPS=tiles.groups,
            num_warps=tiles.warps,
            enable_fp_fusion=False,
        )

    def _draw_sampled(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> None:
        tiles = self._tiles
        sampling.race[(self._splits, len(rows))](
            logits,
            logits.stride(0),
            rows,
            positions,
            self._words,
            self._counts,
            self._edit_ids,
            self._edit_values,
            self._best,
            self._stats,
            self._fitness,
            self._winner,
            self._winner_score,
            self._found,
            self._candidates,
            self._vocab_size,
            MOST_EDITS=self._most_edits,
            SPLIT=tiles.split,
            num_warps=tiles.warps,
            enable_fp_fusion=False,
        )
        sampling.finish[(len(rows),)](
            rows,
            positions,
            self._words,
            self._counts,
            self._stats,
            self._fitness,
            self._winner,
            self._winner_score,
            self._found,
            self._candidates,
            self._tokens,
            self._logprobs,
            self._vocab_size,
            self._splits,
            SPLITS=triton.next_power_of_2(self._splits),
            BLOCK=tiles.block,
            PIVOTS=tiles.pivots,
            num_warps=tiles.finish_warps,
            enable_fp_fusion=False,
        )

    def _find_tops(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        launches: Launches,
    ) -> None:
        tiles = self._tiles
        # `prepare` is through with these two: its sums are joined.
        best, mass = self._best, self._mass
        top_tokens.split_tops[(self._splits, len(rows))](
            logits,
            logits.stride(0),
            rows,
            self._words,
            self._ranks,
            best,
            mass,
            self._vocab_size,
            SPLIT=tiles.split,
            num_warps=tiles.warps,
        )
        if launches.processed_tops:
            top_tokens.split_processed_tops[(self._splits, len(rows))](
                logits,
                logits.stride(0),
                rows,
                positions,
                self._words,
                self._counts,
                self._edit_ids,
                self._edit_values,
                self._stats,
                self._ranks,
                self._vocab_size,
                MOST_EDITS=self._most_edits,
                SPLIT=tiles.split,
                num_warps=tiles.warps,
                enable_fp_fusion=False,
            )
        top_tokens.join_tops[(len(rows),)](
            rows,
            self._words,
            self._counts,
            self._stats,
            self._ranks,
            best,
            mass,
            self._tokens,
            self._top_ids,
            self._top_logprobs,
            self._vocab_size,
            self._splits,
            SPLITS=triton.next_power_of_2(self._splits),
            num_warps=tiles.finish_warps,
        )

    # -- memory --------------------------------------------------------------------------------

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _upload(self, row: torch.Tensor, values: npt.NDArray[np.generic]) -> None:
        """Fill the beginning of a row, in the order of the stream and without waiting for it."""
        source = torch.from_numpy(values)
        if self._device.type == "cuda":
            # Pinned memory is not used again before the copy is done.
            source = source.pin_memory()
        row[: len(source)].copy_(source, non_blocking=True)
