"""Latent rows on a GPU: their write to the pool, and attention that asks the rows themselves.

A row is key and value of all heads, so a program reads a block of rows once for up to 64 heads of a
token. It takes the row's latent and its shared key apart: 512 and 64 numbers are two products of
sizes that the matrix unit likes, and the first is the value too. Each token is on its own, with the
row of the table and the position that the device knows, so a captured step of any mix stays right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenpod.kernels.attention.attention_decode import merge_splits
from tokenpod.kernels.attention.attention_softmax import LOG2E, add_block
from tokenpod.kernels.attention.attention_tiles import HOPPER
from tokenpod.kernels.attention.triton_attention import describe_device
from tokenpod.kernels.cache.triton_rotary import Angles, angles_of
from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.attention_ops import AttentionPlan, Rotation
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.pointwise.triton_pointwise import rms_normalised

#: Rows that the kernels hold: DeepSeek's have 512 + 64 numbers.
LARGEST_RANK, LARGEST_ROPE = 512, 128

#: Heads that one program serves, at least: a matrix unit's least number of rows.
LEAST_HEADS = 16
#: Heads that one program serves at most, and rows that it reads at a time: with numbers of 2 bytes
#: on multiprocessors like Hopper's, and otherwise.
LARGE_TILE, SMALL_TILE = (64, 32), (32, 16)

#: Query heads that one program turns.
TURNED_HEADS = 16

#: Splits of a context, at most: merging more costs more than they bring.
MOST_SPLITS = 32

#: Splits merged at a time: a part has up to 512 numbers.
MERGE_BLOCK = 8


@dataclass(frozen=True, slots=True)
class TokenPlan(AttentionPlan):
    """The tokens of a step: their rows of the table, and where they stand."""

    row_table: torch.Tensor
    #: [N] int64 each.
    t_row: torch.Tensor
    t_place: torch.Tensor


def plan_tokens(batch: ForwardBatch) -> TokenPlan:
    """Every token of a step.

    Raises:
        ValueError: the batch does not say on the device which token is in which row.
    """
    if batch.paged is None or batch.paged.t_row is None:
        raise ValueError(f"a batch of {batch.rows} rows has no rows of tokens; latents need them")
    return TokenPlan(batch.row_table, batch.paged.t_row, batch.t_place)


def store_latent(
    q: torch.Tensor,
    row: torch.Tensor,
    rotation: Rotation,
    norm: RowNorm,
    pool: torch.Tensor,
    t_slot: torch.Tensor,
) -> torch.Tensor:
    """Queries [T, H, nope + rope] with turned ends; latent rows go to the pool, normed and turned.

    Turns the ends of `q` where they are.
    """
    assert isinstance(rotation, Angles)
    tokens, heads, head_dim = q.shape
    rank = len(norm.weight)
    half = (row.shape[1] - rank) // 2
    _store_latent[(tokens, 1 + triton.cdiv(heads, TURNED_HEADS))](
        q,
        row,
        rotation.t_position,
        rotation.inverse_frequencies,
        rotation.scale,
        rotation.cos,
        rotation.sin,
        norm.weight,
        pool,
        t_slot,
        q.stride(0),
        q.stride(1),
        row.stride(0),
        pool.stride(0),
        norm.epsilon,
        heads,
        head_dim - 2 * half,
        rank,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_RANK=triton.next_power_of_2(rank),
        BLOCK_HEADS=TURNED_HEADS,
        num_warps=4,
        **launch_options(q.device),
    )
    return q


def absorbed(
    q: torch.Tensor, pool: torch.Tensor, rank: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Q [N, H, rank + rope], pool [slots + 1, 1, rank + rope] -> [N, H, rank].

    Raises:
        ValueError: a row is longer than 512 + 128 numbers.
    """
    assert isinstance(plan, TokenPlan)
    tokens, heads, row_dim = q.shape
    rope = row_dim - rank
    if rank > LARGEST_RANK or rope > LARGEST_ROPE:
        raise ValueError(
            f"latent rows of {rank} + {rope} numbers: at most {LARGEST_RANK} + {LARGEST_ROPE}"
        )
    device, launched = describe_device(q.device), launch_options(q.device)
    large = HOPPER <= device.capability < (12, 0) and q.element_size() == 2
    most_heads, block = LARGE_TILE if large else SMALL_TILE
    together = min(most_heads, max(LEAST_HEADS, triton.next_power_of_2(heads)))
    blocks = triton.cdiv(heads, together)
    splits = min(max(round(device.processors * 2 / (tokens * blocks)), 1), MOST_SPLITS)
    out = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device)
    parts, log_sums = out, out
    if splits > 1:
        parts = torch.empty((tokens, heads, splits, rank), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((tokens, heads, splits), dtype=torch.float32, device=q.device)
    _attend_latent[(blocks, tokens, splits)](
        q,
        pool,
        out,
        parts,
        log_sums,
        plan.row_table,
        plan.t_row,
        plan.t_place,
        q.stride(0),
        q.stride(1),
        pool.stride(0),
        plan.row_table.stride(0),
        scale * LOG2E.value,
        splits,
        heads,
        RANK=rank,
        ROPE=rope,
        BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(rope)),
        HEADS=together,
        BLOCK=block,
        SPLIT=splits > 1,
        num_warps=4 if together == LEAST_HEADS else 8,
        num_stages=2,
        **launched,
    )
    if splits > 1:
        merge_splits(parts, log_sums, out, MERGE_BLOCK)
    return out


@launched
@triton.jit
def _store_latent(
    q,
    row,
    t_position,
    inverse_frequencies,
    scale,
    cos,
    sin,
    norm_weight,
    pool,
    t_slot,
    q_token_stride,
    q_head_stride,
    row_stride,
    pool_stride,
    epsilon,
    heads,
    nope,
    rank,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token: its row, or the ends of some of its queries."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)
    slot = tl.load(t_slot + token)
    if cos is None:
        c, s = angles_of(t_position + token, inverse_frequencies, scale, i, HALF)
        await_inputs(OVERLAP)
    else:
        await_inputs(OVERLAP)
        c = tl.load(cos + token * HALF + i, mask=i < HALF, other=0.0)
        s = tl.load(sin + token * HALF + i, mask=i < HALF, other=0.0)
    if tl.program_id(1) == 0:
        r = tl.arange(0, BLOCK_RANK)
        source, target = row + token * row_stride, pool + slot * pool_stride
        latent = tl.load(source + r, mask=r < rank, other=0.0)
        weight = tl.load(norm_weight + r, mask=r < rank, other=0.0)
        normed = rms_normalised(latent.to(tl.float32), rank, epsilon)
        if weight.dtype == latent.dtype:
            # Rounded before the weight is applied, as in the models' own training code.
            normed = normed.to(latent.dtype).to(tl.float32)
        normed *= weight.to(tl.float32)
        tl.store(target + r, normed.to(latent.dtype), mask=r < rank)
        first = tl.load(source + rank + i, mask=i < HALF, other=0.0)
        second = tl.load(source + rank + HALF + i, mask=i < HALF, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        tl.store(target + rank + i, (a * c - b * s).to(first.dtype), mask=i < HALF)
        tl.store(target + rank + HALF + i, (b * c + a * s).to(first.dtype), mask=i < HALF)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        at = q + token * q_token_stride + head * q_head_stride + nope + i[None, :]
        inside = (head < heads) & (i < HALF)[None, :]
        low = tl.load(at, mask=inside, other=0.0)
        high = tl.load(at + HALF, mask=inside, other=0.0)
        x, y = low.to(tl.float32), high.to(tl.float32)
        tl.store(at, (x * c[None, :] - y * s[None, :]).to(low.dtype), mask=inside)
        tl.store(at + HALF, (y * c[None, :] + x * s[None, :]).to(low.dtype), mask=inside)


@launched
@triton.jit(do_not_specialize=["splits"])
def _attend_latent(
    q,
    pool,
    out,
    parts,
    log_sums,
    row_table,
    t_row,
    t_place,
    q_token_stride,
    q_head_stride,
    pool_stride,
    table_stride,
    factor,
    splits,
    heads,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    token = tl.program_id(1)
    split = tl.program_id(2)
    context = (tl.load(t_place + token) + 1).to(tl.int32)
    table = row_table + tl.load(t_row + token) * table_stride
    if SPLIT:
        length = tl.cdiv(tl.cdiv(context, BLOCK), splits) * BLOCK
        start = split * length
        end = tl.minimum(start + length, context)
    else:
        start = 0
        end = context
    offsets = tl.arange(0, BLOCK)
    # Slots are read a block ahead: addresses are known when rows are to be fetched.
    slots = tl.load(table + start + offsets, mask=start + offsets < end, other=0).to(tl.int64)
    await_inputs(OVERLAP)

    r = tl.arange(0, BLOCK_RANK)
    d = tl.arange(0, BLOCK_ROPE)
    is_head = head < heads
    at_q = q + token.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride
    inside = tl.load(at_q + r[None, :], mask=is_head[:, None] & (r < RANK)[None, :], other=0.0)
    turned = tl.load(
        at_q + RANK + d[None, :], mask=is_head[:, None] & (d < ROPE)[None, :], other=0.0
    )
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, BLOCK_RANK], tl.float32)
    for at in tl.range(start, end, BLOCK):
        seen = at + offsets < end
        at_row = pool + slots[:, None] * pool_stride
        latent = tl.load(at_row + r[None, :], mask=seen[:, None] & (r < RANK)[None, :], other=0.0)
        key = tl.load(
            at_row + RANK + d[None, :], mask=seen[:, None] & (d < ROPE)[None, :], other=0.0
        )
        following = at + BLOCK + offsets
        slots = tl.load(table + following, mask=following < end, other=0).to(tl.int64)
        products = tl.dot(inside, tl.trans(latent), input_precision="tf32x3")
        products = tl.dot(turned, tl.trans(key), products, input_precision="tf32x3")
        logits = tl.where(seen[None, :], products, float("-inf"))
        weights, most, total, shrink = add_block(logits, factor, most, total, False)
        result = tl.dot(
            weights.to(latent.dtype), latent, result * shrink[:, None], input_precision="tf32x3"
        )
    # Not a number stays one: only a sum of nothing is replaced.
    empty = total == 0.0
    result = result / tl.where(empty, 1.0, total)[:, None]
    is_result = is_head[:, None] & (r < RANK)[None, :]
    place = token.to(tl.int64) * heads + head
    if SPLIT:
        part = place * splits + split
        tl.store(parts + part[:, None] * RANK + r[None, :], result, mask=is_result)
        log_sum = tl.where(empty, float("-inf"), most + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(log_sums + part, log_sum, mask=is_head)
    else:
        at_out = out + place[:, None] * RANK + r[None, :]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=is_result)
