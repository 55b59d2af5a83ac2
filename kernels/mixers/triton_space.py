"""The state space on a GPU: rows of one token by three kernels, the others along each by four."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from tokenpod.kernels.gpu.launch import launch_options
from tokenpod.kernels.mixers import space_kernels
from tokenpod.kernels.mixers.catch_up import catch_up
from tokenpod.kernels.mixers.recurrent_plan import RecurrentRows, StepTile, step_tile
from tokenpod.kernels.mixers.triton_convolution import convolve_chunks, convolve_rows, keep_inputs
from tokenpod.kernels.operations.recurrent_ops import (
    MemoryShape,
    RecurrentPlan,
    RecurrentStates,
    SpaceInputs,
    SpaceWeights,
)

#: By rows times heads, ascending.
STEP_TILES = ((128, StepTile(16, 1)), (float("inf"), StepTile(64, 2)))


@dataclass(frozen=True, slots=True)
class PromptTile:
    """How a program walks along a row."""

    #: Tokens that it takes at a time, and values of a head that it has.
    chunk: int
    values: int
    warps: int
    stages: int


#: Of keys of up to 128 numbers of 2 bytes each, and of what is larger.
PROMPT_TILE, LARGE_PROMPT_TILE = PromptTile(64, 64, 4, 2), PromptTile(32, 32, 4, 1)


def state_space(
    inputs: SpaceInputs,
    weights: SpaceWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """`StateSpace` says what."""
    assert isinstance(plan, RecurrentRows)
    mixed, single = inputs.mixed, plan.single_rows
    out = mixed.new_empty((len(mixed), shape.values))
    made = mixed.new_empty((len(mixed), shape.channels))
    conv, keeps = (weights.conv, weights.conv_bias), states.takes_back(shape.width)
    for rows, alone in ((single, True), (plan.rows, False)):
        if keeps and rows:
            tile = step_tile(STEP_TILES, rows * shape.value_heads)
            catch_up(weights, shape, states, plan, tile, single=alone)
    if single:
        convolve_rows(mixed, *conv, states, plan, made, gated=False)
        _step(made, inputs, weights, shape, states, plan, out)
    if plan.chunks is not None:
        convolve_chunks(mixed, *conv, states, plan, made, gated=False)
        keep_inputs(mixed, states, plan, channels=shape.channels, gated=False)
        _scan(made, inputs, weights, shape, states, plan, plan.chunks, out)
        if keeps:
            space_kernels.keep_steps[(plan.rows,)](
                inputs.step,
                states.inputs,
                states.seen,
                plan.chunks,
                plan.t_row,
                inputs.step.stride(0),
                states.inputs.stride(0),
                CHANNELS=shape.channels,
                HEADS=shape.value_heads,
                BLOCK_H=triton.next_power_of_2(shape.value_heads),
                RING=states.ring,
                num_warps=1,
                **launch_options(out.device),
            )
    # Of a captured step prompts may begin among the tokens that there is room for single rows with:
    # whose a token is decides, not where it lies.
    _gate(inputs.gate, weights, shape, states, plan, out)
    return out


def _step(
    made: torch.Tensor,
    inputs: SpaceInputs,
    weights: SpaceWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentRows,
    out: torch.Tensor,
) -> None:
    rows, heads = plan.single_rows, shape.value_heads
    block_k, block_v = _blocks(shape)
    tile = step_tile(STEP_TILES, rows * heads)
    values = min(tile.values, block_v)
    space_kernels.step_memories[(rows, heads, triton.cdiv(shape.value_dim, values))](
        made,
        inputs.step,
        weights.log_rate,
        weights.shift,
        weights.skip,
        states.memory,
        states.seen,
        states.inputs,
        out,
        plan.paged.b_row,
        plan.paged.b_context,
        inputs.step.stride(0),
        len(states.memory),
        states.inputs.stride(0),
        **_sizes(shape),
        WIDTH=shape.width,
        RING=states.ring,
        BLOCK_K=block_k,
        BLOCK_V=values,
        # Of larger keys a program has more numbers, and as many in a thread's registers.
        num_warps=tile.warps * max(1, block_k // 128),
        **launch_options(out.device),
    )


def _scan(
    made: torch.Tensor,
    inputs: SpaceInputs,
    weights: SpaceWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentRows,
    chunks: torch.Tensor,
    out: torch.Tensor,
) -> None:
    block_k, block_v = _blocks(shape)
    tile = PROMPT_TILE if block_k * made.itemsize <= 256 else LARGE_PROMPT_TILE
    values = min(tile.values, block_v)
    grid = plan.rows, shape.value_heads, triton.cdiv(shape.value_dim, values)
    space_kernels.scan_chunks[grid](
        made,
        inputs.step,
        weights.log_rate,
        weights.shift,
        weights.skip,
        states.memory,
        states.seen,
        states.inputs,
        out,
        chunks,
        plan.t_row,
        inputs.step.stride(0),
        states.inputs.stride(0),
        **_sizes(shape),
        WIDTH=shape.width,
        RING=states.ring,
        CHUNK=tile.chunk,
        BLOCK_K=block_k,
        BLOCK_V=values,
        PRECISION="ieee" if made.dtype == torch.float32 else "tf32",
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(out.device),
    )


def _gate(
    gate: torch.Tensor,
    weights: SpaceWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentRows,
    out: torch.Tensor,
) -> None:
    norm, groups = weights.norm, weights.norm_groups
    width = shape.values // groups
    block = triton.next_power_of_2(width)
    space_kernels.gate_rows[(len(out), groups)](
        gate,
        None if norm is None else norm.weight,
        states.seen,
        out,
        plan.paged.b_row,
        plan.paged.b_context,
        gate.stride(0),
        len(states.memory),
        plan.single_rows,
        0.0 if norm is None else norm.epsilon,
        HEADS=shape.value_heads,
        WIDTH=width,
        BLOCK=block,
        BLOCK_H=triton.next_power_of_2(shape.value_heads),
        NORM_FIRST=weights.norm_first,
        num_warps=max(1, min(block // 512, 16)),
        **launch_options(out.device),
    )


def _sizes(shape: MemoryShape) -> dict[str, int]:
    return {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": shape.value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
    }


def _blocks(shape: MemoryShape) -> tuple[int, int]:
    """Numbers of a key and of a value, up to the next size that products take."""
    return tuple(max(16, triton.next_power_of_2(d)) for d in (shape.key_dim, shape.value_dim))
