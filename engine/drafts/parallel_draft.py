"""Heads that guess all further tokens at once: Medusa's (`models.medusa`) as what drafts.

What they read is the served model's hidden state behind the last token that is known, so nothing
is kept of a text but those of each row's last step: of its samples, whichever of them will count.

    positions of a row's last step         7    8    9        three samples, two of them drafts
    hidden states, at position modulo 3    h7   h8   h9       the draft at 9 is wrong
    next step, which begins at 9           heads read h8: the first one guesses what is at 10

A row that has come back from the host's memory has another row's state there: its first guesses
are wrong, and no more.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenpod.engine.steps.executor import Model
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.batch import ForwardBatch, RaggedRows
from tokenpod.models.medusa import MedusaHeads


class ParallelDraft:
    """Heads, and what they read of each row; see `draft.Drafter`.

    Args:
        heads: no fewer than `most`.
        pool: of no layers: nothing is kept of a token.
        most: drafts of one row in a step.
        rows: of the executor; one more is padding's.
        device: where the served model is.
    """

    def __init__(
        self, heads: MedusaHeads, pool: KVPool, most: int, rows: int, device: torch.device
    ) -> None:
        self._heads, self.pool, self.most = heads, pool, most
        self.each, self.behind = most, False
        #: As many as a row samples in a step.
        self._places = 1 + most
        shape = (rows + 1) * self._places, heads.width
        #: [(rows + 1) * places, width]: of position p of row r at r * places + p % places.
        self._hidden = torch.zeros(shape, dtype=heads.dtype, device=device)

    def compute(
        self,
        served: Model,
        batch: ForwardBatch,
        pool: KVPool,
        own: ForwardBatch,
        *,
        follow: bool = True,
    ) -> torch.Tensor:
        """Run a step of the served model, [T, hidden], and keep what heads read of it."""
        del own, follow
        hidden = served.forward(batch, pool)
        t_row, t_place, states = _rows_of(batch), batch.t_place, hidden
        if batch.logit_index is not None:
            at = batch.logit_index
            t_row, t_place, states = t_row[at], t_place[at], hidden[at]
        self._hidden.index_copy_(0, self._at(t_row, t_place), states)
        return hidden

    def follow(self, own: ForwardBatch) -> None:
        """Nothing: `compute` has kept what is read."""

    def logits(self, batch: ForwardBatch, drafts: int) -> torch.Tensor:
        """[drafts * n, vocabulary] of the hidden states before the tokens of a small step."""
        before = self._at(_rows_of(batch), batch.t_place - 1)
        return self._heads.logits(self._hidden[before], drafts)

    def prepare_capture(self, rows: int) -> None:
        """Nothing: heads read no keys and values."""

    def tile_rows(self, rows: RaggedRows) -> RaggedRows:
        """The step's rows, unchanged: heads have no tiles of their own."""
        return rows

    def _at(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rows * self._places + positions % self._places


def _rows_of(batch: ForwardBatch) -> torch.Tensor:
    """[T] int64 rows of a step's tokens."""
    if batch.paged is not None:
        assert batch.paged.t_row is not None
        return batch.paged.t_row
    return torch.from_numpy(np.repeat(np.array(batch.b_row, np.int64), np.diff(batch.b_start)))
