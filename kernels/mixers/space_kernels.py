"""The memory of a state space on a GPU: one token of each row, or along a row in chunks.

Within a chunk, G is the sum of logarithms of decays up to a token, and q, k are C and B (Dao and
Gu, "Transformers are SSMs", 2024, section 6):

    written = step · v
    found   = exp(G) · q · S + (q · kᵀ · exp(G[i] - G[j]), j ≤ i) · written + skip · v
    S       = exp(G_last) · S + (k · exp(G_last - G))ᵀ · written

One program walks along a row with a head's memory in registers: other heads and rows fill the GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.mixers.convolution_kernels import FIELDS


@triton.jit
def step_length(x, shift):
    """softplus(x + shift), float32."""
    x = x.to(tl.float32) + shift
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@launched
@triton.jit
def step_memories(
    made,
    step,
    log_rate,
    shift,
    skip,
    memory,
    seen,
    inputs,
    out,
    b_row,
    b_context,
    stride,
    states,
    pitch,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What heads find [B, H · value_dim], of a row and some values of a head each.

    It is zero of padding. A memory that has been through the position stays as it is.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    state = tl.minimum(tl.load(b_row + row), states - 1).to(tl.int64)
    context = tl.load(b_context + row)
    live = context > 0
    i, j = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    some_k, some_v = i < KEY_DIM, j < VALUE_DIM
    held = memory + ((state * VALUE_HEADS + head) * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    some = some_k[:, None] & some_v[None, :] & live
    rate, shifted, share = tl.load(log_rate + head), tl.load(shift + head), tl.load(skip + head)
    if RING > WIDTH:
        # `_catch_up` may still be writing them: what is launched after it waits for it, too.
        await_inputs(OVERLAP)
    kept = tl.load(held, mask=some, other=0.0)
    fresh = context > tl.load(seen + state * VALUE_HEADS + head)
    if RING == WIDTH:
        await_inputs(OVERLAP)
    said = tl.load(step + row.to(tl.int64) * stride + head)
    length = step_length(said, shifted)
    if RING > WIDTH:
        place = (CHANNELS + head) * RING + (context + RING - 1) % RING
        tl.store(inputs + state * pitch + place, said, mask=live & (tl.program_id(2) == 0))
    own = made + row.to(tl.int64) * CHANNELS
    query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    q = tl.load(own + query + i, mask=some_k, other=0.0).to(tl.float32)
    k = tl.load(own + KEY_HEADS * KEY_DIM + query + i, mask=some_k, other=0.0).to(tl.float32)
    value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    v = tl.load(own + value + j, mask=some_v, other=0.0).to(tl.float32)
    kept *= tl.where(fresh, tl.exp(-tl.exp(rate) * length), 1.0)
    kept += k[:, None] * (v * tl.where(fresh, length, 0.0))[None, :]
    tl.store(held, kept, mask=some)
    found = tl.where(live, tl.sum(kept * q[:, None], 0) + share * v, 0.0)
    at = out + (row.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + j
    tl.store(at, found.to(out.dtype.element_ty), mask=some_v)


@launched
@triton.jit
def scan_chunks(
    made,
    step,
    log_rate,
    shift,
    skip,
    memory,
    seen,
    inputs,
    found,
    chunks,
    t_row,
    stride,
    pitch,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What heads find [T, H · value_dim], and rows' memories behind their last tokens.

    Only the first chunks of rows have work here; they are listed first. CHUNK is how far a program
    goes at a time, which need not be what rows were cut into.
    """
    chunk = chunks + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    block = tl.program_id(2)
    first, position, signed = tl.load(chunk), tl.load(chunk + 2), tl.load(chunk + 3)
    count = tl.abs(signed)
    rate, shifted, share = tl.load(log_rate + head), tl.load(shift + head), tl.load(skip + head)
    await_inputs(OVERLAP)
    if count > 0:
        row = tl.load(t_row + first)
        t = tl.arange(0, CHUNK)
        i, j = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
        query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        key = KEY_HEADS * KEY_DIM + query
        value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        state = row * VALUE_HEADS + head
        held = memory + (state * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
        some_held = (i < KEY_DIM)[:, None] & (j < VALUE_DIM)[None, :]
        kept = tl.load(held, mask=some_held, other=0.0)
        # Nothing decays and nothing is written where the memory has been through the position.
        known = 0
        if RING > WIDTH:
            known = tl.load(seen + state) - position
        for start in tl.range(0, count, CHUNK, num_stages=STAGES):
            some = t < count - start
            token = (first + start + t).to(tl.int64)
            some_k = some[:, None] & (i < KEY_DIM)[None, :]
            some_v = some[:, None] & (j < VALUE_DIM)[None, :]
            made_at = made + token[:, None] * CHANNELS
            q = tl.load(made_at + query + i[None, :], mask=some_k, other=0.0)
            k = tl.load(made_at + key + i[None, :], mask=some_k, other=0.0)
            v = tl.load(made_at + value + j[None, :], mask=some_v, other=0.0)
            length = step_length(
                tl.load(step + token * stride + head, mask=some, other=0.0), shifted
            )
            length = tl.where(some & (start + t >= known), length, 0.0)
            fall = -tl.exp(rate) * length
            whole = tl.sum(fall, 0)
            fall = tl.cumsum(fall, 0)
            written = (v.to(tl.float32) * length[:, None]).to(v.dtype)
            earlier = t[:, None] >= t[None, :]
            between = tl.exp(tl.where(earlier, fall[:, None] - fall[None, :], 0.0))
            alike = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            alike = tl.where(earlier, alike * between, 0.0).to(q.dtype)
            since = (q.to(tl.float32) * tl.exp(fall)[:, None]).to(q.dtype)
            heard = tl.dot(since, kept.to(q.dtype), input_precision=PRECISION)
            heard += tl.dot(alike, written, input_precision=PRECISION)
            heard += share * v.to(tl.float32)
            tl.store(
                found + (token[:, None] * VALUE_HEADS + head) * VALUE_DIM + j[None, :],
                heard.to(found.dtype.element_ty),
                mask=some_v,
            )
            rest = (k.to(tl.float32) * tl.exp(whole - fall)[:, None]).to(k.dtype)
            kept = kept * tl.exp(whole) + tl.dot(tl.trans(rest), written, input_precision=PRECISION)
        tl.store(held, kept, mask=some_held & (signed > 0))
        # Where there may be drafts, `seen` is read here: `keep_steps` says it.
        if (block == 0) & (RING == WIDTH):
            tl.store(seen + state, position + count)


@launched
@triton.jit
def keep_steps(
    step,
    inputs,
    seen,
    chunks,
    t_row,
    stride,
    pitch,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RING: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What rows' last tokens say of steps, into their rings, and how far memories have been.

    Of rows that chunks begin, once all have been scanned.
    """
    chunk = chunks + tl.program_id(0) * FIELDS
    first, position, signed = tl.load(chunk), tl.load(chunk + 2), tl.load(chunk + 3)
    count = tl.abs(signed)
    await_inputs(OVERLAP)
    if count > 0:
        head, end = tl.arange(0, BLOCK_H), position + count
        some = head < HEADS
        row = tl.load(t_row + first)
        ring = inputs + row * pitch + (CHANNELS + head) * RING
        for back in range(0, RING):
            last = count - 1 - back
            there = some & (last >= 0)
            own = tl.load(step + (first + last).to(tl.int64) * stride + head, mask=there, other=0.0)
            tl.store(ring + (position + last + RING) % RING, own, mask=there)
        through = seen + row * HEADS + head
        known = tl.maximum(tl.load(through, mask=some, other=0), position)
        tl.store(through, tl.where(signed > 0, end, known), mask=some)


@launched
@triton.jit(do_not_specialize=["single"])
def gate_rows(
    gate,
    norm,
    seen,
    out,
    b_row,
    b_context,
    stride,
    states,
    single,
    epsilon,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What heads have found, in `out` [T, groups · WIDTH], gated, and normed if there is a norm.

    The first `single` tokens may be rows' only ones: token b is row b's if that has a context, else
    padding or a prompt's. Of such rows it is said here that memories have been through the token:
    all that read it have ended.
    """
    token = tl.program_id(0)
    group = tl.program_id(1)
    j = tl.arange(0, BLOCK)
    some = j < WIDTH
    scale = 0.0
    if norm is not None:
        scale = tl.load(norm + group * WIDTH + j, mask=some, other=0.0).to(tl.float32)
    alone = token < single
    context = tl.load(b_context + token, mask=alone, other=0)
    state = tl.minimum(tl.load(b_row + token, mask=alone, other=0), states - 1).to(tl.int64)
    await_inputs(OVERLAP)
    place = out + (token.to(tl.int64) * tl.num_programs(1) + group) * WIDTH + j
    x = tl.load(place, mask=some, other=0.0)
    opened = gate + token.to(tl.int64) * stride + group * WIDTH + j
    opened = tl.load(opened, mask=some, other=0.0).to(tl.float32)
    opened = opened * tl.sigmoid(opened)
    wide = x.to(tl.float32)
    if norm is None:
        found = wide * opened
    else:
        if not NORM_FIRST:
            wide *= opened
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
        found = normed.to(x.dtype).to(tl.float32) * scale
        if NORM_FIRST:
            found = found.to(x.dtype).to(tl.float32) * opened
    tl.store(place, found.to(x.dtype), mask=some)
    h = tl.arange(0, BLOCK_H)
    kept = (h < HEADS) & (context > 0) & (group == 0)
    tl.store(seen + state * HEADS + h, context, mask=kept)
