"""The convolution of each channel over a row's last tokens, whose inputs the row keeps.

A ring has one place for each input that an output sees, its own included, or more: writing a
position again overwrites nothing that is still to be seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.recurrent_ops import RecurrentPlan


@dataclass(frozen=True, slots=True)
class BatchRows(RecurrentPlan):
    """The rows are in the batch."""

    batch: ForwardBatch


def plan_recurrent(batch: ForwardBatch) -> BatchRows:
    """What all layers share: the step as it came."""
    return BatchRows(batch)


def batch_of(plan: RecurrentPlan) -> ForwardBatch:
    """The step that `plan_recurrent` was given."""
    assert isinstance(plan, BatchRows)
    return plan.batch


def has_drafts(batch: ForwardBatch, row: int) -> bool:
    """Whether some of a row's tokens may be wrong."""
    return batch.b_drafts is not None and batch.b_drafts[row] > 0


def convolve_token(
    mixed: torch.Tensor,
    ring: torch.Tensor,
    position: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Of one token [channels] and its row's ring [channels, places] -> [channels] float32.

    `weight`: [channels, width].
    """
    places = torch.arange(position - weight.shape[1] + 1, position + 1, device=ring.device)
    ring[:, position % ring.shape[1]] = mixed
    window = ring[:, places % ring.shape[1]].float()
    return _biased((window * weight.float()).sum(1), bias)


def convolve_rows(
    mixed: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
) -> torch.Tensor:
    """Of one token of each row [n, channels] -> [n, channels] float32.

    `rows` and `positions` [n] int64, `inputs` [rows, channels, places]: of all rows.
    """
    channels, width = weight.shape
    inputs[rows, :, positions % inputs.shape[2]] = mixed
    places = torch.arange(1 - width, 1, device=rows.device) + positions[:, None]
    places = (places % inputs.shape[2])[:, None].expand(-1, channels, -1)
    seen = inputs.index_select(0, rows).gather(2, places)
    return _biased((seen.float() * weight.float()).sum(2), bias)


def convolve_run(
    mixed: torch.Tensor,
    ring: torch.Tensor,
    end: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Of one row's tokens, the last of `end` positions: [n, channels] -> [n, channels] float32."""
    width, first = weight.shape[1], end - len(mixed)
    before = torch.arange(first - width + 1, first, device=ring.device) % ring.shape[1]
    seen = torch.cat([ring[:, before], mixed.T], dim=1)
    keep_run(mixed, ring, end)
    return convolve_seen(seen, weight, bias)


def keep_run(inputs: torch.Tensor, ring: torch.Tensor, end: int) -> None:
    """The last inputs of one row [n, numbers], of tokens up to position `end`, into its ring."""
    last = inputs[-ring.shape[1] :]
    ring[:, torch.arange(end - len(last), end, device=ring.device) % ring.shape[1]] = last.T


def convolve_seen(
    seen: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Of n tokens, and inputs before them: [channels, width - 1 + n] -> [n, channels] float32."""
    windows = seen.float().unfold(1, weight.shape[1], 1)
    return _biased(torch.einsum("ctw,cw->tc", windows, weight.float()), bias)


def _biased(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias.float()
