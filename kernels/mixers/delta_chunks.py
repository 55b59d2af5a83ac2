"""Rows of several tokens through a gated delta net, in chunks.

What each token of a chunk writes depends on what those before it wrote. With the WY representation
(Yang, Kautz and Hatamizadeh 2024; Yang et al., "Parallelizing Linear Transformers with the Delta
Rule", 2024) that is a triangular system, which all chunks solve at once; what is left from chunk to
chunk are products. Within a chunk, G is the sum of logarithms of decays up to a token:

    N[i, j] = share[i] · (k[i] · k[j]) · exp(G[i] - G[j])      for j < i
    u, w    = (I + N)⁻¹ (share · v), (I + N)⁻¹ (share · exp(G) · k)
    written = u - w · S
    found   = exp(G) · q · S + (q · kᵀ · exp(G[i] - G[j]), j ≤ i) · written
    S       = exp(G_last) · S + (k · exp(G_last - G))ᵀ · written

Where each number of a key decays by itself, so has G numbers, and decays are factors within the
products of keys: `alike_left`.

What a chunk is, `convolution_kernels` says. Where a row has drafts its memory stays as it was, and
the ring keeps what it may have to go through.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.mixers.convolution_kernels import FIELDS
from tokenpod.kernels.mixers.delta_step import gated_norm, log_decay, unit


@triton.jit
def alike_left(
    x,
    k,
    fall,
    TYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x[i] · (k[j] · exp(G[i] - G[j])) for j < i [CHUNK, CHUNK]; all [CHUNK, BLOCK_K] float32.

    exp(-G) alone may be too large, so an x and a k meet in between: of blocks of 2, 4, 8 ... tokens
    (CHUNK is 2 to the power of LEVELS) those of the second half meet keys of the first at its last
    token. No exponent is above 0. Products are made of numbers of a TYPE.
    """
    t = tl.arange(0, CHUNK)
    found = tl.zeros((CHUNK, CHUNK), tl.float32)
    for level in tl.static_range(LEVELS):
        half = 1 << level
        block = t // (2 * half)
        second = (t % (2 * half) >= half)[:, None]
        at = (block * (2 * half) + half - 1)[:, None] + tl.zeros((CHUNK, BLOCK_K), tl.int32)
        middle = tl.gather(fall, at, 0)
        apart = tl.exp(tl.where(second, fall - middle, middle - fall))
        later = tl.where(second, x * apart, 0.0).to(TYPE)
        kept = tl.where(second, 0.0, k * apart).to(TYPE)
        met = tl.dot(later, tl.trans(kept), input_precision=PRECISION)
        found += tl.where(block[:, None] == block[None, :], met, 0.0)
    return found


@launched
@triton.jit
def solve_chunks(
    made,
    write,
    decay,
    log_rate,
    shift,
    seen,
    chunks,
    t_row,
    u,
    w,
    fallen,
    alike,
    stride,
    decay_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """u [T, H, value_dim] and w [T, H, key_dim] of all chunks, and G [T, H, DECAYS] float32.

    Of several decays also what queries have in common with keys [T, H, CHUNK], which takes as much
    as it does for keys.
    """
    chunk = chunks + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    first, count, position = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    rate = tl.load(log_rate + head)
    await_inputs(OVERLAP)
    if count > 0:
        t = tl.arange(0, CHUNK)
        i, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        some = t < count
        token = (first + t).to(tl.int64)
        at = token * VALUE_HEADS + head
        key = KEY_HEADS * KEY_DIM + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        some_k = some[:, None] & (i < KEY_DIM)[None, :]
        some_v = some[:, None] & (j < VALUE_DIM)[None, :]
        k = tl.load(made + token[:, None] * channels + key + i[None, :], mask=some_k, other=0.0)
        v = tl.load(made + token[:, None] * channels + value + j[None, :], mask=some_v, other=0.0)
        # A memory that has been through a position neither decays nor is written.
        through = tl.load(seen + tl.load(t_row + first) * VALUE_HEADS + head)
        fresh = some & (position + t >= through)
        share = tl.load(write + token * stride + head, mask=some, other=0.0)
        share = tl.where(fresh, tl.sigmoid(share.to(tl.float32)), 0.0)
        wide = unit(k.to(tl.float32))
        k = wide.to(k.dtype)
        # [j, i], so that a row of N lies along the axis that sums run over.
        later = t[:, None] < t[None, :]
        if DECAYS == 1:
            fall = tl.load(decay + token * decay_stride + head, mask=some, other=0.0)
            fall = log_decay(fall.to(tl.float32), rate, tl.load(shift + head))
            fall = tl.cumsum(tl.where(fresh, fall, 0.0), 0)
            tl.store(fallen + at, fall, mask=some)
            met = tl.dot(k, tl.trans(k), input_precision=PRECISION)
            met *= tl.exp(tl.where(later, fall[None, :] - fall[:, None], 0.0))
            fall = fall[:, None]
        else:
            decays = head * DECAYS + i
            shifted = tl.load(shift + decays, mask=i < DECAYS, other=0.0)
            fall_at = decay + token[:, None] * decay_stride + decays[None, :]
            fall = tl.load(fall_at, mask=some_k, other=0.0).to(tl.float32)
            fall = log_decay(fall, rate, shifted[None, :])
            fall = tl.cumsum(tl.where(fresh[:, None] & some_k, fall, 0.0), 0)
            tl.store(fallen + at[:, None] * DECAYS + i[None, :], fall, mask=some_k)
            met = alike_left(wide, wide, fall, k.dtype, CHUNK, BLOCK_K, LEVELS, PRECISION)
            met = tl.trans(met)
            query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
            q_at = made + token[:, None] * channels + query + i[None, :]
            q = unit(tl.load(q_at, mask=some_k, other=0.0).to(tl.float32)) * (KEY_DIM**-0.5)
            asked = alike_left(q, wide, fall, k.dtype, CHUNK, BLOCK_K, LEVELS, PRECISION)
            asked += tl.where(t[:, None] == t[None, :], tl.sum(q * wide, 1)[:, None], 0.0)
            tl.store(
                alike + at[:, None] * CHUNK + t[None, :],
                asked.to(alike.dtype.element_ty),
                mask=some[:, None],
            )
        turned = tl.where(later, met * share[None, :], 0.0)
        solved = (t[:, None] == t[None, :]).to(tl.float32)
        for at_row in range(1, count):
            factors = tl.sum(tl.where(t[None, :] == at_row, turned, 0.0), 1)
            known = tl.sum(factors[:, None] * solved, 0)
            solved -= tl.where(t[:, None] == at_row, known[None, :], 0.0)
        solved = solved.to(k.dtype)
        shared_v = (v.to(tl.float32) * share[:, None]).to(v.dtype)
        shared_k = (wide * share[:, None] * tl.exp(fall)).to(k.dtype)
        tl.store(
            u + at[:, None] * VALUE_DIM + j[None, :],
            tl.dot(solved, shared_v, input_precision=PRECISION).to(u.dtype.element_ty),
            mask=some_v,
        )
        tl.store(
            w + at[:, None] * KEY_DIM + i[None, :],
            tl.dot(solved, shared_k, input_precision=PRECISION).to(w.dtype.element_ty),
            mask=some_k,
        )


@launched
@triton.jit
def scan_chunks(
    mixed,
    write,
    decay,
    made,
    u,
    w,
    fallen,
    alike,
    inputs,
    memory,
    seen,
    found,
    chunks,
    t_row,
    stride,
    decay_stride,
    pitch,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What heads find [T, H, value_dim], and rows' states behind their last tokens.

    A program walks along a row with some of the values of one head. Only the first chunks of rows
    have work here; they are listed first.
    """
    chunk = chunks + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    block = tl.program_id(2)
    first, position, signed = tl.load(chunk), tl.load(chunk + 2), tl.load(chunk + 3)
    count = tl.abs(signed)
    await_inputs(OVERLAP)
    if count > 0:
        row = tl.load(t_row + first)
        t = tl.arange(0, CHUNK)
        i, j = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
        query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        key = KEY_HEADS * KEY_DIM + query
        value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        state = row * VALUE_HEADS + head
        held = memory + (state * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
        some_held = (i < KEY_DIM)[:, None] & (j < VALUE_DIM)[None, :]
        kept = tl.load(held, mask=some_held, other=0.0)
        for start in tl.range(0, count, CHUNK, num_stages=STAGES):
            some = t < count - start
            token = (first + start + t).to(tl.int64)
            at = token * VALUE_HEADS + head
            some_k = some[:, None] & (i < KEY_DIM)[None, :]
            some_v = some[:, None] & (j < VALUE_DIM)[None, :]
            made_at = made + token[:, None] * channels + i[None, :]
            q = tl.load(made_at + query, mask=some_k, other=0.0)
            k = tl.load(made_at + key, mask=some_k, other=0.0)
            own_w = tl.load(w + at[:, None] * KEY_DIM + i[None, :], mask=some_k, other=0.0)
            own_u = tl.load(u + at[:, None] * VALUE_DIM + j[None, :], mask=some_v, other=0.0)
            last = tl.minimum(count - start, CHUNK) - 1
            wide_q = unit(q.to(tl.float32)) * (KEY_DIM**-0.5)
            wide_k = unit(k.to(tl.float32))
            narrow = kept.to(q.dtype)
            written = own_u.to(tl.float32) - tl.dot(own_w, narrow, input_precision=PRECISION)
            written = tl.where(some[:, None], written, 0.0).to(q.dtype)
            if DECAYS == 1:
                fall = tl.load(fallen + at, mask=some, other=0.0)
                whole = tl.sum(tl.where(t == last, fall, 0.0))
                earlier = (t[:, None] >= t[None, :]) & some[:, None]
                between = tl.exp(tl.where(earlier, fall[:, None] - fall[None, :], 0.0))
                asked = tl.dot(
                    wide_q.to(q.dtype), tl.trans(wide_k.to(q.dtype)), input_precision=PRECISION
                )
                asked = tl.where(earlier, asked * between, 0.0).to(q.dtype)
                fall, to_end, ending = fall[:, None], (whole - fall)[:, None], tl.exp(whole)
            else:
                fall_at = fallen + at[:, None] * DECAYS + i[None, :]
                fall = tl.load(fall_at, mask=some_k, other=0.0)
                last_at = (
                    fallen + ((first + start + last).to(tl.int64) * VALUE_HEADS + head) * DECAYS
                )
                whole = tl.load(last_at + i, mask=i < DECAYS, other=0.0)
                asked_at = alike + at[:, None] * CHUNK + t[None, :]
                asked = tl.load(asked_at, mask=some[:, None], other=0.0)
                to_end, ending = whole[None, :] - fall, tl.exp(whole)[:, None]
            since = (wide_q * tl.exp(fall)).to(q.dtype)
            heard = tl.dot(since, narrow, input_precision=PRECISION)
            heard += tl.dot(asked, written, input_precision=PRECISION)
            tl.store(
                found + at[:, None] * VALUE_DIM + j[None, :],
                heard.to(found.dtype.element_ty),
                mask=some_v,
            )
            rest = (wide_k * tl.where(some[:, None], tl.exp(to_end), 0.0)).to(q.dtype)
            kept = kept * ending + tl.dot(tl.trans(rest), written, input_precision=PRECISION)
        tl.store(held, kept, mask=some_held & (signed > 0))
        if block == 0:
            end = position + count
            through = tl.maximum(tl.load(seen + state), position)
            tl.store(seen + state, tl.where(signed > 0, end, through))
            # The ring gets the row's last inputs; the convolution has been made of the old ones.
            ring = inputs + row * pitch
            for back in range(0, RING):
                at_end = count - 1 - back
                own = mixed + (first + at_end).to(tl.int64) * stride
                place = (end - 1 - back + RING) % RING
                there = at_end >= 0
                if RING > WIDTH:
                    said = (first + at_end).to(tl.int64)
                    own_write = tl.load(write + said * stride + head, mask=there, other=0.0)
                    tl.store(ring + (channels + head) * RING + place, own_write, mask=there)
                    keep_input(
                        ring + (channels + VALUE_HEADS) * RING,
                        decay + said * decay_stride,
                        head * DECAYS + i,
                        place,
                        (i < DECAYS) & there,
                        RING,
                    )
                if head % (VALUE_HEADS // KEY_HEADS) == 0:
                    some_q = (i < KEY_DIM) & there
                    keep_input(ring, own, query + i, place, some_q, RING)
                    keep_input(ring, own, key + i, place, some_q, RING)
                for part in tl.static_range((VALUE_DIM + BLOCK_V - 1) // BLOCK_V):
                    n = part * BLOCK_V + tl.arange(0, BLOCK_V)
                    keep_input(ring, own, value + n, place, (n < VALUE_DIM) & there, RING)


@triton.jit
def keep_input(ring, own, channel, place, some, RING: tl.constexpr):
    """A token's inputs of channels [n] into the ring."""
    tl.store(ring + channel * RING + place, tl.load(own + channel, mask=some, other=0.0), mask=some)


@launched
@triton.jit
def norm_chunks(
    gate,
    norm,
    out,
    chunks,
    stride,
    epsilon,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIGMOID: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What heads have found, in `out` [T, H · value_dim], normed and gated."""
    chunk = chunks + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    first, count = tl.load(chunk), tl.load(chunk + 1)
    t, j = tl.arange(0, CHUNK), tl.arange(0, BLOCK_V)
    scale = tl.load(norm + j, mask=j < VALUE_DIM, other=0.0)
    await_inputs(OVERLAP)
    if count > 0:
        token = (first + t).to(tl.int64)
        some = (t < count)[:, None] & (j < VALUE_DIM)[None, :]
        place = (token[:, None] * VALUE_HEADS + head) * VALUE_DIM + j[None, :]
        own = tl.load(out + place, mask=some, other=0.0)
        opened = gate + token[:, None] * stride + head * VALUE_DIM + j[None, :]
        opened = tl.load(opened, mask=some, other=0.0)
        normed = gated_norm(own, opened, scale, epsilon, VALUE_DIM, SIGMOID)
        tl.store(out + place, normed, mask=some)
