"""Attention over the paged pool: decode rows by one kernel, the others by another.

Both (`attention_decode`, `attention_extend`) read slots through the row table, so that it
does not matter where a row's KV lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.attention.attention_decode import choose_splits, decode
from tokenpod.kernels.attention.attention_extend import extend, extend_single
from tokenpod.kernels.attention.attention_plan import (
    FIELDS,
    TileList,
    cut_rows,
    list_tiles,
    queries_per_tile,
    unpack_tiles,
)
from tokenpod.kernels.attention.attention_tiles import (
    HOPPER,
    decode_tile_for,
    extend_tile_for,
    single_tile,
)
from tokenpod.kernels.attention.text_tiles import CapturedTexts
from tokenpod.kernels.attention.triton_texts import captured_texts
from tokenpod.kernels.gpu.launch import Gpu, gpu_of
from tokenpod.kernels.mixers.recurrent_plan import CHUNK, cut_chunks
from tokenpod.kernels.operations.attention_ops import (
    NO_OPTIONS,
    AttentionOptions,
    AttentionPlan,
    Heads,
    KVScales,
)
from tokenpod.kernels.operations.batch import (
    CHUNKS,
    ForwardBatch,
    PagedRows,
    RaggedRows,
    TileKind,
)

#: Heads of at most so many numbers; sizes between powers of two run padded to the next.
LARGEST_HEAD_DIM = 512
LARGEST_GROUP = 128

#: A captured step has room for so many rows with several tokens, unless all rows are texts.
MOST_CAPTURED_EXTENDS = 64

#: Where there is no GPU to ask: kernels are interpreted.
INTERPRETED = Gpu(HOPPER, processors=8)


@dataclass(frozen=True, slots=True)
class PagedPlan(AttentionPlan):
    """One step's rows, for all layers with one window.

    The tiles of rows with several queries depend on the shape of the heads, so the first layer of a
    shape lists them.
    """

    batch: ForwardBatch
    paged: PagedRows
    window: int | None
    _tiles: dict[tuple[int, bool], TileList] = field(default_factory=dict)

    def tiles(self, queries: int, *, causal: bool) -> TileList:
        """Tiles of up to `queries` queries, of the rows that are, or are not, causal."""
        if self.paged.tiles is not None:
            return unpack_tiles(self.paged.tiles[self.window, queries])
        kind = queries, causal
        if kind not in self._tiles:
            self._tiles[kind] = list_tiles(self.batch, self.window, queries, causal=causal)
        return self._tiles[kind]

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether rows with several tokens are causal: all are, or some."""
        return (True,) if self.batch.b_mutual is None else (True, False)


def plan_attention(batch: ForwardBatch, window: int | None) -> PagedPlan:
    """What layers with this window share of a step.

    Of a batch of single rows only, nothing but their number is read on the host: a graph captured
    with this plan stays right when contexts, rows and slots on the device change.

    Raises:
        ValueError: the batch has no rows on the device.
    """
    if batch.paged is None:
        raise ValueError(f"a batch of {batch.rows} rows has no paged rows; these kernels need them")
    return PagedPlan(batch, batch.paged, window)


@dataclass(frozen=True, slots=True)
class CapturedTiles:
    """A captured step's rows with several tokens: both lists of tiles of each kind, filled up.

    Of chunks there is one list, behind the others.
    """

    kinds: tuple[TileKind, ...]
    #: Rows with several tokens that a captured step has room for.
    rows: int
    #: Whether there are chunks.
    chunks: bool = False
    #: Whether each row has tiles, also one of a single token.
    texts: bool = False

    @property
    def _lists(self) -> int:
        return 2 * len(self.kinds) + self.chunks

    def count(self, tokens: int) -> int:
        """Tiles are full, but for each row's last."""
        sizes = [queries for _, queries in self.kinds] + [CHUNK] * self.chunks
        tiles = tokens // min(sizes, default=1) + self.rows
        return self._lists * tiles * FIELDS

    def fill(self, rows: RaggedRows, into: npt.NDArray[np.int32]) -> bool:
        """Write the tiles of these rows; False: there is no room for them."""
        if self.texts:
            rows = replace(rows, single_rows=0)
        found: list[npt.NDArray[np.int32]] = []
        for kind in self.kinds:
            found += cut_rows(rows, *kind)
        if self.chunks:
            if rows.rows - rows.single_rows > self.rows:
                return False
            found.append(cut_chunks(rows))
        for tiles, room in zip(found, into.reshape(self._lists, -1, FIELDS), strict=True):
            if len(tiles) > len(room):
                return False
            room[: len(tiles)], room[len(tiles) :] = tiles, 0
        return True

    def by_kind(self, numbers: torch.Tensor) -> dict[TileKind, torch.Tensor]:
        """Parts of `numbers` on the device by window and queries of a tile, without a copy."""
        lists = numbers.view(self._lists, -1)
        tiles = lists[: 2 * len(self.kinds)].view(len(self.kinds), 2 * lists.shape[1])
        found = dict(zip(self.kinds, tiles, strict=True))
        return {**found, CHUNKS: lists[-1]} if self.chunks else found


def prepare_capture(
    shapes: Sequence[Heads | TileKind], rows: int, *, texts: bool = False
) -> CapturedTiles | CapturedTexts:
    """Room for the tiles of layers of these shapes, in steps of up to so many rows."""
    heads = [shape for shape in shapes if isinstance(shape, Heads)]
    if not all(each.causal for each in heads):
        return captured_texts(heads, rows)
    kinds = dict.fromkeys((each.window, _queries_per_tile(each)) for each in heads)
    most = rows if texts else min(rows, MOST_CAPTURED_EXTENDS)
    return CapturedTiles(tuple(kinds), most if shapes else 0, CHUNKS in shapes, texts)


def _queries_per_tile(heads: Heads) -> int:
    capability, group = describe_device(heads.device).capability, heads.heads // heads.kv_heads
    tile = extend_tile_for(heads.head_dim, heads.dtype, capability, group)
    return queries_per_tile(heads.heads, heads.kv_heads, tile)


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions = NO_OPTIONS,
    scales: KVScales | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Attention of q [T, H, D] over the pool: [T, H · V].

    If `deterministic`, what a token yields depends on nothing but its query and what it sees, bit
    by bit: rows of one query are walked along as those of several are, and by one program each.

    Raises:
        ValueError: heads larger than 512, or more than 128 of them to a key/value head.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    value_dim = values.shape[2]
    _check_heads(heads, kv_heads, max(head_dim, value_dim))
    device, group = describe_device(q.device), heads // kv_heads
    assert isinstance(plan, PagedPlan)
    batch = plan.batch
    out = torch.empty((tokens, heads * value_dim), dtype=q.dtype, device=q.device)
    # By the queries' type, as `prepare_capture` has it: a pool may be of fewer bits.
    extended = extend_tile_for(head_dim, q.dtype, device.capability, group)
    pairs = batch.single_rows * kv_heads
    if batch.single_rows and deterministic:
        extend_single(
            *(q, keys, values, out, batch.row_table, plan.paged, batch.single_rows, plan.window),
            *(single_tile(extended, group, pairs), options, scales),
        )
    elif batch.single_rows:
        decoded = decode_tile_for(head_dim, keys.dtype, device.capability, pairs, group)
        splits = choose_splits(batch.single_rows, kv_heads, device.processors, decoded, plan.window)
        decode(
            q,
            keys,
            values,
            out,
            batch.row_table,
            plan.paged,
            batch.single_rows,
            plan.window,
            decoded,
            splits,
            options,
            scales,
        )
    if batch.rows > batch.single_rows:
        for causal in plan.kinds:
            tiles = plan.tiles(queries_per_tile(heads, kv_heads, extended), causal=causal)
            extend(
                q,
                keys,
                values,
                out,
                batch.row_table,
                tiles,
                plan.window,
                extended,
                options,
                scales,
                causal=causal,
                aligned=deterministic,
            )
    return out


def _check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    if head_dim > LARGEST_HEAD_DIM:
        raise ValueError(f"heads of size {head_dim}: at most {LARGEST_HEAD_DIM}")
    if heads // kv_heads > LARGEST_GROUP:
        raise ValueError(
            f"{heads} query heads share {kv_heads} key/value heads: at most {LARGEST_GROUP} each"
        )


def describe_device(device: torch.device) -> Gpu:
    """Of a GPU, or of what stands in for one where kernels are interpreted."""
    return gpu_of(device) or INTERPRETED
