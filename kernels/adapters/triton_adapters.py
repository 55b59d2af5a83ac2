"""Low-rank adapters on a GPU: two launches for each product, whatever tokens have which adapter.

    tokens by adapter         sorted once a step: each adapter's lie beside each other
    tiles of them             one adapter each, so its factors are read once for all of its tokens
    shrink   x · downᵀ        inputs divided among programs, whose parts are kept apart
    expand   Σ parts · upᵀ    outputs divided among programs, which finish the base's product: they
                              scale it (DoRA), gate it, or add it to the stream

The grids depend on the number of tokens and slots alone, and what is in which slot, of which rank,
is read on the device: so both are part of captured steps, and a captured step stays right when
slots change. The gathering by segments is that of Punica and S-LoRA (Chen et al. 2023, Sheng et al.
2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from tokenpod.kernels.adapters.adapter_kernels import expand_tiles, plan_tiles, shrink_tiles
from tokenpod.kernels.adapters.adapter_rows import expand_rows
from tokenpod.kernels.gpu.launch import capability, launch_options
from tokenpod.kernels.operations.adapter_ops import AdapterPlan, AdapterWeights
from tokenpod.kernels.operations.pointwise_ops import Activation

#: Steps of up to so many tokens are planned by one launch.
MOST_PLANNED = 128
#: Ranks that a program multiplies at once: the least that a matrix unit takes.
RANKS = 16
#: By row, a part of so many outputs, as a head's, has programs of more of them: a launch of tens of
#: thousands, most of which have nothing to add, takes longer than what they add.
WIDE, WIDE_OUTPUTS, WIDE_WARPS = 1 << 15, 512, 2
#: Rows that it takes at least, however few tokens there are.
_LEAST_ROWS = 16
#: Parts of a product, at most: queries, keys and values.
_MOST_PARTS = 3


class AdapterTiles(NamedTuple):
    """How the two products are cut."""

    #: Tokens of a tile.
    tokens: int
    #: Inputs that a program reads at once, and among how many programs (a power of two) they are
    #: divided.
    inputs: int
    splits: int
    #: Of a program that reads these.
    warps: int
    #: Outputs of a program, and its warps.
    outputs: int
    output_warps: int
    #: Whether these programs take a tile's tokens one after the other, without the matrix unit.
    by_row: bool = False


#: For steps of up to so many tokens; beyond, the last.
TILES = (
    (16, AdapterTiles(8, 256, 8, 4, 128, 1, by_row=True)),
    (128, AdapterTiles(8, 256, 4, 4, 128, 1, by_row=True)),
    (256, AdapterTiles(16, 256, 4, 4, 256, 4)),
    (1 << 31, AdapterTiles(64, 128, 1, 4, 128, 4)),
)


@dataclass(frozen=True, slots=True)
class AdaptedTokens(AdapterPlan):
    """Which tokens of a step have which adapter."""

    #: [T] int64: tokens in order of their slots; those without an adapter first.
    order: torch.Tensor
    #: [tiles, 4] int32: its slot, from 1, 0 being none, or one of rank 0; the place of its first
    #: token in `order`; how many tokens it has, perhaps none; the slot's rank.
    tiles: torch.Tensor
    #: [S] int32
    ranks: torch.Tensor
    cut: AdapterTiles
    #: [T], as it was given.
    t_adapter: torch.Tensor


def tiles_for(tokens: int) -> AdapterTiles:
    """How products of so many tokens are cut."""
    return next(cut for most, cut in TILES if tokens <= most)


def plan_adapters(
    t_adapter: torch.Tensor, ranks: torch.Tensor, cut: AdapterTiles | None = None
) -> AdaptedTokens:
    """The plan of a step; see `PlanAdapters`. Nothing waits for the device. `cut`: another one."""
    tokens, slots = len(t_adapter), len(ranks)
    cut = cut or tiles_for(tokens)
    if tokens <= MOST_PLANNED:
        return _planned(t_adapter, ranks, cut)
    kinds = torch.arange(slots + 1, device=t_adapter.device)
    counts = (t_adapter[:, None] == kinds).sum(0)
    ends, last = counts.cumsum(0), (-(-counts // cut.tokens)).cumsum(0)
    # Each slot begins a tile, and the others are full.
    number = torch.arange(tokens // cut.tokens + min(slots + 1, tokens), device=t_adapter.device)
    slot = torch.searchsorted(last, number, right=True).clamp_(max=slots)
    before = number - (last - (-(-counts // cut.tokens)))[slot]
    first = (ends - counts)[slot] + before * cut.tokens
    length = (ends[slot] - first).clamp_(0, cut.tokens)
    # Nothing is read of an adapter for tiles without tokens.
    rank = torch.where((slot > 0) & (length > 0), ranks[(slot - 1).clamp_(0)], 0)
    own = torch.where(rank > 0, slot, 0)
    tiles = torch.stack((own, first, length, rank), dim=1).to(torch.int32)
    order = torch.sort(t_adapter, stable=True).indices
    return AdaptedTokens(order, tiles, ranks, cut, t_adapter)


def _planned(t_adapter: torch.Tensor, ranks: torch.Tensor, cut: AdapterTiles) -> AdaptedTokens:
    """The same of few tokens, in one launch."""
    tokens, slots, device = len(t_adapter), len(ranks), t_adapter.device
    tiles = tokens // cut.tokens + min(slots + 1, tokens)
    plan = AdaptedTokens(
        torch.empty(tokens, dtype=torch.int64, device=device),
        torch.empty((tiles, 4), dtype=torch.int32, device=device),
        ranks,
        cut,
        t_adapter,
    )
    plan_tiles[(1,)](
        t_adapter,
        ranks,
        plan.order,
        plan.tiles,
        tokens,
        slots,
        tiles,
        TOKENS=cut.tokens,
        T_PADDED=triton.next_power_of_2(tokens),
        S_PADDED=triton.next_power_of_2(slots + 1),
        N_PADDED=triton.next_power_of_2(tiles),
        num_warps=4,
    )
    return plan


def adapt(x: torch.Tensor, y: torch.Tensor, weights: AdapterWeights, plan: AdapterPlan) -> None:
    """Add to y [T, out] what each token's adapter makes of x [T, in], in place.

    Rows of x and y are contiguous.
    """
    assert isinstance(plan, AdaptedTokens)
    expand(shrink(x, weights, plan), weights, plan, y)


def shrink(
    x: torch.Tensor,
    weights: AdapterWeights,
    plan: AdaptedTokens,
    inner: torch.Tensor | None = None,
) -> torch.Tensor:
    """[splits, T, parts, width] float32: parts of x · downᵀ; in `inner` if there is one.

    Of tokens without an adapter and beyond an adapter's rank it says nothing.
    """
    cut, tokens, (_, parts, rank, inputs) = plan.cut, len(x), weights.down.shape
    assert parts <= _MOST_PARTS
    blocks, width = triton.cdiv(rank, RANKS), width_of(rank)
    if inner is None:
        inner = room_for(x, weights, plan)
    shrink_tiles[(len(plan.tiles), parts * blocks, cut.splits)](
        x,
        weights.down,
        plan.order,
        plan.tiles,
        inner,
        tokens,
        inputs,
        triton.cdiv(triton.cdiv(inputs, cut.splits), cut.inputs) * cut.inputs,
        x.stride(0),
        *weights.down.stride()[:3],
        PARTS=parts,
        BLOCKS=blocks,
        WIDTH=width,
        TOKENS=max(cut.tokens, _LEAST_ROWS),
        INPUTS=cut.inputs,
        RANKS=RANKS,
        num_warps=cut.warps,
        **launch_options(x.device),
    )
    return inner


def room_for(x: torch.Tensor, weights: AdapterWeights, plan: AdaptedTokens) -> torch.Tensor:
    """What `shrink` writes to."""
    _, parts, rank, _ = weights.down.shape
    shape = (plan.cut.splits, len(x), parts, width_of(rank))
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def expand(
    inner: torch.Tensor,
    weights: AdapterWeights,
    plan: AdaptedTokens,
    y: torch.Tensor,
    *,
    stream: torch.Tensor | None = None,
    gated: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> None:
    """Y [T, out], the base's product, becomes what adapters make of it.

    Or y stays as it is: `stream` [T, out] += that; or, with an `activation`, `gated` [T, out / 2]
    becomes its gated unit, whose first part are gates.
    """
    cut, (splits, tokens, parts, width) = plan.cut, inner.shape
    rows = [*weights.rows, *[0] * (_MOST_PARTS - parts)]
    outputs, warps = cut.outputs, cut.output_warps
    if cut.by_row and activation is None and max(rows) >= WIDE:
        outputs, warps = WIDE_OUTPUTS, WIDE_WARPS
    columns = sum(triton.cdiv(n, outputs) for n in rows)
    if activation is not None:
        assert gated is not None, activation
        assert weights.rows[0] * 2 == sum(weights.rows), weights.rows
        columns = triton.cdiv(weights.rows[0], cut.outputs)
    bias, scale = weights.bias, weights.scale
    out = next(each for each in (gated, stream, y) if each is not None)
    launch = expand_tiles[(len(plan.tiles), columns)]
    more: dict[str, Any] = {
        "TOKENS": max(cut.tokens, _LEAST_ROWS),
        "ASSEMBLY": capability(y.device) is not None,
    }
    if cut.by_row:
        launch, more = expand_rows[(columns, len(plan.tiles))], {"num_stages": 1}
    launch(
        inner,
        weights.up,
        bias,
        scale,
        weights.scaled,
        plan.order,
        plan.tiles,
        y,
        out,
        tokens,
        *rows,
        *weights.up.stride()[:2],
        0 if bias is None else bias.stride(0),
        0 if scale is None else scale.stride(0),
        y.stride(0),
        out.stride(0),
        INTO=stream is not None,
        ACTIVATION="none" if activation is None else activation.value,
        PARTS=parts,
        WIDTH=width,
        SPLITS=splits,
        OUTPUTS=outputs,
        RANKS=RANKS,
        num_warps=warps,
        **more,
        **launch_options(y.device),
    )


def width_of(rank: int) -> int:
    """Numbers that `shrink` keeps room for, of each part of a token."""
    return max(1 << (rank - 1).bit_length(), RANKS)
