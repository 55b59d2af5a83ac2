"""The products of all experts as one launch, whoever chose whom, and the sum of what they make.

An expert's assignments are cut into blocks of BLOCK_T. How many blocks there are is known on the
device only, but it has a bound, so the grid has its size and what is surplus does nothing. Each
program finds its block in the table of `expert_routing.Assignments` by itself.

Of the weights, only experts' that were chosen are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.experts.expert_walks import byte_sums, dense_sums, lane_sums
from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.pointwise.triton_pointwise import activated, gated_unit

#: Outputs of the sum that one program makes.
SUM_BLOCK = 1024
#: Rows of a tile that are gates, then as many that these open, and so on: so far apart, both are in
#: the registers of one thread, where the matrix unit leaves its sums.
APART: tl.constexpr = tl.constexpr(8)


def most_blocks(assignments: int, experts: int, block_t: int) -> int:
    """Blocks that so many assignments can make: most if as many experts as can be have one each."""
    chosen = min(assignments, experts)
    return chosen + (assignments - chosen) // block_t


@launched
@triton.jit(do_not_specialize=["assignments", "blocks", "their_tokens"])
def product(
    x,
    x_scale,
    weight,
    scale,
    bias,
    y,
    order,
    start,
    assignments,
    blocks,
    experts,
    n,
    k,
    columns,
    scale_rows,
    their_columns,
    their_tokens,
    FORM: tl.constexpr,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALES_APART: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr,
    SHARED: tl.constexpr,
    PER_GROUP: tl.constexpr,
    PER_THEIR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATES: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """With ACTIVATION from tokens to the table's order, else from there to assignments' own order.

    x [T, k], else [T · K, k]; weight [E, GATES · n, k], of GATES = 2 gates first; y [T · K, n]. The
    bias, if there is one, has the weight's rows. FORM is "dense", "lanes" or "bytes":
    `expert_walks` has what they need, in steps of BLOCK_K inputs.
    """
    block, row_block = _swizzled(tl.program_id(0), blocks, tl.cdiv(n, BLOCK_N), GROUP)
    tile_row = tl.arange(0, GATES * BLOCK_N)
    row, half = tile_row, 0
    if GATES == 2:
        row = tile_row // (2 * APART) * APART + tile_row % APART
        half = tile_row // APART % 2
    await_inputs(OVERLAP)
    expert, first, end = _block(start, assignments, experts, block, EXPERTS, BLOCK_T)
    if first < end:
        position = first + tl.arange(0, BLOCK_T)
        is_own = position < end
        assignment = tl.load(order + position, mask=is_own, other=0)
        source = assignment // PER_TOKEN if ACTIVATION != "none" else position
        at_x = x + source.to(tl.int64) * k
        own = expert.to(tl.int64) * (GATES * n) + half * n
        own += tl.minimum(row_block * BLOCK_N + row, n - 1)
        if FORM == "dense":
            sums = dense_sums(at_x, is_own, weight, own, k, EVEN, BLOCK_K, STAGES)
        elif FORM == "lanes":
            sums = lane_sums(
                at_x, is_own, weight, scale, own, experts * (GATES * n), k, columns,
                KIND, TABLE, SCALES, ZEROS, SCALES_APART, PLANES, WIDTH, x.dtype.element_ty,
                ASSEMBLY, EVEN, BLOCK_K // (PLANES * WIDTH), STAGES,
            )  # fmt: skip
        else:
            at_their = x_scale + source
            sums = byte_sums(
                at_x, is_own, at_their, weight, scale, own, k, columns, scale_rows, their_columns,
                their_tokens, expert.to(tl.int64) * (GATES * n) + row_block * BLOCK_N,
                (GATES - 1) * n, half * tl.full((GATES * BLOCK_N,), 1, tl.int32),
                KIND, ROUNDED, SHARED, PER_GROUP, PER_THEIR, x.dtype.element_ty, ASSEMBLY, EVEN,
                BLOCK_K, STAGES,
            )  # fmt: skip
        if bias is not None:
            sums += tl.load(bias + own).to(tl.float32)[:, None]
        if GATES == 2:
            pairs = tl.reshape(sums, (BLOCK_N // APART, 2, APART, BLOCK_T))
            gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
            sums = tl.reshape(gated_unit(gate, up, ACTIVATION), (BLOCK_N, BLOCK_T))
        elif ACTIVATION != "none":
            sums = activated(sums, ACTIVATION)
        made = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
        target = position if ACTIVATION != "none" else assignment
        at_y = y + target.to(tl.int64)[None, :] * n + made[:, None]
        tl.store(at_y, sums.to(y.dtype.element_ty), mask=is_own[None, :] & (made[:, None] < n))


@launched
@triton.jit
def weighted_sum(
    x,
    scale,
    shared,
    shared_gate,
    residual,
    residual_stride,
    n,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Residual [T, n] += Σ scale [T, K] · x [T, K, n] over K, in order, rounded once.

    Plus shared [T, n] times the sigmoid of shared_gate [T], where there are such.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(PER_TOKEN):
        one = tl.load(x + (token * PER_TOKEN + place) * n + i, mask=i < n, other=0.0)
        total += tl.load(scale + token * PER_TOKEN + place) * one.to(tl.float32)
    if shared is not None:
        beside = tl.load(shared + token * n + i, mask=i < n, other=0.0).to(tl.float32)
        if shared_gate is not None:
            beside *= tl.sigmoid(tl.load(shared_gate + token).to(tl.float32))
        total += beside
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
