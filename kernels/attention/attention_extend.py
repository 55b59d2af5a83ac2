"""Extend attention: rows of several queries (prompts and their chunks) over a cached prefix.

The work is cut into tiles of consecutive queries of one row, listed on the host with the heaviest
first. The query heads of a key/value head share a tile, so short chunks fill the matrix unit too. A
tile whose keys lie in one run of slots reads them with the tensor memory engine where there is one;
others gather them through the row table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenpod.kernels.attention.attention_plan import TileList
from tokenpod.kernels.attention.attention_softmax import (
    LOG2E,
    add_block,
    base2_factor,
    head_block,
    logits_of,
    multiplicand,
)
from tokenpod.kernels.attention.attention_tiles import ExtendTile
from tokenpod.kernels.gpu.launch import (
    OVERLAPPING_CAPABILITY,
    await_inputs,
    capability,
    launch_options,
)
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.attention_ops import NO_OPTIONS, AttentionOptions, KVScales
from tokenpod.kernels.operations.batch import PagedRows


def extend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    row_table: torch.Tensor,
    tiles: TileList,
    window: int | None,
    tile: ExtendTile,
    options: AttentionOptions = NO_OPTIONS,
    scales: KVScales | None = None,
    *,
    causal: bool = True,
    aligned: bool = False,
) -> None:
    """Write attention of the tiles' queries to out [T, H · V].

    Q [T, H, D], keys [slots + 1, K, D], values [slots + 1, K, V]. Unless `causal`, tiles have
    WHOLE_FIELDS. If `aligned`, blocks of keys begin at multiples of their size in every row: what a
    query yields does not depend on which others are in its tile.
    """
    head_dim, columns = q.shape[2], head_block(values.shape[2]) // tile.parts
    for listed, is_contiguous in ((tiles.contiguous, True), (tiles.scattered, False)):
        if not len(listed):
            continue
        described = is_contiguous and _can_describe(keys) and _can_describe(values)
        _launch(
            q,
            _describe(keys, tile.block_n, head_dim) if described else keys,
            _describe(values, tile.block_n, columns) if described else values,
            out,
            (keys, values, row_table),
            listed,
            None,
            window,
            tile,
            options,
            scales,
            CONTIGUOUS=is_contiguous,
            DESCRIBED=described,
            CAUSAL=causal,
            ALIGNED=aligned,
            OVERLAP=False,
        )


def extend_single(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    row_table: torch.Tensor,
    paged: PagedRows,
    rows: int,
    window: int | None,
    tile: ExtendTile,
    options: AttentionOptions = NO_OPTIONS,
    scales: KVScales | None = None,
) -> None:
    """The same of the first `rows` rows, of one token each: bit by bit what `extend` yields.

    That is so if it is `aligned`, and `tile` is `single_tile` of its tile. Rows and contexts are
    read on the device.
    """
    _launch(
        q,
        keys,
        values,
        out,
        (keys, values, row_table),
        paged.b_context[:rows],
        paged.b_row,
        window,
        tile,
        options,
        scales,
        CONTIGUOUS=False,
        DESCRIBED=False,
        CAUSAL=True,
        ALIGNED=True,
        **launch_options(q.device),
    )


def _launch(
    q: torch.Tensor,
    keys: torch.Tensor | TensorDescriptor,
    values: torch.Tensor | TensorDescriptor,
    out: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tiles: torch.Tensor,
    b_row: torch.Tensor | None,
    window: int | None,
    tile: ExtendTile,
    options: AttentionOptions,
    scales: KVScales | None,
    **constants: bool,
) -> None:
    """A program for each of `tiles` and part; with `b_row` these are contexts of single rows."""
    heads, head_dim = q.shape[1:]
    own_keys, own_values, row_table = pool
    kv_heads = own_keys.shape[1]
    _attend[(kv_heads * tile.parts, len(tiles))](
        *(q, keys, values, out, row_table, tiles, b_row),
        *(options.alibi_slopes, options.sinks),
        *((scales.keys, scales.values) if scales else (None, None)),
        *(q.stride(0), q.stride(1), out.stride(0)),
        *(own_keys.stride(0), own_keys.stride(1), own_values.stride(0), own_values.stride(1)),
        row_table.stride(0),
        options.scale_of(head_dim),
        options.softcap or 0.0,
        window or 0,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=own_values.shape[2],
        DIM=head_block(head_dim),
        COLUMNS=head_block(own_values.shape[2]) // tile.parts,
        PARTS=tile.parts,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        WINDOWED=window is not None,
        SOFTCAP=options.softcap is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constants,
    )


def _can_describe(pool: torch.Tensor) -> bool:
    """Whether the tensor memory engine can fetch blocks of one head of `pool`."""
    head_dim = pool.shape[2]
    generation = capability(pool.device)
    has_engine = generation is None or generation >= OVERLAPPING_CAPABILITY
    whole = pool.is_contiguous() and head_dim == head_block(head_dim)
    return has_engine and whole and pool.data_ptr() % 16 == 0


def _describe(pool: torch.Tensor, slots: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(pool.flatten(1), [slots, columns])


@launched
@triton.jit(do_not_specialize=["window"])
def _attend(
    q,
    keys,
    values,
    out,
    row_table,
    tiles,
    b_row,
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """COLUMNS of a tile's result: programs that make the PARTS of it are beside each other."""
    kv_head = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * COLUMNS
    if b_row is not None:
        token = tl.program_id(1)
        count = 1
        position = tl.load(tiles + token).to(tl.int32) - 1
        source = tl.load(b_row + token).to(tl.int32)
        await_inputs(OVERLAP)
    else:
        tile = tiles + tl.program_id(1) * (4 if CAUSAL else 5)
        token = tl.load(tile)
        count = tl.load(tile + 1)
        if count == 0:  # a captured step's list is filled up with empty tiles
            return
        position = tl.load(tile + 2)
        source = tl.load(tile + 3)
    ALIBI: tl.constexpr = h_slope is not None
    SCALED: tl.constexpr = key_scales is not None

    # A row of the product is a (query, head) pair: heads of a query follow each other.
    pairs = tl.arange(0, BLOCK_M)
    queries = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    asked = position + queries
    dims = tl.arange(0, DIM)
    is_query = (queries < count)[:, None]
    is_asked = is_query
    if DIM != HEAD_DIM:
        is_asked = is_query & (dims < HEAD_DIM)[None, :]
    tokens = (token + queries).to(tl.int64)
    query = tl.load(
        q + tokens[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :],
        mask=is_asked,
        other=0.0,
    )
    slopes = None
    if ALIBI:
        slopes = tl.load(h_slope + heads)
    if SCALED:
        query = multiplicand(query)
        scale *= tl.load(key_scales + kv_head)

    if h_sink is not None:
        # A sink is one more logit, without a value.
        most = tl.load(h_sink + heads) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        most = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, COLUMNS], tl.float32)

    # Blocks that all queries see whole need no masks; they lie between those at the window's edge
    # and those on the diagonal.
    end = position + count
    lowest = 0
    first = 0
    inner = 0
    if WINDOWED:
        lowest = tl.maximum(position - window + 1, 0)
        first = lowest // BLOCK_N * BLOCK_N if ALIGNED else lowest
        inner = first + tl.cdiv(tl.maximum(end - window - first, 0), BLOCK_N) * BLOCK_N
    # The first query sees the least of what is behind the others.
    least = position + 1
    if not CAUSAL:
        end = tl.load(tile + 4)
        least = end
        if WINDOWED:
            least = tl.minimum(position + window, end)
    diagonal = inner + tl.maximum(least - inner, 0) // BLOCK_N * BLOCK_N
    # Slots are read a block ahead: addresses are known when keys and values are to be fetched.
    slots = _slots(row_table, table_stride, source, first, end, BLOCK_N, CONTIGUOUS)
    for stage in tl.static_range(3):
        if stage == 0:
            low, high = first, tl.minimum(inner, end)
        elif stage == 1:
            low, high = inner, diagonal
        else:
            low, high = diagonal, end
        if WINDOWED or stage > 0:
            for at in tl.range(low, high, BLOCK_N):
                most, total, result, slots = _add_keys(
                    most, total, result, slots, query, at, lowest, end, asked, slopes,
                    keys, values, row_table, source, kv_head, column,
                    key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
                    table_stride, scale, softcap, window,
                    HEAD_DIM, VALUE_DIM, DIM, COLUMNS, PARTS, BLOCK_N, CONTIGUOUS, DESCRIBED,
                    WINDOWED, SOFTCAP, ALIBI, SCALED, CAUSAL, ALIGNED, stage != 1,
                )  # fmt: skip

    # A row of padding may have seen nothing.
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    if SCALED:
        result *= tl.load(value_scales + kv_head)
    made = column + tl.arange(0, COLUMNS)
    if COLUMNS * PARTS != VALUE_DIM:
        is_query = is_query & (made < VALUE_DIM)[None, :]
    tl.store(
        out + tokens[:, None] * out_token_stride + heads[:, None] * VALUE_DIM + made[None, :],
        result.to(out.dtype.element_ty),
        mask=is_query,
    )


@triton.jit
def _slots(
    row_table, table_stride, source, at, end, BLOCK_N: tl.constexpr, CONTIGUOUS: tl.constexpr
):
    """[BLOCK_N] int64: where the keys at positions [at, at + BLOCK_N) lie."""
    seen = at + tl.arange(0, BLOCK_N)
    if CONTIGUOUS:
        return (source + seen).to(tl.int64)
    else:
        table = row_table + source.to(tl.int64) * table_stride
        return tl.load(table + seen, mask=seen < end, other=0).to(tl.int64)


@triton.jit
def _add_keys(
    most,
    total,
    result,
    slots,
    query,
    at,
    lowest,
    end,
    asked,
    slopes,
    keys,
    values,
    row_table,
    source,
    kv_head,
    column,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALED: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys at positions [at, at + BLOCK_N) into the softmax and the result.

    `slots` are those of these positions, and returned for the next block's. No query sees a
    position before `lowest`, or from `end` on.
    """
    seen = at + tl.arange(0, BLOCK_N)
    held = seen < end
    if ALIGNED and WINDOWED:
        held = held & (seen >= lowest)
    if DESCRIBED:
        key = keys.load([source + at, kv_head * HEAD_DIM])
        value = values.load([source + at, kv_head * VALUE_DIM + column])
        if SCALED:
            value = value.to(query.dtype)
        if MASKED:
            # Slots after the row's last are another's: 0 · NaN would be NaN.
            value = tl.where(held[:, None], value, 0.0)
    else:
        is_key = held[:, None]
        dims = tl.arange(0, DIM)
        made = column + tl.arange(0, COLUMNS)
        from_keys = (
            keys + kv_head * key_head_stride + slots[:, None] * key_slot_stride + dims[None, :]
        )
        from_values = (
            values
            + kv_head * value_head_stride
            + slots[:, None] * value_slot_stride
            + made[None, :]
        )
        if MASKED or DIM != HEAD_DIM:
            key = tl.load(from_keys, mask=is_key & (dims < HEAD_DIM)[None, :], other=0.0)
        else:
            key = tl.load(from_keys)
        if MASKED or COLUMNS * PARTS != VALUE_DIM:
            is_value = is_key & (made < VALUE_DIM)[None, :]
            value = tl.load(from_values, mask=is_value, other=0.0)
        else:
            value = tl.load(from_values)
    if not DESCRIBED:
        slots = _slots(row_table, table_stride, source, at + BLOCK_N, end, BLOCK_N, CONTIGUOUS)

    if SCALED:
        key, value = key.to(query.dtype), value.to(query.dtype)
    products = tl.dot(query, tl.trans(key), input_precision="tf32x3")
    distance = asked[:, None] - seen[None, :]
    if not CAUSAL:
        distance = tl.abs(distance)
    logits = logits_of(products, scale, softcap, slopes, distance, SOFTCAP, ALIBI)
    if MASKED:
        if CAUSAL:
            visible = distance >= 0
        else:
            visible = (seen < end)[None, :] & (distance >= 0)
        if WINDOWED:
            visible = visible & (distance < window)
        logits = tl.where(visible, logits, float("-inf"))
    factor = base2_factor(scale, SOFTCAP, ALIBI)
    weights, most, total, shrink = add_block(logits, factor, most, total, WINDOWED and MASKED)
    result = tl.dot(
        weights.to(value.dtype), value, result * shrink[:, None], input_precision="tf32x3"
    )
    return most, total, result, slots
