"""Attention of texts that a step reads as a whole: each token sees those behind it, too.

Nothing of them is kept, so keys and values are read where the product of queries, keys and values
has written them. A program has a tile of queries of one head; all of its keys follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenpod.kernels.attention.attention_softmax import LOG2E, add_block, head_block
from tokenpod.kernels.attention.text_tiles import (
    CapturedTexts,
    TextTile,
    cut_texts,
    text_tile_for,
)
from tokenpod.kernels.gpu.launch import (
    OVERLAPPING_CAPABILITY,
    await_inputs,
    capability,
    launch_options,
)
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.attention_ops import NEAR_AND_FAR, Heads, TextOptions, TextPlan
from tokenpod.kernels.operations.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class TextTiles(TextPlan):
    """A step's texts, cut for the layers of each size of heads when the first one asks."""

    batch: ForwardBatch
    t_index: torch.Tensor
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    def tiles(self, queries: int) -> torch.Tensor:
        """[n, TEXT_FIELDS] int32 on the device, see `cut_texts`; empty ones are zeros."""
        paged = self.batch.paged
        if paged is not None and paged.tiles is not None:
            return paged.tiles[None, queries]
        if queries not in self._tiles:
            found = torch.from_numpy(cut_texts(self.batch.b_start, queries))
            if (device := self.batch.t_token.device).type == "cuda":
                found = found.pin_memory()
            self._tiles[queries] = found.to(device, non_blocking=True)
        return self._tiles[queries]


def plan_texts(batch: ForwardBatch) -> TextTiles:
    """What all layers share of a step of texts."""
    tokens = batch.t_token
    return TextTiles(batch, torch.arange(len(tokens), device=tokens.device))


def captured_texts(heads: list[Heads], rows: int) -> CapturedTexts:
    """Room for the tiles of layers with these heads, in steps of up to so many texts."""
    sizes = dict.fromkeys(_tile(each.head_dim, each.dtype, each.device).block_m for each in heads)
    return CapturedTexts(tuple(sizes), rows)


def attend_texts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: TextPlan,
    options: TextOptions = NEAR_AND_FAR,
) -> torch.Tensor:
    """Attention of q [T, H, D] over keys and values [T, K, D] of each token's text: [T, H · D]."""
    assert isinstance(plan, TextTiles)
    tile = _tile(q.shape[2], q.dtype, q.device)
    out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
    launch(q, keys, values, out, plan.tiles(tile.block_m), options, tile)
    return out


def launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    tiles: torch.Tensor,
    options: TextOptions,
    tile: TextTile,
) -> None:
    """Write attention of the tiles' queries [n, TEXT_FIELDS], cut by `tile.block_m`, to out."""
    heads, head_dim = q.shape[1:]
    bias, window = options.distance_bias, options.window
    described = _can_describe(keys) and _can_describe(values)
    shape = [tile.block_n, head_dim]
    _attend_whole[(heads, len(tiles))](
        q,
        TensorDescriptor.from_tensor(keys.flatten(1), shape) if described else keys,
        TensorDescriptor.from_tensor(values.flatten(1), shape) if described else values,
        out,
        tiles,
        bias,
        *(q.stride(0), keys.stride(0), values.stride(0), out.stride(0)),
        options.scale_of(head_dim),
        window or 0,
        0 if bias is None else bias.shape[1] // 2,
        GROUP=heads // keys.shape[1],
        HEAD_DIM=head_dim,
        DIM=head_block(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        DESCRIBED=described,
        WINDOWED=window is not None,
        num_warps=tile.warps,
        STAGES=tile.stages,
        **launch_options(q.device),
    )


def _tile(head_dim: int, dtype: torch.dtype, device: torch.device) -> TextTile:
    return text_tile_for(head_dim, dtype, capability(device) or OVERLAPPING_CAPABILITY)


def _can_describe(x: torch.Tensor) -> bool:
    """Whether the tensor memory engine can fetch blocks of one head of `x` [T, K, D]."""
    generation, head_dim = capability(x.device), x.shape[2]
    has_engine = generation is None or generation >= OVERLAPPING_CAPABILITY
    places = x.data_ptr(), x.stride(0) * x.itemsize
    return has_engine and head_dim == head_block(head_dim) and not any(at % 16 for at in places)


@launched
@triton.jit(do_not_specialize=["window", "furthest"])
def _attend_whole(
    q,
    keys,
    values,
    out,
    tiles,
    h_bias,
    q_stride,
    key_stride,
    value_stride,
    out_stride,
    scale,
    window,
    furthest,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WINDOWED: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of a tile's queries; programs of a tile, which read the same rows, come together."""
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    token, count = tl.load(tile), tl.load(tile + 1)
    first, end = tl.load(tile + 2), tl.load(tile + 3)
    await_inputs(OVERLAP)
    if count == 0:  # a captured step's list is filled up with empty tiles
        return
    asked = token + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    is_query = (asked < token + count)[:, None] & (dims < HEAD_DIM)[None, :]
    at_query = asked.to(tl.int64)[:, None]
    query = tl.load(
        q + at_query * q_stride + head * HEAD_DIM + dims[None, :], mask=is_query, other=0.0
    )
    column = head // GROUP * HEAD_DIM
    biases = None
    if h_bias is not None:
        biases = h_bias + head * (2 * furthest + 1) + furthest
    factor = scale * LOG2E

    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, DIM], tl.float32)
    whole = first
    if WINDOWED:
        whole = tl.maximum(token - window + 1, first)
        end = tl.minimum(token + count + window - 1, end)
    else:
        # Only the last keys of a text need masks: behind them lie another's.
        whole += (end - first) // BLOCK_N * BLOCK_N
        for at in tl.range(first, whole, BLOCK_N, num_stages=STAGES):
            most, total, result = _add_keys(
                most, total, result, query, asked, at, end, column, biases,
                keys, values, key_stride, value_stride, scale, factor, window, furthest,
                HEAD_DIM, DIM, BLOCK_N, DESCRIBED, WINDOWED, False,
            )  # fmt: skip
    for at in tl.range(whole, end, BLOCK_N, num_stages=STAGES if WINDOWED else 1):
        most, total, result = _add_keys(
            most, total, result, query, asked, at, end, column, biases,
            keys, values, key_stride, value_stride, scale, factor, window, furthest,
            HEAD_DIM, DIM, BLOCK_N, DESCRIBED, WINDOWED, True,
        )  # fmt: skip

    # Of a tile's rows without a query a window may have hidden everything.
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + at_query * out_stride + head * HEAD_DIM + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=is_query,
    )


@triton.jit
def _add_keys(
    most,
    total,
    result,
    query,
    asked,
    at,
    end,
    column,
    biases,
    keys,
    values,
    key_stride,
    value_stride,
    scale,
    factor,
    window,
    furthest,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys of tokens [at, at + BLOCK_N) into the softmax and the result."""
    seen = at + tl.arange(0, BLOCK_N)
    if DESCRIBED:
        key = keys.load([at, column])
        value = values.load([at, column])
        if MASKED:
            # Another text's: 0 · NaN would be NaN.
            value = tl.where((seen < end)[:, None], value, 0.0)
    else:
        dims = tl.arange(0, DIM)
        inside = (dims < HEAD_DIM)[None, :]
        if MASKED:
            inside = inside & (seen < end)[:, None]
        there = seen.to(tl.int64)[:, None]
        key = tl.load(keys + there * key_stride + column + dims[None, :], mask=inside, other=0.0)
        value = tl.load(
            values + there * value_stride + column + dims[None, :], mask=inside, other=0.0
        )
    products = tl.dot(query, tl.trans(key), input_precision="tf32x3")
    distance = asked[:, None] - seen[None, :]
    if biases is not None:
        near = tl.minimum(tl.maximum(distance, -furthest), furthest)
        products += tl.load(biases + near) / scale
    if MASKED:
        visible = (seen < end)[None, :]
        if WINDOWED:
            visible = visible & (tl.abs(distance) < window)
        products = tl.where(visible, products, float("-inf"))
    weights, most, total, shrink = add_block(products, factor, most, total, WINDOWED)
    result = tl.dot(
        weights.to(value.dtype), value, result * shrink[:, None], input_precision="tf32x3"
    )
    return most, total, result
