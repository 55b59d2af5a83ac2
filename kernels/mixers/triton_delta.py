"""The gated delta net on a GPU: rows of one token by one kernel, the others in chunks by four."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from tokenpod.kernels.gpu.launch import launch_options
from tokenpod.kernels.mixers import delta_chunks, delta_step
from tokenpod.kernels.mixers.catch_up import catch_up
from tokenpod.kernels.mixers.recurrent_plan import CHUNK, RecurrentRows, StepTile, step_tile
from tokenpod.kernels.mixers.triton_convolution import convolve_chunks
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaInputs,
    DeltaWeights,
    MemoryShape,
    RecurrentPlan,
    RecurrentStates,
)

#: By rows times value heads, ascending. Found on an H200 (`benchmarks/run.py mixers --search`) with
#: 1, 64 and 256 rows of 32 heads of 128: few pairs are cut finely, so that there are programs for
#: all multiprocessors. A program that has a head as a whole norms it, too.
STEP_TILES = ((128, StepTile(16, 1)), (float("inf"), StepTile(64, 4)))


@dataclass(frozen=True, slots=True)
class PromptTile:
    """How rows of several tokens are cut."""

    #: Tokens of a chunk, and warps of a program that solves its system.
    chunk: int
    solve_warps: int
    #: Values of a head that one program walks along a row with, its warps, and chunks under way.
    values: int
    warps: int
    stages: int


#: Prompts of 8,192 tokens ran at 72 % of the limit with it; others were not tried.
PROMPT_TILE = PromptTile(CHUNK, 2, 64, 4, 2)


def gated_delta(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """`GatedDelta` says what."""
    assert isinstance(plan, RecurrentRows)
    mixed = inputs.mixed
    out = mixed.new_empty((len(mixed), shape.value_heads * shape.value_dim))
    if states.takes_back(shape.width):
        for rows, single in ((plan.single_rows, True), (plan.rows, False)):
            if rows:
                tile = step_tile(STEP_TILES, rows * shape.value_heads)
                catch_up(weights, shape, states, plan, tile, single=single)
    if plan.single_rows:
        _steps(inputs, weights, shape, states, plan, out)
    if plan.chunks is not None:
        _chunks(inputs, weights, shape, states, plan, plan.chunks, out)
    return out


def _steps(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentRows,
    out: torch.Tensor,
) -> None:
    rows, stride, options = plan.single_rows, inputs.mixed.stride(0), launch_options(out.device)
    block_k, block_v = _blocks(shape)
    tile = step_tile(STEP_TILES, rows * shape.value_heads)
    values = min(tile.values, block_v)
    made = torch.empty((rows, shape.channels), device=out.device)
    gates = torch.empty((rows, shape.value_heads, 1 + weights.decays), device=out.device)
    sizes = {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": shape.value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "DECAYS": weights.decays,
    }
    delta_step.convolve_rows[(rows, 2 * shape.key_heads + shape.value_heads)](
        inputs.mixed,
        inputs.write,
        inputs.decay,
        weights.conv,
        weights.log_rate,
        weights.shift,
        states.inputs,
        states.seen,
        made,
        gates,
        plan.paged.b_row,
        plan.paged.b_context,
        stride,
        inputs.decay.stride(0),
        len(states.memory),
        states.inputs.stride(0),
        WIDTH=shape.width,
        RING=states.ring,
        BLOCK=max(block_k, block_v),
        num_warps=1,
        **sizes,
        **options,
    )
    normed = values == block_v
    delta_step.step_memories[(rows, shape.value_heads, triton.cdiv(shape.value_dim, values))](
        made,
        gates,
        states.memory,
        inputs.gate,
        weights.norm.weight,
        out,
        plan.paged.b_row,
        plan.paged.b_context,
        inputs.gate.stride(0),
        len(states.memory),
        weights.norm.epsilon,
        BLOCK_K=block_k,
        BLOCK_V=values,
        SIGMOID=weights.sigmoid_gate,
        NORMED=normed,
        BEHIND=states.takes_back(shape.width),
        num_warps=tile.warps,
        **sizes,
        **options,
    )
    if not normed:
        delta_step.norm_rows[(rows, shape.value_heads)](
            inputs.gate,
            weights.norm.weight,
            out,
            plan.paged.b_context,
            inputs.gate.stride(0),
            weights.norm.epsilon,
            VALUE_HEADS=shape.value_heads,
            VALUE_DIM=shape.value_dim,
            BLOCK_V=block_v,
            SIGMOID=weights.sigmoid_gate,
            num_warps=1,
            **options,
        )


def _chunks(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentRows,
    chunks: torch.Tensor,
    out: torch.Tensor,
) -> None:
    mixed, (block_k, block_v), tile = inputs.mixed, _blocks(shape), PROMPT_TILE
    tokens, heads, n = len(mixed), shape.value_heads, len(chunks)
    stride, options = mixed.stride(0), launch_options(mixed.device)
    made = mixed.new_empty((tokens, shape.channels))
    u, w = (mixed.new_empty((tokens, heads, d)) for d in (shape.value_dim, shape.key_dim))
    fallen = torch.empty((tokens, heads, weights.decays), device=mixed.device)
    # Of several decays it is made with the systems, by as many programs.
    alike = mixed.new_empty((tokens, heads, tile.chunk)) if weights.decays > 1 else None
    warps = tile.solve_warps * (1 if alike is None else 2)
    sizes = {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "DECAYS": weights.decays,
        "CHUNK": tile.chunk,
        "BLOCK_K": block_k,
        "PRECISION": "ieee" if mixed.dtype == torch.float32 else "tf32",
    }
    convolve_chunks(mixed, weights.conv, None, states, plan, made, gated=False, chunk=tile.chunk)
    delta_chunks.solve_chunks[(n, heads)](
        made,
        inputs.write,
        inputs.decay,
        weights.log_rate,
        weights.shift,
        states.seen,
        chunks,
        plan.t_row,
        u,
        w,
        fallen,
        alike,
        stride,
        inputs.decay.stride(0),
        LEVELS=tile.chunk.bit_length() - 1,
        BLOCK_V=block_v,
        num_warps=warps,
        **sizes,
        **options,
    )
    scanned = min(block_v, tile.values)
    # What heads find takes the place of `out`, where it is normed.
    delta_chunks.scan_chunks[(plan.rows, heads, triton.cdiv(shape.value_dim, scanned))](
        mixed,
        inputs.write,
        inputs.decay,
        made,
        u,
        w,
        fallen,
        alike,
        *states,
        out,
        chunks,
        plan.t_row,
        stride,
        inputs.decay.stride(0),
        states.inputs.stride(0),
        WIDTH=shape.width,
        RING=states.ring,
        BLOCK_V=scanned,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **sizes,
        **options,
    )
    delta_chunks.norm_chunks[(n, heads)](
        inputs.gate,
        weights.norm.weight,
        out,
        chunks,
        inputs.gate.stride(0),
        weights.norm.epsilon,
        VALUE_HEADS=heads,
        VALUE_DIM=shape.value_dim,
        CHUNK=tile.chunk,
        BLOCK_V=block_v,
        SIGMOID=weights.sigmoid_gate,
        num_warps=4,
        **options,
    )


def _blocks(shape: MemoryShape) -> tuple[int, int]:
    """Numbers of a key and of a value, up to the next size that products take."""
    return tuple(max(16, triton.next_power_of_2(d)) for d in (shape.key_dim, shape.value_dim))
