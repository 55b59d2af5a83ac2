"""Choosing tokens: what the samplers of CPUs and GPUs have in common.

A sampler has a row of columns for each live sequence, laid out by the table of knobs
(`tokenpod.core.sampling`). In a group only the leader samples: its tokens are broadcast, which is
all that the other ranks' next step needs of this one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import StepPlan
from tokenpod.core.sampling import DRAWS, EDITED, ROW_WORDS, TABLE, SamplingTable
from tokenpod.engine.sampling.bad_words import entries_of
from tokenpod.kernels.operations.group import Group

#: Rows of columns, [n] of a table's dtype, and one of them.
Records = npt.NDArray[np.void]
Record = np.void


@functools.cache
def _unknown(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities and top tokens of samples of which nobody asks for any; only read."""
    logprobs = torch.zeros(n, device=device)
    return logprobs, torch.empty(n, 0, dtype=torch.int64, device=device), logprobs.new_empty(n, 0)


@dataclass(frozen=True, slots=True)
class Samples:
    """What was drawn, row by row; a device's is good until the next step is sampled."""

    #: [n] int64; -1 where the logits held NaN, +Inf or nothing but -Inf.
    tokens: torch.Tensor
    #: [n] float32: log probability among the processed scores; 0 where the token is -1, and on a
    #: host where nobody asked.
    logprobs: torch.Tensor
    #: [n, k] int64, k MOST_TOP_TOKENS or 0: by falling raw logit (or processed score, where the row
    #: asks for that), the lowest id first in ties; from the first -1 on there are no more. A row
    #: has its top_n tokens and those that tie with the last of them.
    top_ids: torch.Tensor
    #: [n, k] float32: their log probabilities, of the same; 0 where there are no more.
    top_logprobs: torch.Tensor
    #: [n] int64: the token's rank by raw logits, from 1, the best of those that tie; 0 where nobody
    #: asked, or the token is -1. None: nobody asked.
    ranks: torch.Tensor | None = None

    @classmethod
    def of_tokens(cls, tokens: torch.Tensor) -> Samples:
        """Tokens [n] of which no more is known."""
        return cls(tokens, *_unknown(len(tokens), tokens.device))

    @classmethod
    def nothing(
        cls, n: int, tops: int, device: torch.device | None = None, *, ranks: bool = False
    ) -> Samples:
        """Room for so many samples: token -1 each, and no top tokens. `ranks`: for those, too."""
        return cls(
            torch.full((n,), -1, device=device),
            torch.zeros(n, device=device),
            torch.full((n, tops), -1, device=device),
            torch.zeros(n, tops, device=device),
            torch.zeros(n, dtype=torch.int64, device=device) if ranks else None,
        )

    @property
    def tops(self) -> list[tuple[int, list[int], list[float]]]:
        """(index, ids, log probabilities) of the rows that have top tokens. Not on a device."""
        if not self.top_ids.shape[1]:
            return []
        counts = (self.top_ids >= 0).sum(dim=1).tolist()
        return [
            (i, self.top_ids[i, :n].tolist(), self.top_logprobs[i, :n].tolist())
            for i, n in enumerate(counts)
            if n
        ]


class Sampler:
    """The rows' columns, and the ranks that go on with what is drawn.

    Args:
        rows: how many sequences can be live at once.
        vocab_size: width of the logits.
        group: the ranks to which tokens are broadcast, if there are any.
        table: the knobs.
    """

    def __init__(
        self,
        *,
        rows: int,
        vocab_size: int,
        group: Group | None = None,
        table: SamplingTable = TABLE,
    ) -> None:
        self._vocab_size = vocab_size
        self._group = group
        self._table = table
        self._top_k = table.place("top_k")
        self._words = np.zeros((rows, ROW_WORDS), np.int64)

    def take_rows(self, plan: StepPlan) -> None:
        """Give rows to a plan's new sequences."""
        self.set_rows(plan.n_row.tolist(), plan.asks)

    def set_rows(self, rows: Sequence[int], asks: Sequence[NewRow]) -> None:
        """Give rows to sequences."""
        for row, new in zip(rows, asks, strict=True):
            self._set_row(row, new)

    def _set_row(self, row: int, new: NewRow) -> None:
        """Give a row to a sequence."""
        words = self._words[row]
        words[:] = new.words(self._table)
        if words[self._top_k] >= self._vocab_size:  # takes out nothing
            words[self._top_k] = 0

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        self._words[row] = 0

    @property
    def columns(self) -> Records:
        """[rows] of the table's dtype: all rows; a free one is zeros."""
        return self._words.view(self._table.dtype)[:, 0]

    def edits(self, rows: Sequence[int]) -> bool:
        """Whether some of these rows' scores depend on the tokens that the row has drawn."""
        return bool((self.columns["flags"][rows] & EDITED).any())

    def _broadcast(self, tokens: torch.Tensor) -> None:
        if self._group is not None:
            self._group.broadcast(tokens)


class LeaderTokens:
    """What a follower has in place of a sampler: the tokens that the leader draws.

    It knows which rows draw at random, since a device's leader then broadcasts a second time, and
    which are edited, since drafts of others are drawn together.

    Args:
        rows: how many sequences can be live at once.
        device: where tokens are needed.
    """

    def __init__(self, group: Group, *, rows: int, device: torch.device) -> None:
        self._group = group
        #: `NewRow.flags` of live rows.
        self._flags: dict[int, int] = {}
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    @property
    def draws(self) -> bool:
        """Whether some live row draws at random."""
        return any(flags & DRAWS for flags in self._flags.values())

    def edits(self, rows: Sequence[int]) -> bool:
        """Whether some of these rows' scores depend on the tokens that the row has drawn."""
        return any(self._flags[row] & EDITED for row in rows)

    def take_rows(self, plan: StepPlan) -> None:
        """Note what a plan's new sequences ask."""
        self._flags.update(zip(plan.n_row.tolist(), plan.n_flags.tolist(), strict=True))

    def clear_row(self, row: int) -> None:
        """Forget a row."""
        self._flags.pop(row, None)

    def sample(
        self, logits: object, rows: Sized, positions: object, masks: object = None
    ) -> Samples:
        """All tokens of the leader's `CpuSampler.sample`; nothing else of them is known."""
        del logits, positions, masks
        return Samples.of_tokens(self._receive(len(rows)))

    def propose(self, logits: object, rows: Sized, positions: object) -> torch.Tensor:
        """The drafts of the leader's `CpuSampler.propose` or `DeviceSampler.propose`."""
        del logits, positions
        return self._receive(len(rows))

    def draw(self, logits: object, rows: Sized, positions: object, masks: object) -> torch.Tensor:
        """The tokens of the leader's `DeviceSampler.draw`."""
        del logits, positions, masks
        return self._receive(len(rows))

    def drawn(self, logits: object, rows: Sized, positions: object, masks: object) -> Samples:
        """The same; nothing else of them is known."""
        del logits, positions, masks
        return Samples.of_tokens(self._tokens[: len(rows)])

    def begin(
        self, logits: object, rows: Sized, positions: object, masks: object = None
    ) -> torch.Tensor:
        """The tokens of the leader's `DeviceSampler.begin`."""
        del logits, positions, masks
        return self._receive(len(rows))

    def finish(
        self, logits: object, rows: Sized, positions: object, *, masks: object = None
    ) -> Samples:
        """All tokens of the leader's `DeviceSampler.finish`; nothing else of them is known."""
        del logits, positions, masks
        n = len(rows)
        return Samples.of_tokens(self._receive(n) if self.draws else self._tokens[:n])

    def _receive(self, n: int) -> torch.Tensor:
        tokens = self._tokens[:n]
        self._group.broadcast(tokens)
        return tokens


def edits_of(new: NewRow) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """[m] each: tokens, and what is added to their scores.

    Logit biases by rising id, then, likewise, end-of-text tokens and others that may not be drawn
    before `min_new_tokens`, and the tokens that can be drawn at all. Last come the tokens of bad
    words, as `entries_of` has them.
    """
    sampling = new.request.sampling
    edits = sorted(sampling.logit_bias.items())
    edits += [(token, -math.inf) for token in (*new.ends, *new.stops)]
    edits += [(token, 0.0) for token in sorted({*sampling.allowed_token_ids})]
    ids = np.array([token for token, _ in edits], np.int32)
    values = np.array([value for _, value in edits], np.float32)
    if not sampling.bad_words:
        return ids, values
    entries, armed = entries_of(sampling.bad_words, new.outputs)
    return np.concatenate([ids, entries]), np.concatenate([values, armed])


def logprobs_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[n] float32: the log probability of one token of each row.

    log_softmax takes every row by itself. (A sum over one long row is split among threads, over
    many rows it is not: logsumexp would make bits depend on the batch.)

    Args:
        scores: [n, vocab] float32.
        tokens: [n] int64.
    """
    return scores.log_softmax(1).gather(1, tokens[:, None]).squeeze(1)
