"""One token of each row through a gated delta net.

The memory takes nearly all of the time: as many of its bytes as can be must be under way. So what
is small is made before, by a kernel of its own, and the memory's asks for its part of it before it
waits for that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.gpu.launcher import launched

#: Added to the squares of a key's or query's numbers before their root is taken.
EPSILON: tl.constexpr = tl.constexpr(1e-6)


@launched
@triton.jit
def convolve_rows(
    mixed,
    write,
    decay,
    conv,
    log_rate,
    shift,
    inputs,
    seen,
    made,
    gates,
    b_row,
    b_context,
    stride,
    decay_stride,
    states,
    pitch,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Queries, keys and values of rows, of a head each: made [B, channels] float32.

    And of each value head what share of a value is written into its memory, then what is kept
    there, gates [B, H, 1 + DECAYS] float32. Row b's token is token b; a row of context 0 is
    padding.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    is_key = part < 2 * KEY_HEADS
    head = tl.maximum(part - 2 * KEY_HEADS, 0)
    begin = tl.where(is_key, part * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM)
    size = tl.where(is_key, KEY_DIM, VALUE_DIM)
    state = tl.minimum(tl.load(b_row + row), states - 1).to(tl.int64)
    context = tl.load(b_context + row)
    position = context - 1
    live = context > 0
    i = tl.arange(0, BLOCK)
    channel = begin + i
    some = i < size
    own_ring = inputs + state * pitch
    ring = own_ring + channel * RING
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        place = (position + RING - (WIDTH - 1) + tap) % RING
        x = tl.load(ring + place, mask=some & live, other=0.0).to(tl.float32)
        total += x * tl.load(conv + channel * WIDTH + tap, mask=some, other=0.0).to(tl.float32)
    last = tl.load(conv + channel * WIDTH + WIDTH - 1, mask=some, other=0.0).to(tl.float32)
    fresh = position >= tl.load(seen + state * VALUE_HEADS + head)
    decays = head * DECAYS + i
    some_d = i < DECAYS
    rate, shifted = tl.load(log_rate + head), tl.load(shift + decays, mask=some_d, other=0.0)
    await_inputs(OVERLAP)
    token = row.to(tl.int64) * stride
    own = tl.load(mixed + token + channel, mask=some, other=0.0)
    own_write = tl.load(write + token + head)
    own_decay = tl.load(decay + row.to(tl.int64) * decay_stride + decays, mask=some_d, other=0.0)
    fall = log_decay(own_decay.to(tl.float32), rate, shifted)
    share = tl.sigmoid(own_write.to(tl.float32))
    total += own.to(tl.float32) * last
    # Rounded as inputs are.
    total = (total * tl.sigmoid(total)).to(own.dtype).to(tl.float32)
    if is_key:
        total = unit(total) * tl.where(part < KEY_HEADS, KEY_DIM**-0.5, 1.0)
    tl.store(made + row.to(tl.int64) * CHANNELS + channel, total, mask=some)
    # The other places of the ring are read, this one is not.
    tl.store(ring + position % RING, own, mask=some & live)
    # A memory that has been through the position neither decays nor is written.
    gate = gates + (row * VALUE_HEADS + head) * (1 + DECAYS)
    is_value = part >= 2 * KEY_HEADS
    tl.store(gate, tl.where(fresh, share, 0.0), mask=is_value)
    tl.store(gate + 1 + i, tl.where(fresh, tl.exp(fall), 1.0), mask=some_d & is_value)
    kept = is_value & live
    tl.store(seen + state * VALUE_HEADS + head, position + 1, mask=kept)
    if RING > WIDTH:
        gates_at = own_ring + CHANNELS * RING + position % RING
        tl.store(gates_at + head * RING, own_write, mask=kept)
        tl.store(gates_at + (VALUE_HEADS + decays) * RING, own_decay, mask=some_d & kept)


@launched
@triton.jit
def step_memories(
    made,
    gates,
    memory,
    gate,
    norm,
    out,
    b_row,
    b_context,
    stride,
    states,
    epsilon,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMED: tl.constexpr,
    BEHIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What heads find [B, H · value_dim], of a row and some values of a head each.

    With NORMED, which needs all values of a head, it is normed and gated. BEHIND: `_catch_up` has
    gone before.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    state = tl.minimum(tl.load(b_row + row), states - 1).to(tl.int64)
    live = tl.load(b_context + row) > 0
    i, j = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    some_k, some_v = i < KEY_DIM, j < VALUE_DIM
    held = memory + ((state * VALUE_HEADS + head) * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    some = some_k[:, None] & some_v[None, :] & live
    if BEHIND:
        # `_catch_up` may still be writing them: what is launched after it waits for it, too.
        await_inputs(OVERLAP)
    kept = tl.load(held, mask=some, other=0.0)
    if not BEHIND:
        await_inputs(OVERLAP)
    own = made + row.to(tl.int64) * CHANNELS
    query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    q = tl.load(own + query + i, mask=some_k, other=0.0)
    k = tl.load(own + KEY_HEADS * KEY_DIM + query + i, mask=some_k, other=0.0)
    value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    v = tl.load(own + value + j, mask=some_v, other=0.0)
    own_gates = gates + (row * VALUE_HEADS + head) * (1 + DECAYS)
    share = tl.load(own_gates)
    # One decay is that of all of a key's numbers.
    kept *= tl.load(own_gates + 1 + tl.minimum(i, DECAYS - 1))[:, None]
    missing = (v - tl.sum(kept * k[:, None], 0)) * share
    kept += k[:, None] * missing[None, :]
    tl.store(held, kept, mask=some)
    found = tl.sum(kept * q[:, None], 0).to(out.dtype.element_ty)
    if NORMED:
        opened = tl.load(
            gate + row.to(tl.int64) * stride + head * VALUE_DIM + j, mask=some_v, other=0.0
        )
        scale = tl.load(norm + j, mask=some_v, other=0.0)
        found = gated_norm(found[None, :], opened[None, :], scale, epsilon, VALUE_DIM, SIGMOID)
        found = tl.reshape(found, (BLOCK_V,))
    found = tl.where(live, found, tl.zeros_like(found))
    tl.store(out + (row.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + j, found, mask=some_v)


@launched
@triton.jit
def norm_rows(
    gate,
    norm,
    out,
    b_context,
    stride,
    epsilon,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIGMOID: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What heads have found, in `out` [B, H · value_dim], normed and gated."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    j = tl.arange(0, BLOCK_V)
    some = j < VALUE_DIM
    live = tl.load(b_context + row) > 0
    scale = tl.load(norm + j, mask=some, other=0.0)
    await_inputs(OVERLAP)
    place = out + (row.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + j
    own = tl.load(place, mask=some, other=0.0)
    opened = gate + row.to(tl.int64) * stride + head * VALUE_DIM + j
    opened = tl.load(opened, mask=some & live, other=0.0)
    found = gated_norm(own[None, :], opened[None, :], scale, epsilon, VALUE_DIM, SIGMOID)
    tl.store(place[None, :], found, mask=some[None, :])


@triton.jit
def unit(x):
    """[n] or [m, n] float32 -> the same, of length 1."""
    squares = tl.sum(x * x, -1, keep_dims=True)
    return x * tl.rsqrt(squares + EPSILON)


@triton.jit
def log_decay(x, rate, shift):
    """The logarithm of what is kept of a memory, float32."""
    x += shift
    soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(rate) * soft


@triton.jit
def gated_norm(found, gate, scale, epsilon, N: tl.constexpr, SIGMOID: tl.constexpr):
    """[m, n] of what heads find, as it is rounded, and its gates -> normed and gated, as rounded.

    Zero beyond the N numbers of a head.
    """
    wide = found.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / N + epsilon)
    if scale.dtype == found.dtype:
        normed = normed.to(found.dtype).to(tl.float32)
    normed = (normed * scale.to(tl.float32)[None, :]).to(found.dtype).to(tl.float32)
    opened = gate.to(tl.float32)
    open_by = tl.sigmoid(opened) if SIGMOID else opened * tl.sigmoid(opened)
    return (normed * open_by).to(found.dtype)
