"""What guesses the tokens that come, beside the served model: what executors ask of it."""

from __future__ import annotations

from typing import Protocol

import torch

from tokenpod.engine.steps.executor import Model
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch, RaggedRows


class Drafter(Protocol):
    """What guesses the tokens that come, beside the served model: a model, a head, or heads."""

    #: Keys and values, with as many slots as the served model's.
    pool: KVPool
    #: Drafts of one row in a step, and how many of them one small step finds.
    most: int
    each: int
    #: Whether it can only follow what the served model has computed.
    behind: bool

    def compute(
        self,
        served: Model,
        batch: ForwardBatch,
        pool: KVPool,
        own: ForwardBatch,
        *,
        follow: bool = True,
    ) -> torch.Tensor:
        """Run a step of the served model, [T, hidden], and follow it, now or by `follow`.

        `own`: the same step, with tiles of its own if it is captured.
        """
        ...

    def follow(self, own: ForwardBatch) -> None:
        """Compute what the next small step needs of a step that has been computed."""
        ...

    def logits(self, batch: ForwardBatch, drafts: int) -> torch.Tensor:
        """[drafts * n, vocabulary] what may follow the tokens of a small step, and behind that.

        Args:
            batch: one token for each row.
            drafts: up to `each` behind one another.
        """
        ...

    def prepare_capture(self, rows: int) -> StepTiles | None:
        """How captured steps describe its rows; None: it reads no keys and values."""
        ...

    def tile_rows(self, rows: RaggedRows) -> RaggedRows:
        """A step's rows as its own tiles are to have them."""
        ...
