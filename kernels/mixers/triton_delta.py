"""The gated delta net on a GPU: rows of one token by one kernel, the others in chunks by four."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from tokenpod.kernels.gpu.launch import launch_options
from tokenpod.kernels.mixers import delta_chunks, delta_step
from tokenpod.kernels.mixers.recurrent_plan import CHUNK, FIELDS, cut_chunks
from tokenpod.kernels.operations.batch import CHUNKS, ForwardBatch, PagedRows, RaggedRows
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaInputs,
    DeltaShape,
    DeltaStates,
    DeltaWeights,
)

#: A captured step has room for so many rows with several tokens.
MOST_CAPTURED_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepTile:
    """How rows of one token go through their memories."""

    #: Values of a head that one program has.
    values: int
    warps: int


#: By rows times value heads, ascending. Found on an H200 (`benchmarks/run.py mixers --search`) with
#: 1, 64 and 256 rows of 32 heads of 128: few pairs are cut finely, so that there are programs for
#: all multiprocessors. A program that has a head as a whole norms it, too.
STEP_TILES = ((128, StepTile(16, 1)), (float("inf"), StepTile(64, 2)))


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

#: Channels of a chunk that one program convolves.
CONVOLVED = 64


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """A step's rows for all layers."""

    single_rows: int
    paged: PagedRows
    #: [chunks, FIELDS] int32 on the device; None: all rows have one token.
    chunks: torch.Tensor | None
    #: So many of the first chunks may begin rows.
    rows: int

    @property
    def t_row(self) -> torch.Tensor:
        """[T] int64: each token's state."""
        assert self.paged.t_row is not None
        return self.paged.t_row


def step_tile(pairs: int) -> StepTile:
    """For so many pairs of a row and a value head."""
    return next(tile for most, tile in STEP_TILES if pairs <= most)


def plan_delta(batch: ForwardBatch) -> DeltaRows:
    """What all layers share; of a captured step its chunks come with its integers.

    Raises:
        ValueError: the batch has no rows on the device.
    """
    paged = batch.paged
    if paged is None:
        raise ValueError(f"a batch of {batch.rows} rows has no paged rows; these kernels need them")
    if batch.rows == batch.single_rows:
        return DeltaRows(batch.single_rows, paged, None, 0)
    if paged.tiles is not None:
        chunks = paged.tiles[CHUNKS].view(-1, FIELDS)
        return DeltaRows(batch.single_rows, paged, chunks, min(len(chunks), MOST_CAPTURED_ROWS))
    rows = RaggedRows(
        batch.b_start,
        batch.b_context,
        batch.b_runs,
        batch.b_row,
        batch.single_rows,
        b_drafts=batch.b_drafts,
    )
    listed = torch.from_numpy(cut_chunks(rows, PROMPT_TILE.chunk))
    if batch.t_slot.is_cuda:
        listed = listed.pin_memory()
    chunks = listed.to(batch.t_slot.device, non_blocking=True)
    return DeltaRows(batch.single_rows, paged, chunks, batch.rows - batch.single_rows)


def gated_delta(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeltaStates,
    plan: DeltaRows,
) -> torch.Tensor:
    """`GatedDelta` says what."""
    mixed = inputs.mixed
    out = mixed.new_empty((len(mixed), shape.value_heads * shape.value_dim))
    if states.takes_back(shape):
        if plan.single_rows:
            _catch_up(weights, shape, states, plan, plan.single_rows, single=True)
        if plan.chunks is not None:
            _catch_up(weights, shape, states, plan, plan.rows, single=False)
    if plan.single_rows:
        _steps(inputs, weights, shape, states, plan, out)
    if plan.chunks is not None:
        _chunks(inputs, weights, shape, states, plan, plan.chunks, out)
    return out


def _catch_up(
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeltaStates,
    plan: DeltaRows,
    rows: int,
    *,
    single: bool,
) -> None:
    """Let memories of rows, of one token or of several, go through what is before their first."""
    block_k, block_v = _blocks(shape)
    tile = step_tile(rows * shape.value_heads)
    values = min(tile.values, block_v)
    delta_step.catch_up[(rows, shape.value_heads, triton.cdiv(shape.value_dim, values))](
        weights.conv,
        weights.log_rate,
        weights.shift,
        *states,
        plan.paged.b_row,
        plan.paged.b_context,
        plan.paged.b_row if plan.chunks is None else plan.chunks,
        plan.t_row,
        len(states.memory),
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        WIDTH=shape.width,
        RING=states.ring,
        BLOCK_K=block_k,
        BLOCK_V=values,
        SINGLE=single,
        num_warps=tile.warps,
        **launch_options(states.memory.device),
    )


def _steps(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeltaStates,
    plan: DeltaRows,
    out: torch.Tensor,
) -> None:
    rows, stride, options = plan.single_rows, inputs.mixed.stride(0), launch_options(out.device)
    block_k, block_v = _blocks(shape)
    tile = step_tile(rows * shape.value_heads)
    values = min(tile.values, block_v)
    made = torch.empty((rows, shape.channels), device=out.device)
    gates = torch.empty((rows, 2, shape.value_heads), device=out.device)
    sizes = {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": shape.value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
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
        len(states.memory),
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
        stride,
        len(states.memory),
        weights.norm.epsilon,
        BLOCK_K=block_k,
        BLOCK_V=values,
        NORMED=normed,
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
            stride,
            weights.norm.epsilon,
            VALUE_HEADS=shape.value_heads,
            VALUE_DIM=shape.value_dim,
            BLOCK_V=block_v,
            num_warps=1,
            **options,
        )


def _chunks(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeltaStates,
    plan: DeltaRows,
    chunks: torch.Tensor,
    out: torch.Tensor,
) -> None:
    mixed, (block_k, block_v), tile = inputs.mixed, _blocks(shape), PROMPT_TILE
    tokens, heads, n = len(mixed), shape.value_heads, len(chunks)
    stride, options = mixed.stride(0), launch_options(mixed.device)
    made = mixed.new_empty((tokens, shape.channels))
    u, w = (mixed.new_empty((tokens, heads, d)) for d in (shape.value_dim, shape.key_dim))
    fallen = torch.empty((tokens, heads), device=mixed.device)
    sizes = {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "CHUNK": tile.chunk,
        "BLOCK_K": block_k,
        "PRECISION": "ieee" if mixed.dtype == torch.float32 else "tf32",
    }
    delta_chunks.convolve_chunks[(n, triton.cdiv(shape.channels, CONVOLVED))](
        mixed,
        weights.conv,
        states.inputs,
        made,
        chunks,
        plan.t_row,
        stride,
        CHANNELS=shape.channels,
        VALUE_HEADS=heads,
        WIDTH=shape.width,
        RING=states.ring,
        CHUNK=tile.chunk,
        BLOCK=CONVOLVED,
        **options,
    )
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
        stride,
        BLOCK_V=block_v,
        num_warps=tile.solve_warps,
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
        *states,
        out,
        chunks,
        plan.t_row,
        stride,
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
        stride,
        weights.norm.epsilon,
        VALUE_HEADS=heads,
        VALUE_DIM=shape.value_dim,
        CHUNK=tile.chunk,
        BLOCK_V=block_v,
        num_warps=4,
        **options,
    )


def _blocks(shape: DeltaShape) -> tuple[int, int]:
    """Numbers of a key and of a value, up to the next size that products take."""
    return tuple(max(16, triton.next_power_of_2(d)) for d in (shape.key_dim, shape.value_dim))
