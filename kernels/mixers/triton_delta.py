"""The gated delta net on a GPU: rows of one token by one kernel, the others in chunks by four."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from tokenpod.kernels.gpu.launch import launch_options
from tokenpod.kernels.mixers import delta_chunks
from tokenpod.kernels.mixers.delta_plan import CHUNK, FIELDS, cut_chunks
from tokenpod.kernels.mixers.delta_step import delta_step
from tokenpod.kernels.operations.batch import CHUNKS, ForwardBatch, PagedRows, RaggedRows
from tokenpod.kernels.operations.delta_ops import (
    DeltaInputs,
    DeltaShape,
    DeltaStates,
    DeltaWeights,
)

#: A captured step has room for so many rows with several tokens.
MOST_CAPTURED_ROWS = 64
#: Values of a head that one program of a scan walks along a row with.
SCANNED = 32
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
    rows = RaggedRows(batch.b_start, batch.b_context, batch.b_runs, batch.b_row, batch.single_rows)
    listed = torch.from_numpy(cut_chunks(rows))
    if batch.t_slot.device.type != "cpu":
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
    if plan.single_rows:
        _steps(inputs, weights, shape, states, plan, out)
    if plan.chunks is not None:
        _chunks(inputs, weights, shape, states, plan, plan.chunks, out)
    return out


def _steps(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeltaStates,
    plan: DeltaRows,
    out: torch.Tensor,
) -> None:
    block_k, block_v = _blocks(shape)
    delta_step[(plan.single_rows, shape.value_heads)](
        *inputs,
        weights.conv,
        weights.log_rate,
        weights.shift,
        weights.norm.weight,
        *states,
        out,
        plan.paged.b_row,
        plan.paged.b_context,
        inputs.mixed.stride(0),
        len(states.memory),
        weights.norm.epsilon,
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        WIDTH=shape.width,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=max(1, min(8, block_k * block_v // 2048)),
        **launch_options(out.device),
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
    mixed, (block_k, block_v) = inputs.mixed, _blocks(shape)
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
        "CHUNK": CHUNK,
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
        WIDTH=shape.width,
        CHUNK=CHUNK,
        BLOCK=CONVOLVED,
        **options,
    )
    delta_chunks.solve_chunks[(n, heads)](
        made,
        inputs.write,
        inputs.decay,
        weights.log_rate,
        weights.shift,
        chunks,
        u,
        w,
        fallen,
        stride,
        BLOCK_V=block_v,
        num_warps=4,
        **sizes,
        **options,
    )
    scanned = min(block_v, SCANNED)
    # What heads find takes the place of `out`, where it is normed.
    delta_chunks.scan_chunks[(plan.rows, heads, triton.cdiv(shape.value_dim, scanned))](
        mixed,
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
        BLOCK_V=scanned,
        STAGES=2,
        num_warps=4,
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
        CHUNK=CHUNK,
        BLOCK_V=block_v,
        num_warps=4,
        **options,
    )


def _blocks(shape: DeltaShape) -> tuple[int, int]:
    """Numbers of a key and of a value, up to the next size that products take."""
    return tuple(max(16, triton.next_power_of_2(d)) for d in (shape.key_dim, shape.value_dim))
