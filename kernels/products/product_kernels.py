"""Products of few tokens with a weight, bound by reading it: every byte once, and nothing else.

Both kernels give a program BLOCK_N rows of the weight and let it walk along them: `multiply_add` in
ordinary arithmetic for a handful of tokens, and `matrix` on the matrix unit, tokens padded to
BLOCK_T. Around the product they can do what the model does next to it: norm its input
(`multiply_add` only), add a bias, apply the gate, add to the residual, also the other ranks' sums
(where WORLD is above 1; see `product_sums`).

The norm costs no pass of its own: x·w / rms(x) is linear in 1 / rms(x), so the sum of squares grows
along with the product and divides it in the end.

A weight of few rows would leave most of the device idle, or make its programs so narrow that they
read the input as often as the weight. So SPLITS programs of `matrix` may share the walk; their sums
go through memory to `add_partials`, which adds them in their order: results don't depend on timing.

A weight does not depend on the kernel before. So its first tile is loaded (`multiply_add`), and
AHEAD bytes more of every row are asked into the L2 cache, before waiting for that kernel
(`launch`): memory is busy while it drains.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import ask_lines, await_inputs
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit
from tokenpod.kernels.products.product_sums import add_ranks, number_launch


@launched
@triton.jit(do_not_specialize=["tokens"])
def multiply_add(
    x,
    weight,
    bias,
    norm_weight,
    y,
    x_stride,
    y_stride,
    tokens,
    n,
    k,
    epsilon,
    ranks,
    more,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    COPIES: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BULK: tl.constexpr,
    MORE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] = x [tokens, k] · weightᵀ; with ACTIVATION the weight is [2n, k], gates first.

    A product of each element is summed where it was made and across threads only once: a tile
    that spans all threads along k keeps the loop free of exchanges. The first tile of the weight is
    on its way before the input is there.

    MORE further rows are those of the one token's adapter (`more`, a `MoreRows`), whose outputs are
    written apart: a part's ranks after those of the part before.
    """
    # Axes: token, row, k. Everything is loaded with all three, so that nothing changes its layout.
    GATED: tl.constexpr = ACTIVATION != "none"
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)
    start_of_row = weight + own.to(tl.int64)[None, :, None] * k
    if MORE > 0:
        tl.static_assert(BLOCK_T == 1 and WORLD == 1 and not GATED)
        is_more = tl.program_id(0) >= tl.cdiv(n, BLOCK_N)
        rank = (tl.program_id(0) - tl.cdiv(n, BLOCK_N)) * BLOCK_N + tl.arange(0, BLOCK_N)
        start_of_row = tl.where(is_more, _row_of_adapter(more, rank), start_of_row)
    start_of_up = weight + (own + n).to(tl.int64)[None, :, None] * k
    i = tl.arange(0, BLOCK_K)[None, None, :]
    token = tl.arange(0, BLOCK_T)[:, None, None]
    at_x = x + token * x_stride
    sums = tl.zeros((BLOCK_T, BLOCK_N, BLOCK_K), tl.float32)
    up_sums = tl.zeros((BLOCK_T, BLOCK_N, BLOCK_K) if GATED else (1, 1, 1), tl.float32)
    squares = tl.zeros((BLOCK_T, 1, BLOCK_K) if NORM else (1, 1, 1), tl.float32)

    w = _weight_tile(start_of_row + i, i < k, EVEN)
    up = _weight_tile(start_of_up + i, i < k, EVEN) if GATED else w
    if BULK:
        first_row = tl.program_id(0) * BLOCK_N
        ask_rows(weight, first_row, n, BLOCK_K, k, BLOCK_N, AHEAD)
        if GATED:
            ask_rows(weight, first_row + n, 2 * n, BLOCK_K, k, BLOCK_N, AHEAD)
    else:
        _ask_ahead(start_of_row, BLOCK_K, k, AHEAD)
        if GATED:
            _ask_ahead(start_of_up, BLOCK_K, k, AHEAD)
    await_inputs(OVERLAP)
    if WORLD > 1:
        launch = number_launch(ranks, tokens, n, KIND, BLOCK_T, BLOCK_N, COPIES)
    v, squares = _input_tile(
        at_x, norm_weight, i, token < tokens, k, squares, NORM, EVEN, BLOCK_T == 1
    )
    sums += v * w.to(tl.float32)
    if GATED:
        up_sums += v * up.to(tl.float32)
    for start in tl.range(BLOCK_K, k, BLOCK_K, num_stages=STAGES):
        at = start + i
        w = _weight_tile(start_of_row + at, at < k, EVEN)
        if GATED:
            up = _weight_tile(start_of_up + at, at < k, EVEN)
        v, squares = _input_tile(
            at_x, norm_weight, at, token < tokens, k, squares, NORM, EVEN, BLOCK_T == 1
        )
        sums += v * w.to(tl.float32)
        if GATED:
            up_sums += v * up.to(tl.float32)

    token = tl.arange(0, BLOCK_T)
    out = tl.sum(sums, axis=2)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=2) / k + epsilon)
        out *= factor
    if MORE > 0:
        # Their places are behind those of y: a program writes one or the other.
        at_rank = tl.arange(0, 1)[:, None] + rank[None, :]
        tl.store(more.inner + at_rank, out, mask=(rank[None, :] < MORE) & is_more)
    if BIAS:
        out += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up_out = tl.sum(up_sums, axis=2)
        if NORM:
            up_out *= factor
        if BIAS:
            up_out += tl.load(bias + n + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
        out = gated_unit(_rounded(out, y), _rounded(up_out, y), ACTIVATION)
    if WORLD > 1:
        tl.static_assert(not GATED)
        add_ranks(ranks, out, launch, tokens, n, KIND, RANK, WORLD, BLOCK_T, BLOCK_N, COPIES)
    else:
        at_y = y + token[:, None] * y_stride + row[None, :]
        _write(at_y, out, (token[:, None] < tokens) & (row[None, :] < n), ADD)


@launched
@triton.jit(do_not_specialize=["tokens"])
def matrix(
    x,
    weight,
    bias,
    y,
    x_stride,
    y_stride,
    tokens,
    n,
    k,
    ranks,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    COPIES: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BULK: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `multiply_add`, without the norm. The weight is the left factor: its rows are many."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)
    start_of_row = weight + own.to(tl.int64) * k
    start_of_up = weight + (own + n).to(tl.int64) * k
    GATED: tl.constexpr = ACTIVATION != "none"
    length = k
    start = 0
    if SPLITS > 1:
        length = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
        start = tl.program_id(1) * length
    end = tl.minimum(start + length, k)
    if BULK:
        first_row = tl.program_id(0) * BLOCK_N
        ask_rows(weight, first_row, n, start, k, BLOCK_N, AHEAD)
        if GATED:
            ask_rows(weight, first_row + n, 2 * n, start, k, BLOCK_N, AHEAD)
    else:
        _ask_ahead(start_of_row, start, k, AHEAD)
        if GATED:
            _ask_ahead(start_of_up, start, k, AHEAD)
    await_inputs(OVERLAP)
    if WORLD > 1:
        launch = number_launch(ranks, tokens, n, KIND, BLOCK_T, BLOCK_N, COPIES)

    token = tl.arange(0, BLOCK_T)
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for at in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        i = at + tl.arange(0, BLOCK_K)
        w = _weight_tile(start_of_row[:, None] + i[None, :], i[None, :] < k, EVEN)
        is_x = (token[None, :] < tokens) & ((i[:, None] < k) | EVEN)
        v = tl.load(x + token[None, :] * x_stride + i[:, None], mask=is_x, other=0.0)
        sums = tl.dot(w, v, sums, input_precision="ieee")
        if GATED:
            up = _weight_tile(start_of_up[:, None] + i[None, :], i[None, :] < k, EVEN)
            up_sums = tl.dot(up, v, up_sums, input_precision="ieee")

    out = sums
    if SPLITS > 1:
        # A partial sum: `add_partials` does the rest.
        y += tl.program_id(1).to(tl.int64) * tokens * n
    elif BIAS:
        out += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        tl.static_assert(SPLITS == 1)
        if BIAS:
            up_sums += tl.load(bias + n + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
        out = gated_unit(_rounded(out, y), _rounded(up_sums, y), ACTIVATION)
    if WORLD > 1:
        tl.static_assert(SPLITS == 1 and not GATED)
        out = tl.trans(out)
        add_ranks(ranks, out, launch, tokens, n, KIND, RANK, WORLD, BLOCK_T, BLOCK_N, COPIES)
    else:
        at_y = y + token[None, :] * y_stride + row[:, None]
        _write(at_y, out, (token[None, :] < tokens) & (row[:, None] < n), ADD)


@launched
@triton.jit(do_not_specialize=["tokens"])
def tiled(
    x,
    weight,
    bias,
    y,
    x_stride,
    y_stride,
    tokens,
    n,
    k,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BESIDE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `matrix`, of any number of tokens: a program has BLOCK_T of them.

    Where DESCRIBED, x and the weight are descriptors of blocks that the tensor memory engine
    fetches. Programs that run at a time share what they read: BESIDE blocks of tokens follow each
    other along the same rows of the weight.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    blocks, at = tl.cdiv(tokens, BLOCK_T), tl.program_id(0)
    across = BESIDE * tl.cdiv(n, BLOCK_N)
    first = at // across * BESIDE
    beside = tl.minimum(blocks - first, BESIDE)
    first_token = (first + at % across % beside) * BLOCK_T
    first_row = at % across // beside * BLOCK_N
    token = first_token + tl.arange(0, BLOCK_T)
    row = first_row + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1).to(tl.int64)

    sums = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    up_sums = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    await_inputs(OVERLAP)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        if DESCRIBED:
            v = x.load([first_token, start])
            w = weight.load([first_row, start])
        else:
            i = start + tl.arange(0, BLOCK_K)
            inside = (i < k)[None, :] | EVEN
            at_x = x + token.to(tl.int64)[:, None] * x_stride + i[None, :]
            v = tl.load(at_x, mask=(token < tokens)[:, None] & inside, other=0.0)
            w = tl.load(weight + own[:, None] * k + i[None, :], mask=inside, other=0.0)
        sums = tl.dot(v, tl.trans(w), sums, input_precision="ieee")
        if GATED:
            if DESCRIBED:
                up = weight.load([n + first_row, start])
            else:
                up = tl.load(weight + (n + own)[:, None] * k + i[None, :], mask=inside, other=0.0)
            up_sums = tl.dot(v, tl.trans(up), up_sums, input_precision="ieee")

    out = sums
    if BIAS:
        out += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up_sums += tl.load(bias + n + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
        out = gated_unit(_rounded(out, y), _rounded(up_sums, y), ACTIVATION)
    at_y = y + token.to(tl.int64)[:, None] * y_stride + row[None, :]
    _write(at_y, out, (token[:, None] < tokens) & (row[None, :] < n), ADD)


@launched
@triton.jit(do_not_specialize=["tokens"])
def add_partials(
    partials,
    bias,
    y,
    y_stride,
    tokens,
    n,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] (+)= bias + partials [SPLITS, tokens, n] float32, summed in their order."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        out += tl.load(bias + i, mask=i < n, other=0.0).to(tl.float32)
    await_inputs(OVERLAP)
    for split in tl.static_range(SPLITS):
        at = (tokens * split + token) * n + i
        out += tl.load(partials + at, mask=i < n, other=0.0)
    _write(y + token * y_stride + i, out, i < n, ADD)


@triton.jit
def _row_of_adapter(more, rank):
    """Where a rank's row of the first factor begins; of one beyond the adapter's, its last."""
    slot = tl.load(more.t_adapter)
    own = tl.load(more.ranks + tl.maximum(slot - 1, 0))
    part, rank = rank // more.width, tl.minimum(rank % more.width, tl.maximum(own - 1, 0))
    part = tl.minimum(part, more.parts - 1)
    start = more.down + tl.maximum(slot - 1, 0).to(tl.int64) * more.slot_stride
    return start + (part * more.part_stride + rank * more.rank_stride)[None, :, None]


@triton.jit
def _weight_tile(at, inside, EVEN: tl.constexpr):
    """Weights are read once: let them make room for what is read again."""
    if EVEN:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _input_tile(
    at_x,
    norm_weight,
    i,
    is_token,
    k,
    squares,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
    FULL: tl.constexpr,
):
    """Elements i of the input, float32, times the norm's weight; its squares are added up."""
    if EVEN and FULL:
        v = tl.load(at_x + i).to(tl.float32)
    else:
        v = tl.load(at_x + i, mask=is_token & (i < k), other=0.0).to(tl.float32)
    if NORM:
        squares += v * v
        if EVEN:
            v *= tl.load(norm_weight + i).to(tl.float32)
        else:
            v *= tl.load(norm_weight + i, mask=i < k, other=0.0).to(tl.float32)
    return v, squares


@triton.jit
def _rounded(sums, y):
    """As numbers of y: what a gate meets is the same whether it was stored between or not."""
    return sums.to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def _write(at, out, inside, ADD: tl.constexpr):
    """Round; or round, add to what is there and round again, as a sum of two tensors would."""
    out = out.to(at.dtype.element_ty)
    if ADD:
        out = out.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, out.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _ask_ahead(start_of_row, first, k, AHEAD: tl.constexpr):
    """Prefetch AHEAD bytes of every row, from element `first`, into the L2 cache, line by line."""
    if AHEAD > 0:
        LINE: tl.constexpr = 128
        BYTES: tl.constexpr = start_of_row.dtype.element_ty.primitive_bitwidth // 8
        i = first + tl.arange(0, AHEAD // LINE) * (LINE // BYTES)
        rows = tl.reshape(start_of_row, (start_of_row.numel, 1))
        ask_lines(rows + tl.minimum(i, k - 1)[None, :])


@triton.jit
def ask_each(at, count, step, size):
    """Ask for `size` bytes every `step` bytes, so many times: a thread asks for each."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred own;
        .reg .u32 thread;
        .reg .u64 at;
        mov.u32 thread, %tid.x;
        setp.lt.s32 own, thread, $2;
        mad.wide.u32 at, thread, $3, $1;
        @own cp.async.bulk.prefetch.L2.global [at], $4;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r",
        [at, count, step, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_rows(weight, row, rows, first, k, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch AHEAD bytes, from element `first`, of BLOCK_N rows into the L2 cache, row by row.

    A thread asks for each row, so at most as many rows as threads. Addresses and sizes are
    multiples of 16 bytes.
    """
    if AHEAD > 0:
        BYTES: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        size = tl.minimum(AHEAD, (k - first) * BYTES)
        asked = tl.where(size > 0, tl.minimum(BLOCK_N, rows - row), 0)
        ask_each(weight + row.to(tl.int64) * k + first, asked, k * BYTES, size)
