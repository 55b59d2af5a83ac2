"""A model of whose rows each has an adapter, for a scheduler by hand."""

from __future__ import annotations

from dataclasses import replace

import torch


class Adapted:
    """A model of which each row of a step has the adapter in a slot of that number."""

    def __init__(self, model, slots):
        self._model, self._slots = model, slots

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch, pool):
        column = [s for row, s in enumerate(self._slots) for _ in range(*self._tokens(batch, row))]
        self._batch = replace(batch, t_adapter=torch.tensor(column))
        return self._model.forward(self._batch, pool)

    def logits(self, hidden, step=None):
        return self._model.logits(hidden, replace(self._batch, logit_index=None))

    def _tokens(self, batch, row):
        return batch.b_start[row], batch.b_start[row + 1]
