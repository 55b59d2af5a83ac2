"""Decode attention: one query per row against all its KV, split over programs.

A step of decoding reads each key and value once and computes little, so this is about keeping reads
in flight. The query heads of a key/value head are packed into one product with its keys, so each is
read once. A row's visible range is cut into equal splits for `splits` programs; their number
depends on nothing but shapes, and contexts are read on the device, so a captured graph stays right
while contexts grow. A second kernel merges the splits by the logarithms of their sums.

Both let the next kernel start early (`launch`): the product behind them asks for its weight while
they leave memory idle. The first one itself starts early, and asks for its first AHEAD blocks: only
the step's own keys and values, the last of each row, are not there yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.attention.attention_softmax import (
    LOG2E,
    add_block,
    base2_factor,
    head_block,
    logits_of,
    multiplicand,
    unpacked,
)
from tokenpod.kernels.attention.attention_tiles import DecodeTile
from tokenpod.kernels.gpu.launch import ask_lines, await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.attention_ops import NO_OPTIONS, AttentionOptions, KVScales
from tokenpod.kernels.operations.batch import PagedRows

#: A matrix unit's least number of rows.
LEAST_M = 16

#: Bytes that one request brings into the L2 cache.
LINE: tl.constexpr = tl.constexpr(128)

#: Splits merged at a time, and numbers of their parts, at most.
MERGED_SPLITS, MERGED_NUMBERS = 32, 1 << 13


def choose_splits(
    rows: int, kv_heads: int, processors: int, tile: DecodeTile, window: int | None = None
) -> int:
    """Programs per row and key/value head that fill `processors`: from shapes alone.

    Each has a block of the window at least: others would leave nothing to merge.
    """
    wanted = round(processors * tile.programs / (rows * kv_heads))
    most = tile.most_splits if window is None else min(tile.most_splits, -(-window // tile.block))
    return min(max(wanted, 1), most)


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    row_table: torch.Tensor,
    paged: PagedRows,
    rows: int,
    window: int | None,
    tile: DecodeTile,
    splits: int,
    options: AttentionOptions = NO_OPTIONS,
    scales: KVScales | None = None,
) -> None:
    """Write attention of the first `rows` rows, of one token each, to out [T, H · V].

    Q [T, H, D], keys [slots + 1, K, D], values [slots + 1, K, V], with `scales` of 8 bits. A row
    with context 0 gets zeros.
    """
    (heads, head_dim), value_dim = q.shape[1:], values.shape[2]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    split = splits > 1
    parts, log_sums = out, out
    if split:
        parts = torch.empty((rows, heads, splits, value_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    if scales is not None:
        values = values.view(torch.int16)  # see `unpacked`
    launched = launch_options(q.device)
    _attend[(kv_heads, rows, splits)](
        q,
        keys,
        values,
        out,
        parts,
        log_sums,
        row_table,
        paged.b_row,
        paged.b_context,
        options.alibi_slopes,
        options.sinks,
        scales.keys if scales else None,
        scales.values if scales else None,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        row_table.stride(0),
        options.scale_of(head_dim),
        options.softcap or 0.0,
        window or 0,
        splits,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        M=max(LEAST_M, triton.next_power_of_2(group)),
        DIM=head_block(head_dim),
        VALUE_BLOCK=head_block(value_dim),
        BLOCK=tile.block,
        SPLIT=split,
        WINDOWED=window is not None,
        SOFTCAP=options.softcap is not None,
        AHEAD=tile.ahead if launched["OVERLAP"] else 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launched,
    )
    if split:
        block = min(MERGED_SPLITS, MERGED_NUMBERS // head_block(value_dim))
        merge_splits(parts, log_sums, out, block)


def merge_splits(
    parts: torch.Tensor, log_sums: torch.Tensor, out: torch.Tensor, block: int
) -> None:
    """Weigh parts [rows, H, splits, D] by exp2 of log_sums [rows, H, splits], into out [rows, ...].

    Both float32; an empty split has zeros and minus infinity. `block` splits are read at a time.
    """
    rows, heads, splits, head_dim = parts.shape
    _merge[(heads, rows)](
        parts,
        log_sums,
        out,
        out.stride(0),
        splits,
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        BLOCK=block,
        num_warps=4,
        **launch_options(out.device),
    )


@launched
@triton.jit(do_not_specialize=["window", "splits"])
def _attend(
    q,
    keys,
    values,
    out,
    parts,
    log_sums,
    row_table,
    b_row,
    b_context,
    h_slope,
    h_sink,
    key_scales,
    value_scales,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    scale,
    softcap,
    window,
    splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    M: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Neighbouring programs read neighbouring heads of the same slots.
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    ALIBI: tl.constexpr = h_slope is not None
    SCALED: tl.constexpr = key_scales is not None
    # With scales, values come in pairs: of even dimensions and odd ones.
    WIDTH: tl.constexpr = VALUE_BLOCK // 2 if SCALED else VALUE_BLOCK
    VALUE_WIDTH: tl.constexpr = VALUE_DIM // 2 if SCALED else VALUE_DIM

    context = tl.load(b_context + row)
    table = row_table + tl.load(b_row + row).to(tl.int64) * table_stride
    first = 0
    if WINDOWED:
        first = tl.maximum(context - window, 0)
    if SPLIT:
        length = tl.cdiv(tl.cdiv(context - first, BLOCK), splits) * BLOCK
        start = first + split * length
        end = tl.minimum(start + length, context)
    else:
        start = first
        end = context

    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    offsets = tl.arange(0, BLOCK)
    for block in tl.static_range(AHEAD):
        asked = start + block * BLOCK + offsets
        slots = tl.load(table + asked, mask=asked < end, other=0).to(tl.int64)
        _ask_heads(keys + slots * key_slot_stride, HEAD_DIM)
        _ask_heads(values + slots * value_slot_stride, VALUE_WIDTH)
    # Slots are read a block ahead: addresses are known when keys and values are to be fetched.
    slots = tl.load(table + start + offsets, mask=start + offsets < end, other=0).to(tl.int64)
    await_inputs(OVERLAP)

    members = tl.arange(0, M)
    heads = kv_head * GROUP + members
    is_head = members < GROUP
    dims = tl.arange(0, DIM)
    is_query = is_head[:, None]
    if DIM != HEAD_DIM:
        is_query = is_query & (dims < HEAD_DIM)[None, :]
    query = tl.load(
        q + row.to(tl.int64) * q_token_stride + heads[:, None] * q_head_stride + dims[None, :],
        mask=is_query,
        other=0.0,
    )
    slopes = None
    if ALIBI:
        slopes = tl.load(h_slope + heads, mask=is_head, other=0.0)
    if SCALED:
        query = multiplicand(query)
        scale *= tl.load(key_scales + kv_head)

    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if h_sink is not None:
        # A sink is one more logit, without a value: it is in the first split.
        most = tl.load(h_sink + heads, mask=is_head & (split == 0), other=float("-inf")) * LOG2E
        total += tl.where(split == 0, 1.0, 0.0)
    result = tl.zeros([M, WIDTH], tl.float32)
    odd_result = tl.zeros([M, WIDTH], tl.float32)
    value_dims = tl.arange(0, WIDTH)

    factor = base2_factor(scale, SOFTCAP, ALIBI)
    for at in tl.range(start, end, BLOCK):
        seen = at + offsets < end
        is_key = seen[:, None]
        is_value = seen[:, None]
        if DIM != HEAD_DIM:
            is_key = is_key & (dims < HEAD_DIM)[None, :]
        if VALUE_BLOCK != VALUE_DIM:
            is_value = is_value & (value_dims < VALUE_WIDTH)[None, :]
        key = tl.load(
            keys + slots[:, None] * key_slot_stride + dims[None, :], mask=is_key, other=0.0
        )
        value = tl.load(
            values + slots[:, None] * value_slot_stride + value_dims[None, :],
            mask=is_value,
            other=0,
        )
        following = at + BLOCK + offsets
        slots = tl.load(table + following, mask=following < end, other=0).to(tl.int64)

        if SCALED:
            key = key.to(query.dtype)
        products = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        distance = (context - 1 - at - offsets)[None, :]
        logits = logits_of(products, scale, softcap, slopes, distance, SOFTCAP, ALIBI)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        weights, most, total, shrink = add_block(logits, factor, most, total, False)
        if SCALED:
            value, odd_value = unpacked(value, query.dtype)
            odd_result = tl.dot(
                weights.to(value.dtype),
                odd_value,
                odd_result * shrink[:, None],
                input_precision="tf32x3",
            )
        result = tl.dot(
            weights.to(value.dtype), value, result * shrink[:, None], input_precision="tf32x3"
        )

    if SCALED:
        result = tl.interleave(result, odd_result) * tl.load(value_scales + kv_head)
    # Not a number stays one: only a sum of nothing is replaced.
    empty = total == 0.0
    result = result / tl.where(empty, 1.0, total)[:, None]
    made = tl.arange(0, VALUE_BLOCK)
    is_made = is_head[:, None]
    if VALUE_BLOCK != VALUE_DIM:
        is_made = is_made & (made < VALUE_DIM)[None, :]
    if SPLIT:
        part = (row.to(tl.int64) * tl.num_programs(0) * GROUP + heads) * splits + split
        tl.store(parts + part[:, None] * VALUE_DIM + made[None, :], result, mask=is_made)
        log_sum = tl.where(empty, float("-inf"), most + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(log_sums + part, log_sum, mask=is_head)
    else:
        tl.store(
            out + row.to(tl.int64) * out_token_stride + heads[:, None] * VALUE_DIM + made[None, :],
            result.to(out.dtype.element_ty),
            mask=is_made,
        )


@triton.jit
def _ask_heads(at, HEAD_DIM: tl.constexpr):
    """Ask a head's key or value [HEAD_DIM] at each address into the L2 cache."""
    BYTES: tl.constexpr = at.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(HEAD_DIM * BYTES, LINE))
    # The last line is asked twice where the number of lines is no power of two.
    i = tl.minimum(tl.arange(0, LINES) * (LINE // BYTES), HEAD_DIM - 1)
    ask_lines(at[:, None] + i[None, :])


@launched
@triton.jit(do_not_specialize=["splits"])
def _merge(
    parts,
    log_sums,
    out,
    out_token_stride,
    splits,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[row, head] = the parts weighted by exp2 of their log sums; zeros if all are empty."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    first = (row.to(tl.int64) * tl.num_programs(0) + head) * splits
    dims = tl.arange(0, DIM)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([DIM], tl.float32)
    await_inputs(OVERLAP)
    for at in range(0, splits, BLOCK):
        split = at + tl.arange(0, BLOCK)
        log_sum = tl.load(log_sums + first + split, mask=split < splits, other=float("-inf"))
        # Not masked by the sums, to load both at once: an empty split is zeros.
        held = (split < splits)[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(
            parts + (first + split)[:, None] * HEAD_DIM + dims[None, :], mask=held, other=0.0
        )
        weights, most, total, shrink = add_block(log_sum[None, :], 1.0, most, total, True)
        result = result * shrink + tl.sum(tl.trans(weights) * part, 0)
    result = result / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + row.to(tl.int64) * out_token_stride + head * HEAD_DIM + dims,
        result.to(out.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )
