"""The products of all experts as one launch, whoever chose whom.

An expert's assignments are cut into blocks of BLOCK_T. How many blocks there are is known on the
device only, but it has a bound, so the grid has its size and what is surplus does nothing. Each
program finds its block in the table of `expert_routing.Assignments` by itself.

Of the weights, only experts' that were chosen are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit
from tokenpod.kernels.products.quantised.stored import row_scales, walk_stored

#: Outputs of the sum that one program makes.
SUM_BLOCK = 1024


def most_blocks(assignments: int, experts: int, block_t: int) -> int:
    """Blocks that so many assignments can make: most if as many experts as can be have one each."""
    chosen = min(assignments, experts)
    return chosen + (assignments - chosen) // block_t


@triton.jit(do_not_specialize=["assignments", "blocks"])
def product(
    x,
    x_scale,
    weight,
    scale,
    zero,
    table,
    bias,
    y,
    order,
    start,
    assignments,
    blocks,
    experts,
    n,
    k,
    row_bytes,
    columns,
    scale_rows,
    their_columns,
    KIND: tl.constexpr,
    ROUNDED: tl.constexpr,
    PLANES: tl.constexpr,
    PER_GROUP: tl.constexpr,
    PER_THEIR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """With ACTIVATION from tokens to the table's order, else from there to assignments' own order.

    Gated: x [T, k], weight [E, 2n, k], gates first, y [T · K, n]. Else x [T · K, k], weight
    [E, n, k], y [T · K, n]. The weight is the left factor: its rows are many. The bias, if there is
    one, has the weight's rows. Of KIND "dense" the weight is numbers; else bytes, rows below each
    other, which `walk_stored` reads in runs of BLOCK_K inputs: the arguments between are its own.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    block, row_block = _swizzled(tl.program_id(0), blocks, tl.cdiv(n, BLOCK_N), GROUP)
    row = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1).to(tl.int64)
    await_inputs(OVERLAP)
    expert, first, end = _block(start, assignments, experts, block, EXPERTS, BLOCK_T)
    if first < end:
        position = first + tl.arange(0, BLOCK_T)
        is_own = position < end
        assignment = tl.load(order + position, mask=is_own, other=0)
        source = assignment // PER_TOKEN if GATED else position
        at_x = x + source.to(tl.int64) * k
        of_expert = expert.to(tl.int64) * n * (2 if GATED else 1)
        if KIND == "dense":
            at_w = weight + (of_expert + own) * k
            at_up = weight + (of_expert + own + n) * k
            sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            up_sums = tl.zeros((BLOCK_N, BLOCK_T) if GATED else (1, 1), tl.float32)
            for start_k in tl.range(0, k, BLOCK_K, num_stages=STAGES):
                i = start_k + tl.arange(0, BLOCK_K)
                w = load_tile(at_w[:, None] + i[None, :], i[None, :] < k, EVEN)
                is_x = is_own[None, :] & ((i[:, None] < k) | EVEN)
                v = tl.load(at_x[None, :] + i[:, None], mask=is_x, other=0.0)
                sums = tl.dot(w, v, sums, input_precision="ieee")
                if GATED:
                    up = load_tile(at_up[:, None] + i[None, :], i[None, :] < k, EVEN)
                    up_sums = tl.dot(up, v, up_sums, input_precision="ieee")
        else:
            s_at = (of_expert + own) // scale_rows * columns
            up_at = (of_expert + own + n) // scale_rows * columns
            sums, up_sums = walk_stored(
                at_x,
                is_own,
                weight + (of_expert + own) * row_bytes,
                weight + (of_expert + own + n) * row_bytes,
                x_scale + source * their_columns,
                scale,
                zero,
                table,
                s_at,
                up_at,
                0,
                tl.cdiv(k, PLANES * BLOCK_K),
                k,
                columns,
                their_columns,
                KIND,
                ROUNDED,
                GATED,
                x.dtype.element_ty,
                PLANES,
                BLOCK_K,
                PER_GROUP,
                PER_THEIR,
                EVEN,
                ASSEMBLY,
                STAGES,
                BLOCK_N,
                BLOCK_T,
            )
            sums = sums.to(tl.float32) * row_scales(scale, s_at, PER_GROUP)
            if GATED:
                up_sums = up_sums.to(tl.float32) * row_scales(scale, up_at, PER_GROUP)
            if ROUNDED and PER_THEIR == 0:
                theirs = tl.load(x_scale + source, mask=is_own, other=0.0)[None, :]
                sums *= theirs
                if GATED:
                    up_sums *= theirs
        if bias is not None:
            of_bias = bias + expert.to(tl.int64) * n * (2 if GATED else 1) + own
            sums += tl.load(of_bias).to(tl.float32)[:, None]
            if GATED:
                up_sums += tl.load(of_bias + n).to(tl.float32)[:, None]
        if GATED:
            sums = gated_unit(sums, up_sums, ACTIVATION)
        target = position if GATED else assignment
        at_y = y + target.to(tl.int64)[None, :] * n + row[:, None]
        tl.store(at_y, sums.to(y.dtype.element_ty), mask=is_own[None, :] & (row[:, None] < n))


@triton.jit
def weighted_sum(
    x,
    scale,
    residual,
    residual_stride,
    n,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Residual [T, n] += Σ scale [T, K] · x [T, K, n] over K, in order, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(PER_TOKEN):
        one = tl.load(x + (token * PER_TOKEN + place) * n + i, mask=i < n, other=0.0)
        total += tl.load(scale + token * PER_TOKEN + place) * one.to(tl.float32)
    at = residual + token * residual_stride + i
    total += tl.load(at, mask=i < n, other=0.0).to(tl.float32)
    tl.store(at, total.to(residual.dtype.element_ty), mask=i < n)


@triton.jit
def _swizzled(program, blocks, row_blocks, GROUP: tl.constexpr):
    """Block and row block of a program: those of GROUP blocks run together, to meet in the cache.

    Neighbouring blocks are mostly of one expert and read the same rows of its weight.
    """
    of_group = program % (GROUP * row_blocks)
    first = program // (GROUP * row_blocks) * GROUP
    size = tl.minimum(blocks - first, GROUP)
    return first + of_group % size, of_group // size


@triton.jit
def _block(start, assignments, experts, block, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """The expert of a block and the positions in the table from `first` to `end`; none: both 0."""
    expert = tl.arange(0, EXPERTS)
    first = tl.load(start + expert, mask=expert < experts, other=assignments)
    end = tl.load(start + expert + 1, mask=expert + 1 < experts, other=assignments)
    blocks = tl.cdiv(end - first, BLOCK_T)
    last = tl.cumsum(blocks, axis=0)
    found = tl.sum((last <= block).to(tl.int32), axis=0)
    is_it = expert == found
    skipped = (block - last + blocks) * BLOCK_T
    return (
        found,
        tl.sum(tl.where(is_it, first + skipped, 0), axis=0),
        tl.sum(tl.where(is_it, end, 0), axis=0),
    )


@triton.jit
def load_tile(at, inside, EVEN: tl.constexpr):
    """Numbers at `at`, zeros where not inside; EVEN: all are."""
    if EVEN:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=inside, other=0.0)
    return tile
