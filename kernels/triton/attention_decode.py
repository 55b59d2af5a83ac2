"""Decode attention: one query per row against all its KV, split over programs.

A step of decoding reads each key and value once and computes little, so this is about keeping reads
in flight. The query heads of a key/value head are packed into one product with its keys, so each is
read once. A row's visible range is cut into equal shares for `splits` programs; their number
depends on nothing but shapes, and contexts are read on the device, so a captured graph stays right
while contexts grow. A short context has fewer shares than programs; the others then do nothing.

Shares are merged by the logarithms of their sums, in their order, by whichever program of a row and
key/value head is the last to arrive. Each program leaves its share in memory and then counts itself
(a release); who counts to the number of shares has seen all of them (an acquire), and sets the
count back to zero for the next launch.

The kernel lets the next one start early (`launch`): the product behind it asks for its weight while
this one leaves memory idle. It starts early itself, and asks for its first AHEAD blocks: only the
step's own keys and values, the last of each row, are not there yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.engine.batch import PagedRows
from tokenpod.kernels.ops import NO_OPTIONS, AttentionOptions
from tokenpod.kernels.triton.attention_softmax import LOG2E, add_block, base2_factor, logits_of
from tokenpod.kernels.triton.attention_tiles import DecodeTile
from tokenpod.kernels.triton.launch import ask_lines, await_inputs, launch_options

#: A matrix unit's least number of rows.
LEAST_M = 16

#: More shares than this cost more to merge than they bring.
MAX_SPLITS = 32

#: Pairs of a row and a key/value head in a launch that splits: more fill a device without.
MAX_SPLIT_PAIRS = 2048

#: Bytes that one request brings into the L2 cache.
LINE: tl.constexpr = tl.constexpr(128)

#: Numbers of shares that a thread merges at a time: reads under way, each in a register.
MERGED_PER_THREAD = 64


def choose_splits(rows: int, kv_heads: int, processors: int, tile: DecodeTile) -> int:
    """Programs per row and key/value head that fill `processors`: from shapes alone."""
    if rows * kv_heads > MAX_SPLIT_PAIRS:
        return 1
    wanted = round(processors * tile.programs / (rows * kv_heads))
    return min(max(wanted, 1), MAX_SPLITS)


def count_none(device: torch.device) -> torch.Tensor:
    """What a launch of `decode` counts arrivals in; launches in order share it."""
    return torch.zeros(MAX_SPLIT_PAIRS, dtype=torch.int32, device=device)


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
    arrivals: torch.Tensor,
    options: AttentionOptions = NO_OPTIONS,
) -> None:
    """Write attention of the first `rows` rows, of one token each, to out [T, H, D].

    Q [T, H, D], keys and values [slots + 1, K, D]; `arrivals`: see `count_none`. A row with context
    0 gets zeros.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    merged_heads, dim = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    split = splits > 1
    parts, log_sums = out, out
    if split:
        assert rows * kv_heads <= len(arrivals), "a launch of so many rows is not split"
        shares = (rows, kv_heads, splits, group)
        parts = torch.empty((*shares, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty(shares, dtype=torch.float32, device=q.device)
    launched = launch_options(q.device)
    _attend[(kv_heads, rows, splits)](
        q,
        keys,
        values,
        out,
        parts,
        log_sums,
        arrivals,
        row_table,
        paged.b_row,
        paged.b_context,
        options.alibi_slopes,
        options.sinks,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        row_table.stride(0),
        head_dim**-0.5,
        options.softcap or 0.0,
        window or 0,
        splits,
        tile.least,
        GROUP=group,
        HEAD_DIM=head_dim,
        M=max(LEAST_M, merged_heads),
        DIM=dim,
        BLOCK=tile.block,
        SPLIT=split,
        MERGED_HEADS=merged_heads,
        MERGED=_merged_at_once(merged_heads * dim, tile.warps),
        WINDOWED=window is not None,
        SOFTCAP=options.softcap is not None,
        AHEAD=tile.ahead if launched["OVERLAP"] else 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launched,
    )


def _merged_at_once(numbers: int, warps: int) -> int:
    """How many shares of so many numbers."""
    return min(max(MERGED_PER_THREAD * 32 * warps // numbers, 1), MAX_SPLITS)


@triton.jit(do_not_specialize=["window", "splits", "least"])
def _attend(
    q,
    keys,
    values,
    out,
    parts,
    log_sums,
    arrivals,
    row_table,
    b_row,
    b_context,
    h_slope,
    h_sink,
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
    least,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
    MERGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Neighbouring programs read neighbouring heads of the same slots.
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    share = tl.program_id(2)
    ALIBI: tl.constexpr = h_slope is not None

    context = tl.load(b_context + row)
    table = row_table + tl.load(b_row + row).to(tl.int64) * table_stride
    first = 0
    if WINDOWED:
        first = tl.maximum(context - window, 0)
    start = first
    end = context
    shares = 1
    if SPLIT:
        length = tl.maximum(tl.cdiv(tl.cdiv(context - first, BLOCK), splits), least) * BLOCK
        shares = tl.maximum(tl.cdiv(context - first, length), 1)
        start = first + share * length
        end = tl.minimum(start + length, context)

    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    offsets = tl.arange(0, BLOCK)
    for block in tl.static_range(AHEAD):
        asked = start + block * BLOCK + offsets
        slots = tl.load(table + asked, mask=asked < end, other=0).to(tl.int64)
        _ask_heads(keys + slots * key_slot_stride, HEAD_DIM)
        _ask_heads(values + slots * value_slot_stride, HEAD_DIM)
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

    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if h_sink is not None:
        # A sink is one more logit, without a value: it is in the first share.
        most = tl.load(h_sink + heads, mask=is_head & (share == 0), other=float("-inf")) * LOG2E
        total += tl.where(share == 0, 1.0, 0.0)
    result = tl.zeros([M, DIM], tl.float32)

    factor = base2_factor(scale, SOFTCAP, ALIBI)
    for at in tl.range(start, end, BLOCK):
        seen = at + offsets < end
        is_key = seen[:, None]
        if DIM != HEAD_DIM:
            is_key = is_key & (dims < HEAD_DIM)[None, :]
        key = tl.load(
            keys + slots[:, None] * key_slot_stride + dims[None, :], mask=is_key, other=0.0
        )
        value = tl.load(
            values + slots[:, None] * value_slot_stride + dims[None, :], mask=is_key, other=0.0
        )
        following = at + BLOCK + offsets
        slots = tl.load(table + following, mask=following < end, other=0).to(tl.int64)

        products = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        distance = (context - 1 - at - offsets)[None, :]
        logits = logits_of(products, scale, softcap, slopes, distance, SOFTCAP, ALIBI)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        weights, most, total, shrink = add_block(logits, factor, most, total, False)
        result = tl.dot(
            weights.to(value.dtype), value, result * shrink[:, None], input_precision="tf32x3"
        )

    # Not a number stays one: only a sum of nothing is replaced.
    empty = total == 0.0
    result = result / tl.where(empty, 1.0, total)[:, None]
    out_row = out + row.to(tl.int64) * out_token_stride
    out_at = out_row + heads[:, None] * HEAD_DIM + dims[None, :]
    if SPLIT:
        pair = row.to(tl.int64) * tl.num_programs(0) + kv_head
        if shares == 1:
            tl.store(out_at, result.to(out.dtype.element_ty), mask=is_query & (share == 0))
        elif share < shares:
            part = (pair * splits + share) * GROUP + members
            tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], result, mask=is_query)
            log_sum = tl.where(empty, float("-inf"), most + tl.log2(tl.where(empty, 1.0, total)))
            tl.store(log_sums + part, log_sum, mask=is_head)
            # All threads have stored before one of them releases what they stored.
            tl.debug_barrier()
            before = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
            if before == shares - 1:
                tl.store(arrivals + pair, 0)
                _merge(
                    parts + pair * splits * GROUP * HEAD_DIM,
                    log_sums + pair * splits * GROUP,
                    out_row + kv_head * GROUP * HEAD_DIM,
                    shares, GROUP, HEAD_DIM, DIM, MERGED_HEADS, MERGED,
                )  # fmt: skip
    else:
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_query)


@triton.jit
def _merge(
    parts,
    log_sums,
    out,
    shares,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [GROUP, HEAD_DIM] = parts [shares, GROUP, HEAD_DIM] weighted by exp2 of their log sums.

    What other programs left is read past this multiprocessor's own cache.
    """
    member = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, DIM], tl.float32)
    for at in tl.range(0, shares, BLOCK, num_stages=1):
        share = at + tl.arange(0, BLOCK)
        is_held = (share < shares)[:, None] & (member < GROUP)[None, :]
        index = share[:, None] * GROUP + member[None, :]
        log_sum = tl.load(log_sums + index, mask=is_held, other=float("-inf"), cache_modifier=".cg")
        is_number = is_held[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        # Not masked by the sums, to load both at once.
        part = tl.load(
            parts + index[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=is_number,
            other=0.0,
            cache_modifier=".cg",
        )
        weights, most, total, shrink = add_block(tl.trans(log_sum), 1.0, most, total, True)
        result = result * shrink[:, None] + tl.sum(tl.trans(weights)[:, :, None] * part, 0)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + member[:, None] * HEAD_DIM + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=(member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :],
    )


@triton.jit
def _ask_heads(at, HEAD_DIM: tl.constexpr):
    """Ask a head's key or value [HEAD_DIM] at each address into the L2 cache."""
    BYTES: tl.constexpr = at.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(HEAD_DIM * BYTES, LINE))
    # The last line is asked twice where the number of lines is no power of two.
    i = tl.minimum(tl.arange(0, LINES) * (LINE // BYTES), HEAD_DIM - 1)
    ask_lines(at[:, None] + i[None, :])
