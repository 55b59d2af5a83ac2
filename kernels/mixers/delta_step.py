"""One token of each row through a gated delta net: a program per row and value head."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs

#: Added to the squares of a key's or query's numbers before their root is taken.
EPSILON: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def delta_step(
    mixed,
    gate,
    write,
    decay,
    conv,
    log_rate,
    shift,
    norm,
    inputs,
    memory,
    seen,
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
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row b's token is token b; rows of context 0 are padding, and get zeros.

    Everything that no kernel before it in the step writes is read before it waits for them: the
    memory above all, which takes longest.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    EACH: tl.constexpr = VALUE_HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    state = tl.minimum(tl.load(b_row + row), states - 1).to(tl.int64)
    context = tl.load(b_context + row)
    position = context - 1
    live = context > 0
    i, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    some_k, some_v = i < KEY_DIM, j < VALUE_DIM
    q_channel = head // EACH * KEY_DIM + i
    k_channel = KEY_HEADS * KEY_DIM + q_channel
    v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    at = state * VALUE_HEADS + head
    held = (at * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    some = some_k[:, None] & some_v[None, :] & live
    kept = tl.load(memory + held, mask=some, other=0.0)
    fresh = position >= tl.load(seen + at)
    rate, shifted = tl.load(log_rate + head), tl.load(shift + head)
    scale = tl.load(norm + j, mask=some_v, other=0.0)
    ring = inputs + state * CHANNELS * WIDTH
    q = before(ring, conv, q_channel, some_k & live, position, WIDTH)
    k = before(ring, conv, k_channel, some_k & live, position, WIDTH)
    v = before(ring, conv, v_channel, some_v & live, position, WIDTH)
    await_inputs(OVERLAP)
    token = row.to(tl.int64) * stride
    own_q = tl.load(mixed + token + q_channel, mask=some_k, other=0.0)
    own_k = tl.load(mixed + token + k_channel, mask=some_k, other=0.0)
    own_v = tl.load(mixed + token + v_channel, mask=some_v, other=0.0)
    q = unit(convolved(q, own_q, conv, q_channel, some_k, WIDTH)) * (KEY_DIM**-0.5)
    k = unit(convolved(k, own_k, conv, k_channel, some_k, WIDTH))
    v = convolved(v, own_v, conv, v_channel, some_v, WIDTH)
    fall = log_decay(tl.load(decay + token + head).to(tl.float32), rate, shifted)
    share = tl.sigmoid(tl.load(write + token + head).to(tl.float32))
    # A memory that has been through the position neither decays nor is written.
    kept *= tl.where(fresh, tl.exp(fall), 1.0)
    missing = (v - tl.sum(kept * k[:, None], 0)) * tl.where(fresh, share, 0.0)
    kept += k[:, None] * missing[None, :]
    found = tl.sum(kept * q[:, None], 0).to(out.dtype.element_ty)
    tl.store(memory + held, kept, mask=some)
    # Others read the ring's other places; the first value head of a key head writes for all.
    place = position % WIDTH
    first = live & (head % EACH == 0)
    tl.store(ring + q_channel * WIDTH + place, own_q, mask=some_k & first)
    tl.store(ring + k_channel * WIDTH + place, own_k, mask=some_k & first)
    tl.store(ring + v_channel * WIDTH + place, own_v, mask=some_v & live)
    tl.store(seen + at, position + 1, mask=live)
    opened = tl.load(gate + token + head * VALUE_DIM + j, mask=some_v, other=0.0)
    result = gated_norm(found[None, :], opened[None, :], scale, epsilon, VALUE_DIM)
    place_out = (row.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + j
    result = tl.where(live, result, tl.zeros_like(result))
    tl.store(out + place_out[None, :], result, mask=some_v[None, :])


@triton.jit
def before(ring, conv, channel, some, position, WIDTH: tl.constexpr):
    """What inputs before `position` add to the convolution of channels [n], float32."""
    total = tl.zeros_like(channel).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        place = (position + 1 + tap) % WIDTH
        x = tl.load(ring + channel * WIDTH + place, mask=some, other=0.0).to(tl.float32)
        total += x * tl.load(conv + channel * WIDTH + tap, mask=some, other=0.0).to(tl.float32)
    return total


@triton.jit
def convolved(total, own, conv, channel, some, WIDTH: tl.constexpr):
    """The convolution with a token's own input, activated; float32, but rounded as inputs are."""
    tap = tl.load(conv + channel * WIDTH + WIDTH - 1, mask=some, other=0.0).to(tl.float32)
    total += own.to(tl.float32) * tap
    return (total * tl.sigmoid(total)).to(own.dtype).to(tl.float32)


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
def gated_norm(found, gate, scale, epsilon, N: tl.constexpr):
    """[m, n] of what heads find, as it is rounded, and its gates -> normed and gated, as rounded.

    Zero beyond the N numbers of a head.
    """
    wide = found.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / N + epsilon)
    if scale.dtype == found.dtype:
        normed = normed.to(found.dtype).to(tl.float32)
    normed = (normed * scale.to(tl.float32)[None, :]).to(found.dtype).to(tl.float32)
    opened = gate.to(tl.float32)
    return (normed * (opened * tl.sigmoid(opened))).to(found.dtype)
