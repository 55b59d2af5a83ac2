"""Products with a weight, made the way that suits the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch.nn import functional

from tokenpod.kernels.ops import AddLinear, Linear
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.triton.adapter_sums import Terms
from tokenpod.kernels.triton.launch import capability, launch_options
from tokenpod.kernels.triton.peers import SymmetricBuffers
from tokenpod.kernels.triton.pointwise import act_mul, rms_norm
from tokenpod.kernels.triton.product_kernels import add_partials, matrix, multiply_add
from tokenpod.kernels.triton.product_sums import RanksOut, copies, fits
from tokenpod.kernels.triton.tiles import ALL_LIBRARY, Kind, Tile, Tiles, measured

#: The matrix unit's smallest side.
LEAST_MATRIX_ROWS = 16

#: Outputs that one program sums the partial sums of.
PARTIALS_BLOCK = 512

#: Columns of adapters that a program on the matrix unit multiplies at once.
COLUMNS = 64

#: A bulk request's address and size are multiples of this many bytes.
BULK_BYTES = 16


def prepare_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> Linear:
    """See `ops.PrepareLinear`; `tiles` None means those measured."""
    table, (n, k) = table_for(weight, tiles), weight.shape

    def linear(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        tile = table.choose(n, k, len(x))
        if tile.kind is Kind.LIBRARY:
            y = functional.linear(x, weight, bias)
        else:
            y = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
            multiply(x, weight, bias, y, tile)
        return y if delta is None else y.add_(delta)

    return linear


def prepare_norm_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RowNorm,
    activation: Activation | None,
    tiles: Tiles | None = None,
) -> Linear:
    """See `ops.PrepareNormLinear`: one kernel for a handful of tokens."""
    table, (n, k) = table_for(weight, tiles), weight.shape
    outputs = n if activation is None else n // 2
    plain = prepare_linear(weight, bias, tiles)

    def normed_product(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        if delta is not None:
            y = plain(rms_norm(x, norm.weight, norm.epsilon), delta)
            return y if activation is None else act_mul(y, activation)
        tile = table.choose(n, k, len(x))
        inner = None if tile.kind is Kind.MULTIPLY_ADD else norm
        if inner is not None:
            x = rms_norm(x, inner.weight, inner.epsilon)
        if tile.kind is Kind.LIBRARY:
            y = functional.linear(x, weight, bias)
            return y if activation is None else act_mul(y, activation)
        y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        multiply(x, weight, bias, y, tile, norm=None if inner else norm, activation=activation)
        return y

    return normed_product


def prepare_add_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> AddLinear:
    """See `ops.PrepareAddLinear`: the sum is made where the product ends."""
    table, (n, k) = table_for(weight, tiles), weight.shape
    transposed = weight.t()

    def add_product(
        x: torch.Tensor, residual: torch.Tensor, delta: torch.Tensor | None = None
    ) -> None:
        if delta is not None:
            residual += delta
        tile = table.choose(n, k, len(x))
        if tile.kind is not Kind.LIBRARY:
            multiply(x, weight, bias, residual, tile, add=True)
        elif bias is None:
            residual.addmm_(x, transposed)
        else:
            residual += functional.linear(x, weight, bias)

    return add_product


def prepare_sum_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    buffers: SymmetricBuffers,
    apart: AddLinear,
    tiles: Tiles | None = None,
) -> AddLinear:
    """See `ops.PrepareSumLinear`: one kernel for few tokens, whose programs join their outputs."""
    table, (n, k) = table_for(weight, tiles), weight.shape

    def sum_product(
        x: torch.Tensor, residual: torch.Tensor, delta: torch.Tensor | None = None
    ) -> None:
        tile = table.choose_own(n, k, len(x))
        whole = tile.kind is Kind.MULTIPLY_ADD or (tile.kind is Kind.MATRIX and tile.splits == 1)
        joined = whole and fits(residual, buffers, outputs_of(tile, gated=False))
        if joined and delta is None:
            multiply(x, weight, bias, residual, tile, buffers=buffers)
        else:
            apart(x, residual, delta)

    return sum_product


@dataclass(frozen=True, slots=True)
class TermsOf:
    """Adapters' terms of one product."""

    read: Terms
    #: Of `inner`.
    splits: int
    parts: int
    width: int
    #: Whether there are biases.
    bias: bool


def outputs_of(tile: Tile, *, gated: bool) -> int:
    """Of a token, in one program."""
    least = LEAST_MATRIX_ROWS if tile.kind is Kind.MATRIX else 1
    return max(least, tile.block_n // 2 if gated else tile.block_n)


def table_for(weight: torch.Tensor, tiles: Tiles | None) -> Tiles:
    """Also makes sure that kernels may walk along the weight's rows."""
    if not weight.is_contiguous():
        raise ValueError(f"a weight [{len(weight)}, {weight.shape[1]}] is not contiguous")
    if tiles is not None:
        return tiles
    if weight.is_cuda and weight.itemsize > 2:
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
    terms: TermsOf | None = None,
) -> None:
    """Y [T, n] = (or += with `add`) x [T, k] · weightᵀ + bias, with one of our kernels.

    With an `activation` the weight is [2n, k], gates first. Rows of x, y and weight are contiguous;
    `norm` needs `Kind.MULTIPLY_ADD`. Only a `Kind.MATRIX` without activation heeds `splits`.

    With `buffers` y += the sum of all ranks' products, rounded before it is taken: y `fits`, there
    are neither splits nor an activation, and all ranks call this with the same tile.

    `terms`: what adapters add to x · weightᵀ, with a `norm` to that of inputs before it; a part of
    the outputs must be whole programs' (`outputs_of`).
    """
    tokens, n = y.shape
    k = weight.shape[1]
    block_n, block_k = outputs_of(tile, gated=activation is not None), tile.block_k
    block_t = triton.next_power_of_2(tokens)
    if tile.kind is Kind.MATRIX:
        block_t = max(block_t, LEAST_MATRIX_ROWS)
    common = {
        "BIAS": bias is not None,
        "ACTIVATION": "none" if activation is None else activation.value,
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
        "TERM_SPLITS": terms.splits if terms else 0,
        "TERM_PARTS": terms.parts if terms else 1,
        "TERM_WIDTH": terms.width if terms else 16,
        "TERM_BIAS": terms is not None and terms.bias,
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
            terms.read if terms else None,
            NORM=norm is not None,
            **common,
        )
    else:
        assert norm is None
        target = y
        if splits > 1:
            target = torch.empty((splits, tokens, n), dtype=torch.float32, device=y.device)
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
            terms.read if terms else None,
            COLUMNS=COLUMNS,
            SPLITS=splits,
            **common,
        )
        if splits > 1:
            add_partials[(tokens, triton.cdiv(n, PARTIALS_BLOCK))](
                target,
                biases,
                y,
                y.stride(0),
                tokens,
                n,
                BIAS=bias is not None,
                ADD=add,
                SPLITS=splits,
                BLOCK=PARTIALS_BLOCK,
                num_warps=2,
                **launch_options(x.device),
            )


def _allows_bulk(weight: torch.Tensor, block_k: int) -> bool:
    """Every row, and every block of it, begins where a bulk request may."""
    starts = (weight.data_ptr(), weight.stride(0) * weight.itemsize, block_k * weight.itemsize)
    return all(start % BULK_BYTES == 0 for start in starts)
