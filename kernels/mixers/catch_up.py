"""Memories through inputs that rings keep: where there may be drafts, they may be behind."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.mixers.convolution_kernels import FIELDS
from tokenpod.kernels.mixers.delta_step import log_decay, unit
from tokenpod.kernels.mixers.recurrent_plan import RecurrentRows, StepTile
from tokenpod.kernels.mixers.space_kernels import step_length
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaWeights,
    MemoryShape,
    RecurrentStates,
    SpaceWeights,
)


def catch_up(
    weights: DeltaWeights | SpaceWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentRows,
    tile: StepTile,
    *,
    single: bool,
) -> None:
    """Let memories of rows, of one token or of several, go through what is before their first."""
    block_k, block_v = (
        max(16, triton.next_power_of_2(d)) for d in (shape.key_dim, shape.value_dim)
    )
    rows, values = plan.single_rows if single else plan.rows, min(tile.values, block_v)
    is_delta, bias = True, None
    if isinstance(weights, SpaceWeights):
        is_delta, bias = False, weights.conv_bias
    _catch_up[(rows, shape.value_heads, triton.cdiv(shape.value_dim, values))](
        weights.conv,
        bias,
        weights.log_rate,
        weights.shift,
        *states,
        plan.paged.b_row,
        plan.paged.b_context,
        plan.paged.b_row if plan.chunks is None else plan.chunks,
        plan.t_row,
        len(states.memory),
        states.inputs.stride(0),
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        DECAYS=len(weights.shift) // shape.value_heads,
        DELTA=is_delta,
        WIDTH=shape.width,
        RING=states.ring,
        BLOCK_K=block_k,
        BLOCK_V=values,
        SINGLE=single,
        # Of larger keys a program has more numbers, and as many in a thread's registers.
        num_warps=tile.warps * max(1, block_k // 128),
        **launch_options(states.memory.device),
    )


@launched
@triton.jit
def _catch_up(
    conv,
    bias,
    log_rate,
    shift,
    inputs,
    memory,
    seen,
    b_row,
    b_context,
    chunks,
    t_row,
    states,
    pitch,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    DELTA: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SINGLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Memories through the positions before rows' first tokens, of some values of a head each.

    With DELTA as a gated delta net goes on, else as a state space. Rows are those of one token, or
    those that chunks begin. `seen` stays what it was: other programs of the head read it, too.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    await_inputs(OVERLAP)
    if SINGLE:
        state = tl.minimum(tl.load(b_row + row), states - 1).to(tl.int64)
        context = tl.load(b_context + row)
        first = context - 1
        live = context > 0
    else:
        chunk = chunks + row * FIELDS
        live = tl.load(chunk + 3) != 0
        first = tl.load(chunk + 2)
        state = tl.load(t_row + tl.load(chunk), mask=live, other=0).to(tl.int64)
    # No further behind than a step with drafts has tokens; but trials of steps begin anywhere.
    begin = tl.load(seen + state * VALUE_HEADS + head)
    begin = tl.maximum(begin, first - (RING - WIDTH + 1))
    if live & (begin < first):
        i, j = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        some_k, some_v = i < KEY_DIM, j < VALUE_DIM
        held = memory + ((state * VALUE_HEADS + head) * KEY_DIM + i[:, None]) * VALUE_DIM
        held += j[None, :]
        some = some_k[:, None] & some_v[None, :]
        kept = tl.load(held, mask=some, other=0.0)
        ring = inputs + state * pitch
        key = KEY_HEADS * KEY_DIM + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i
        value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
        # One decay is that of all of a key's numbers.
        decays = head * DECAYS + tl.minimum(i, DECAYS - 1)
        rate, shifted = tl.load(log_rate + head), tl.load(shift + decays)
        for position in range(begin, first):
            k = _convolved(ring, conv, bias, key, some_k, position, WIDTH, RING)
            v = _convolved(ring, conv, bias, value, some_v, position, WIDTH, RING)
            gates = ring + CHANNELS * RING + position % RING
            said = tl.load(gates + head * RING).to(tl.float32)
            if DELTA:
                fall = tl.load(gates + (VALUE_HEADS + decays) * RING).to(tl.float32)
                kept *= tl.exp(log_decay(fall, rate, shifted))[:, None]
                k = unit(k)
                written = (v - tl.sum(kept * k[:, None], 0)) * tl.sigmoid(said)
            else:
                length = step_length(said, tl.load(shift + head))
                kept *= tl.exp(-tl.exp(rate) * length)
                written = v * length
            kept += k[:, None] * written[None, :]
        tl.store(held, kept, mask=some)


@triton.jit
def _convolved(ring, conv, bias, channel, some, position, WIDTH: tl.constexpr, RING: tl.constexpr):
    """[n] float32 of channels [n] behind their convolution, by what a ring keeps."""
    total = tl.zeros(channel.shape, tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=some, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        place = (position + RING - (WIDTH - 1) + tap) % RING
        x = tl.load(ring + channel * RING + place, mask=some, other=0.0).to(tl.float32)
        total += x * tl.load(conv + channel * WIDTH + tap, mask=some, other=0.0).to(tl.float32)
    # Rounded as inputs are.
    return (total * tl.sigmoid(total)).to(ring.dtype.element_ty).to(tl.float32)
