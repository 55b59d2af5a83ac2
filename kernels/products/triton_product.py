"""Products with a weight, made the way that suits the number of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenpod.kernels.gpu.launch import OVERLAPPING_CAPABILITY, capability, launch_options
from tokenpod.kernels.gpu.peers import SymmetricBuffers
from tokenpod.kernels.operations.ops import AddLinear, AddSummand, Linear
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise.triton_pointwise import act_mul, named, rms_norm
from tokenpod.kernels.products import library
from tokenpod.kernels.products.product_kernels import add_partials, matrix, multiply_add, tiled
from tokenpod.kernels.products.product_sums import RanksOut, copies, fits
from tokenpod.kernels.products.product_tiles import ALL_LIBRARY, Kind, Tile, Tiles, measured

#: The matrix unit's smallest side.
LEAST_MATRIX_ROWS = 16

#: Outputs that one program sums the partial sums of.
PARTIALS_BLOCK = 512

#: Blocks of tokens of `Kind.TILED` that share the weight's rows at a time.
BESIDE = 8

#: A bulk request's address and size are multiples of this many bytes.
BULK_BYTES = 16


def prepare_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> Linear:
    """The product x · weightᵀ + bias with a weight [out, in]; `tiles` None means those measured."""
    table, (n, k) = table_for(weight, tiles), weight.shape
    if tiles is None:
        library.prepare_kernels(weight, bias)

    def linear(x: torch.Tensor) -> torch.Tensor:
        tile = table.choose(n, k, len(x))
        if tile.kind is Kind.LIBRARY:
            return library.multiply(x, weight, bias)
        y = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
        multiply(x, weight, bias, y, tile)
        return y

    return linear


def prepare_norm_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RowNorm,
    activation: Activation | None,
    tiles: Tiles | None = None,
) -> Linear:
    """The product norm(x) · weightᵀ + bias, gated if there is an activation.

    One kernel for a handful of tokens.
    """
    table, (n, k) = table_for(weight, tiles), weight.shape
    outputs = n if activation is None else n // 2
    if tiles is None:
        library.prepare_kernels(weight, bias)

    def normed_product(x: torch.Tensor) -> torch.Tensor:
        tile = table.choose(n, k, len(x))
        inner = None if tile.kind is Kind.MULTIPLY_ADD else norm
        if inner is not None:
            x = rms_norm(x, inner.weight, inner.epsilon)
        if tile.kind is Kind.LIBRARY:
            y = library.multiply(x, weight, bias)
            return y if activation is None else act_mul(y, activation)
        y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        multiply(x, weight, bias, y, tile, norm=None if inner else norm, activation=activation)
        return y

    return normed_product


def prepare_add_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> AddLinear:
    """The product residual += x · weightᵀ + bias: the sum is made where the product ends."""
    table, (n, k) = table_for(weight, tiles), weight.shape
    if tiles is None:
        library.prepare_kernels(weight, bias, add=True)

    def add_product(x: torch.Tensor, residual: torch.Tensor) -> None:
        tile = table.choose(n, k, len(x))
        if tile.kind is Kind.LIBRARY:
            library.multiply(x, weight, bias, residual)
        else:
            multiply(x, weight, bias, residual, tile, add=True)

    return add_product


def prepare_sum_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    buffers: SymmetricBuffers,
    add: AddSummand,
    tiles: Tiles | None = None,
) -> AddLinear:
    """The product residual += Σ (x · weightᵀ + bias) over ranks.

    One kernel for few tokens, whose programs join their outputs. Where programs along k share a
    sum, `add` gets their summands.
    """
    table, (n, k) = table_for(weight, tiles), weight.shape
    product = prepare_linear(weight, bias, tiles)

    def sum_product(x: torch.Tensor, residual: torch.Tensor) -> None:
        tile = table.choose_own(n, k, len(x))
        whole = tile.kind is Kind.MULTIPLY_ADD or (tile.kind is Kind.MATRIX and tile.splits == 1)
        if whole and fits(residual, buffers, _outputs_of(tile, gated=False)):
            multiply(x, weight, bias, residual, tile, buffers=buffers)
            return
        tile = table.choose(n, k, len(x))
        if tile.kind is Kind.MATRIX and tile.splits > 1 and bias is None and buffers.fit(residual):
            partials = _partials(tile.splits, residual)
            multiply(x, weight, None, residual, tile, partials=partials)
            add(partials, residual)
        else:
            add(product(x), residual)

    return sum_product


class MoreRows(NamedTuple):
    """First factors of one token's adapter, as rows behind the weight's: a kernel's argument."""

    #: Of `AdapterWeights`, whose strides follow.
    down: torch.Tensor
    #: [1] int64, of `PlanAdapters`, as the next.
    t_adapter: torch.Tensor
    ranks: torch.Tensor
    #: [parts · width] float32, written.
    inner: torch.Tensor
    slot_stride: int
    part_stride: int
    rank_stride: int
    parts: int
    #: Ranks of a part that there is room for.
    width: int


def _outputs_of(tile: Tile, *, gated: bool) -> int:
    """Of a token, in one program."""
    least = 1 if tile.kind is Kind.MULTIPLY_ADD else LEAST_MATRIX_ROWS
    return max(least, tile.block_n // 2 if gated else tile.block_n)


def table_for(weight: torch.Tensor, tiles: Tiles | None) -> Tiles:
    """Also makes sure that kernels may walk along the weight's rows."""
    if not weight.is_contiguous():
        raise ValueError(f"a weight [{len(weight)}, {weight.shape[1]}] is not contiguous")
    if tiles is not None:
        return tiles
    if capability(weight.device) is not None and weight.itemsize > 2:
        return ALL_LIBRARY  # tiles were measured, and fit, for numbers of 2 bytes
    return measured(capability(weight.device))


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    *,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    add: bool = False,
    buffers: SymmetricBuffers | None = None,
    more: MoreRows | None = None,
    partials: torch.Tensor | None = None,
) -> None:
    """Y [T, n] = (or += with `add`) x [T, k] · weightᵀ + bias, with one of our kernels.

    With an `activation` the weight is [2n, k], gates first. Rows of x, y and weight are contiguous;
    `norm` needs `Kind.MULTIPLY_ADD`. Only a `Kind.MATRIX` without activation heeds `splits`.

    With `buffers` y += the sum of all ranks' products, rounded before it is taken: y `fits`, there
    are neither splits nor an activation, and all ranks call this with the same tile.

    With `partials`, [splits, T, n] float32, the sums of programs that share a row are left there.

    With `more`, of one token and `Kind.MULTIPLY_ADD` without an activation, its rows are multiplied
    too.
    """
    if tile.kind is Kind.TILED:
        assert norm is None
        return _multiply_tiles(x, weight, bias, y, tile, activation, add=add)
    tokens, n = y.shape
    k = weight.shape[1]
    block_n, block_k = _outputs_of(tile, gated=activation is not None), tile.block_k
    block_t = triton.next_power_of_2(tokens)
    if tile.kind is Kind.MATRIX:
        block_t = max(block_t, LEAST_MATRIX_ROWS)
    common = {
        "BIAS": bias is not None,
        "ACTIVATION": named(activation, y.dtype),
        "ADD": add,
        "KIND": str(y.dtype).removeprefix("torch."),
        "RANK": buffers.rank if buffers else 0,
        "WORLD": buffers.world if buffers else 1,
        "COPIES": copies(block_t, block_n, tile.warps, y.dtype) if buffers else 1,
        "EVEN": k % block_k == 0,
        "BLOCK_T": block_t,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **launch_options(x.device),
    }
    common["AHEAD"] = tile.ahead if common["OVERLAP"] else 0
    common["BULK"] = tile.bulk and _allows_bulk(weight, block_k)
    splits = tile.splits if tile.kind is Kind.MATRIX and activation is None else 1
    grid = (triton.cdiv(n, block_n), splits)
    biases = weight if bias is None else bias
    ranks = RanksOut.of(y, buffers) if buffers else None
    if tile.kind is Kind.MULTIPLY_ADD:
        norm_weight, epsilon = (weight, 0.0) if norm is None else norm
        rows = more.parts * more.width if more else 0
        grid = (grid[0] + triton.cdiv(rows, block_n), 1)
        multiply_add[grid](
            x,
            weight,
            biases,
            norm_weight,
            y,
            x.stride(0),
            y.stride(0),
            tokens,
            n,
            k,
            epsilon,
            ranks,
            more,
            MORE=rows,
            NORM=norm is not None,
            **common,
        )
    else:
        assert norm is None
        target = y
        if splits > 1:
            target = _partials(splits, y) if partials is None else partials
            common |= {"BIAS": False, "ADD": False}
        matrix[grid](
            x,
            weight,
            biases,
            target,
            x.stride(0),
            target.stride(-2),
            tokens,
            n,
            k,
            ranks,
            SPLITS=splits,
            **common,
        )
        if splits > 1 and partials is None:
            add_up(target, bias, y, add=add)


def _partials(splits: int, y: torch.Tensor) -> torch.Tensor:
    """Room for the sums of programs that share rows of a weight, [splits, T, n] float32."""
    return torch.empty((splits, *y.shape), dtype=torch.float32, device=y.device)


def _multiply_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    activation: Activation | None,
    *,
    add: bool,
) -> None:
    """`multiply` of `Kind.TILED`."""
    (tokens, n), k, gated = y.shape, weight.shape[1], activation is not None
    block_t, block_n, block_k = tile.block_t, _outputs_of(tile, gated=gated), tile.block_k
    # A block of the last gates would have the first rows behind them, too: they are not written.
    generation = capability(x.device)
    has_engine = generation is None or generation >= OVERLAPPING_CAPABILITY
    described = has_engine and all(_allows_bulk(each, block_k) for each in (x, weight))
    tiled[(triton.cdiv(tokens, block_t) * triton.cdiv(n, block_n),)](
        TensorDescriptor.from_tensor(x, [block_t, block_k]) if described else x,
        TensorDescriptor.from_tensor(weight, [block_n, block_k]) if described else weight,
        y if bias is None else bias,
        y,
        x.stride(0),
        y.stride(0),
        tokens,
        n,
        k,
        BIAS=bias is not None,
        ACTIVATION=named(activation, y.dtype),
        ADD=add,
        DESCRIBED=described,
        EVEN=k % block_k == 0,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BESIDE=BESIDE,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(x.device),
    )


def add_up(
    partials: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, *, add: bool
) -> None:
    """Y [T, n] = (or += with `add`) what programs have summed, [splits, T, n] float32, + bias."""
    splits, tokens, n = partials.shape
    add_partials[(tokens, triton.cdiv(n, PARTIALS_BLOCK))](
        *(partials, y if bias is None else bias, y, y.stride(0), tokens, n),
        BIAS=bias is not None,
        ADD=add,
        SPLITS=splits,
        BLOCK=PARTIALS_BLOCK,
        num_warps=2,
        **launch_options(y.device),
    )


def asks_rows(weight: torch.Tensor) -> bool:
    """Whether programs may ask for rows before an input is there, each by one request."""
    generation = capability(weight.device)
    starts = (weight.data_ptr(), weight.stride(0) * weight.itemsize)
    overlaps = generation is not None and generation >= OVERLAPPING_CAPABILITY
    return overlaps and all(start % BULK_BYTES == 0 for start in starts)


def _allows_bulk(weight: torch.Tensor, block_k: int) -> bool:
    """Every row, and every block of it, begins where a bulk request may."""
    starts = (weight.data_ptr(), weight.stride(0) * weight.itemsize, block_k * weight.itemsize)
    return all(start % BULK_BYTES == 0 for start in starts)
