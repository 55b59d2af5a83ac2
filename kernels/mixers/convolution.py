"""The convolution of each channel over a row's last tokens, whose inputs the row keeps.

A ring has one place for each input that an output sees, its own included: writing a position again
overwrites nothing that is still to be seen.
"""

from __future__ import annotations

import torch

from tokenpod.kernels.operations.batch import ForwardBatch


def plan_recurrent(batch: ForwardBatch) -> ForwardBatch:
    """The rows are in the batch."""
    return batch


def convolve_token(
    mixed: torch.Tensor,
    ring: torch.Tensor,
    position: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Of one token [channels] and its row's ring [channels, width] -> [channels] float32."""
    width = ring.shape[1]
    ring[:, position % width] = mixed
    window = ring.roll(-(position + 1) % width, 1).float()
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

    `rows` and `positions` [n] int64, `inputs` [rows, channels, width]: of all rows.
    """
    width = inputs.shape[2]
    inputs[rows, :, positions % width] = mixed
    places = torch.arange(1, width + 1, device=rows.device) + positions[:, None]
    seen = inputs.index_select(0, rows)
    seen = seen.gather(2, (places % width)[:, None].expand_as(seen))
    return _biased((seen.float() * weight.float()).sum(2), bias)


def convolve_run(
    mixed: torch.Tensor,
    ring: torch.Tensor,
    end: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Of one row's tokens, the last of `end` positions: [n, channels] -> [n, channels] float32."""
    width = ring.shape[1]
    # The oldest input lies where the next one goes; nobody sees it any more.
    before = ring.roll(-((end - len(mixed)) % width), 1)[:, 1:]
    seen = torch.cat([before, mixed.T], dim=1)
    ring.copy_(seen[:, seen.shape[1] - width :].roll(end % width, 1))
    windows = seen.float().unfold(1, width, 1)
    return _biased(torch.einsum("ctw,cw->tc", windows, weight.float()), bias)


def _biased(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias.float()
