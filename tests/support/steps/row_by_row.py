"""The reference operations, every token by itself: what else is in a step changes no bit.

A product of several rows may round otherwise than a product of one. So a model is given steps of
one token each, in the order of the batch; its attention is the reference's, over runs of slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenpod.kernels.attention.reference_attention import attend
from tokenpod.kernels.backends import reference
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import NO_OPTIONS
from tokenpod.kernels.operations.batch import ForwardBatch, Run
from tokenpod.models.decoders.decoder import Decoder


def _attention(q, keys, values, plan, options=NO_OPTIONS, scales=None):
    """See `ops.Attend`: of one token, by `b_runs` as a CPU's executor gives them."""
    assert scales is None
    assert len(q) == 1
    slots = torch.cat([torch.arange(first, end) for first, end in plan.batch.b_runs[0]])
    return attend(q, keys[slots], values[slots], plan.window, options).flatten(1)


OPERATIONS = replace(reference.OPERATIONS, attention=_attention)


def shallow(decoder: Decoder, layers: int = 2) -> Decoder:
    """Its first layers alone: what comes of the order of steps does not hang on their number."""
    decoder._layers = decoder._layers[:layers]
    return decoder


@dataclass(frozen=True)
class RowByRow:
    """An `executor.Model` that computes every token by itself.

    Args:
        decoder: made of `OPERATIONS`.
    """

    decoder: Decoder

    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """See `executor.Model`."""
        steps = [
            self.decoder.forward(_one_token(batch, row, at), pool)
            for row in range(len(batch.b_context))
            for at in range(batch.b_start[row], batch.b_start[row + 1])
        ]
        return torch.cat(steps)

    @property
    def dtype(self) -> torch.dtype:
        """See `executor.Model`."""
        return self.decoder.dtype

    def logits(self, hidden: torch.Tensor, step: ForwardBatch) -> torch.Tensor:
        """See `executor.Model`."""
        assert step.logit_index is not None
        return torch.cat([self.decoder.logits(hidden[at : at + 1]) for at in step.logit_index])


def _one_token(batch: ForwardBatch, row: int, at: int) -> ForwardBatch:
    context = batch.b_context[row] - (batch.b_start[row + 1] - 1 - at)
    token = slice(at, at + 1)
    return replace(
        batch,
        t_token=batch.t_token[token],
        t_place=batch.t_place[token],
        t_slot=batch.t_slot[token],
        b_start=[0, 1],
        b_context=[context],
        b_runs=[_first(batch.b_runs[row], context)],
        b_row=[batch.b_row[row]],
        single_rows=1,
        logit_index=torch.zeros(1, dtype=torch.int64),
    )


def _first(runs: list[Run], tokens: int) -> list[Run]:
    """The runs of the first `tokens` positions."""
    kept: list[Run] = []
    for first, end in runs:
        if tokens > 0:
            kept.append((first, min(end, first + tokens)))
        tokens -= end - first
    return kept
