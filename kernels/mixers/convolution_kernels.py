"""The convolution of each channel over a row's last tokens, on a GPU.

What a channel's input is: what the token says; or, of a token that says what it lets in, what it
lets out and values, GATED, values times what is let in. What comes out is then multiplied by what
is let out.

A chunk is [first token, tokens, position of the first, and of a row's first chunk the tokens of the
row]; chunks of no tokens are padding. Where some of a row's tokens are drafts, that is less than 0.
Rings have RING places for each of a row's `pitch / RING` numbers, of which channels are the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.gpu.launcher import launched

#: Numbers that say what a chunk is.
FIELDS: tl.constexpr = tl.constexpr(4)


@triton.jit
def load_input(at, channel, some, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """The inputs of channels, rounded as the tensor is; `at` points to what tokens say."""
    x = tl.load(at + channel, mask=some, other=0.0)
    if GATED:
        value = tl.load(at + 2 * CHANNELS + channel, mask=some, other=0.0)
        x = (x.to(tl.float32) * value.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def finished(total, at, channel, some, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """What a convolution says, from its sum [..., channels] float32: rounded by who stores it."""
    if GATED:
        opened = tl.load(at + CHANNELS + channel, mask=some, other=0.0)
        return total.to(opened.dtype).to(tl.float32) * opened.to(tl.float32)
    return total * tl.sigmoid(total)


@launched
@triton.jit
def convolve_rows(
    mixed,
    conv,
    bias,
    inputs,
    made,
    b_row,
    b_context,
    stride,
    states,
    pitch,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Made [B, channels] of one token of each row; zeros of a row of context 0, which is padding.

    Row b's token is token b.
    """
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = channel < CHANNELS
    state = tl.minimum(tl.load(b_row + row), states - 1).to(tl.int64)
    context = tl.load(b_context + row)
    live = context > 0
    ring = inputs + state * pitch + channel * RING
    total = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=some, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        place = (context + RING - WIDTH + tap) % RING
        x = tl.load(ring + place, mask=some & live, other=0.0).to(tl.float32)
        total += x * tl.load(conv + channel * WIDTH + tap, mask=some, other=0.0).to(tl.float32)
    last = tl.load(conv + channel * WIDTH + WIDTH - 1, mask=some, other=0.0).to(tl.float32)
    await_inputs(OVERLAP)
    at = mixed + row.to(tl.int64) * stride
    own = load_input(at, channel, some & live, CHANNELS, GATED)
    total += own.to(tl.float32) * last
    total = finished(total, at, channel, some & live, CHANNELS, GATED)
    total = tl.where(live, total, 0.0)
    tl.store(
        made + row.to(tl.int64) * CHANNELS + channel, total.to(made.dtype.element_ty), mask=some
    )
    # The other places of the ring are read, this one is not.
    tl.store(ring + (context + RING - 1) % RING, own, mask=some & live)


@launched
@triton.jit
def convolve_chunks(
    mixed,
    conv,
    bias,
    inputs,
    made,
    chunks,
    t_row,
    stride,
    pitch,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Made [T, channels] of chunks; rings stay, because other chunks still read them."""
    chunk = chunks + tl.program_id(0) * FIELDS
    first, count, position = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    t = tl.arange(0, CHUNK)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = channel < CHANNELS
    await_inputs(OVERLAP)
    if count > 0:
        row = tl.load(t_row + first)
        ring = inputs + row * pitch
        token = (first + t).to(tl.int64)
        total = tl.zeros((CHUNK, BLOCK), tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=some, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            back = WIDTH - 1 - tap
            source = token - back
            # A row's tokens lie together: who is of another row is before the row's first.
            own = (t < count) & (source >= 0)
            own &= tl.load(t_row + source, mask=own, other=-1) == row
            x = load_input(
                mixed + source[:, None] * stride,
                channel[None, :],
                own[:, None] & some[None, :],
                CHANNELS,
                GATED,
            )
            if tap < WIDTH - 1:
                at = position + t - back
                kept = (t < count) & (own == 0) & (at >= 0)
                x += tl.load(
                    ring + channel[None, :] * RING + ((at + RING) % RING)[:, None],
                    mask=kept[:, None] & some[None, :],
                    other=0.0,
                )
            weight = tl.load(conv + channel * WIDTH + tap, mask=some, other=0.0)
            total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
        inside = (t < count)[:, None] & some[None, :]
        said = mixed + token[:, None] * stride
        total = finished(total, said, channel[None, :], inside, CHANNELS, GATED)
        tl.store(
            made + token[:, None] * CHANNELS + channel[None, :],
            total.to(made.dtype.element_ty),
            mask=inside,
        )


@launched
@triton.jit
def keep_inputs(
    mixed,
    inputs,
    chunks,
    t_row,
    stride,
    pitch,
    CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The rings of rows whose first chunks these are get their last inputs."""
    chunk = chunks + tl.program_id(0) * FIELDS
    first, position, count = tl.load(chunk), tl.load(chunk + 2), tl.abs(tl.load(chunk + 3))
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = channel < CHANNELS
    await_inputs(OVERLAP)
    if count > 0:
        ring = inputs + tl.load(t_row + first) * pitch + channel * RING
        for back in range(0, RING):
            last = count - 1 - back
            there = some & (last >= 0)
            at = mixed + (first + last).to(tl.int64) * stride
            own = load_input(at, channel, there, CHANNELS, GATED)
            tl.store(ring + (position + last + RING) % RING, own, mask=there)
