"""Convolutions over a row's last tokens on a GPU: before a memory, and on their own."""

from __future__ import annotations

import torch
import triton

from tokenpod.kernels.gpu.launch import launch_options
from tokenpod.kernels.mixers import convolution_kernels
from tokenpod.kernels.mixers.recurrent_plan import CHUNK, RecurrentRows
from tokenpod.kernels.operations.recurrent_ops import RecurrentPlan, RecurrentStates

#: Channels of a row of one token that one program has.
STEPPED = 256
#: Channels of a chunk that one program has.
CONVOLVED = 64


def short_convolution(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: RecurrentStates,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """`ShortConvolution` says what."""
    assert isinstance(plan, RecurrentRows)
    out = mixed.new_empty((len(mixed), len(weight)))
    if plan.single_rows:
        convolve_rows(mixed, weight, bias, states, plan, out, gated=True)
    if plan.chunks is not None:
        convolve_chunks(mixed, weight, bias, states, plan, out, gated=True)
        keep_inputs(mixed, states, plan, channels=len(weight), gated=True)
    return out


def convolve_rows(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: RecurrentStates,
    plan: RecurrentRows,
    made: torch.Tensor,
    *,
    gated: bool,
) -> None:
    """Of rows of one token what their convolutions say, `made`; their rings go on."""
    channels, width = weight.shape
    convolution_kernels.convolve_rows[(plan.single_rows, triton.cdiv(channels, STEPPED))](
        mixed,
        weight,
        bias,
        states.inputs,
        made,
        plan.paged.b_row,
        plan.paged.b_context,
        mixed.stride(0),
        len(states.inputs),
        states.inputs.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        RING=states.ring,
        BLOCK=STEPPED,
        GATED=gated,
        num_warps=2,
        **launch_options(mixed.device),
    )


def convolve_chunks(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: RecurrentStates,
    plan: RecurrentRows,
    made: torch.Tensor,
    *,
    gated: bool,
    chunk: int = CHUNK,
) -> None:
    """The same of rows of several tokens, in chunks of so many at most; their rings stay."""
    channels, width = weight.shape
    assert plan.chunks is not None
    convolution_kernels.convolve_chunks[(len(plan.chunks), triton.cdiv(channels, CONVOLVED))](
        mixed,
        weight,
        bias,
        states.inputs,
        made,
        plan.chunks,
        plan.t_row,
        mixed.stride(0),
        states.inputs.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        RING=states.ring,
        CHUNK=chunk,
        BLOCK=CONVOLVED,
        GATED=gated,
        **launch_options(mixed.device),
    )


def keep_inputs(
    mixed: torch.Tensor,
    states: RecurrentStates,
    plan: RecurrentRows,
    *,
    channels: int,
    gated: bool,
) -> None:
    """The rings of rows of several tokens go on, once all chunks have been convolved."""
    convolution_kernels.keep_inputs[(plan.rows, triton.cdiv(channels, STEPPED))](
        mixed,
        states.inputs,
        plan.chunks,
        plan.t_row,
        mixed.stride(0),
        states.inputs.stride(0),
        CHANNELS=channels,
        RING=states.ring,
        BLOCK=STEPPED,
        GATED=gated,
        num_warps=2,
        **launch_options(mixed.device),
    )
