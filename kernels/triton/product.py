"""Products with a weight, made the way that suits the number of tokens."""

from __future__ import annotations

import torch
import triton
from torch.nn import functional

from tokenpod.kernels.ops import (
    Activation,
    AddLinear,
    HeadNorm,
    HeadsLinear,
    KVScales,
    Linear,
    RowNorm,
)
from tokenpod.kernels.triton.launch import capability, launch_options
from tokenpod.kernels.triton.pointwise import act_mul, rms_norm
from tokenpod.kernels.triton.product_heads import HeadsOut
from tokenpod.kernels.triton.product_kernels import add_shares, matrix, multiply_add
from tokenpod.kernels.triton.rotary import Angles, store_key_value
from tokenpod.kernels.triton.tiles import ALL_LIBRARY, Kind, Tile, Tiles, measured

#: The matrix unit's smallest side.
LEAST_MATRIX_ROWS = 16

#: Outputs that one program sums the shares of.
SHARES_BLOCK = 512

#: A bulk request's address and size are multiples of this many bytes.
BULK_BYTES = 16


def prepare_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> Linear:
    """See `ops.PrepareLinear`; `tiles` None means those measured."""
    table, (n, k) = _table_for(weight, tiles), weight.shape

    def linear(x: torch.Tensor) -> torch.Tensor:
        tile = table.choose(n, k, len(x))
        if tile.kind is Kind.LIBRARY:
            return functional.linear(x, weight, bias)
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
    """See `ops.PrepareNormLinear`: one kernel for a handful of tokens."""
    table, (n, k) = _table_for(weight, tiles), weight.shape
    outputs = n if activation is None else n // 2

    def normed_product(x: torch.Tensor) -> torch.Tensor:
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


def prepare_heads(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RowNorm,
    head_norm: HeadNorm | None,
    tiles: Tiles | None = None,
) -> HeadsLinear:
    """See `ops.PrepareHeads`: one kernel for few tokens, unless heads are normed."""
    product = prepare_norm_linear(weight, bias, norm, None, tiles)
    table, (n, k) = _table_for(weight, tiles), weight.shape

    def heads(
        residual: torch.Tensor,
        rotation: Angles,
        keys: torch.Tensor,
        values: torch.Tensor,
        t_slot: torch.Tensor,
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        tokens, (kv_heads, head_dim) = len(residual), keys.shape[1:]
        tile = table.choose(n, k, tokens)
        if head_norm is not None or not _owns_pairs(tile, head_dim):
            qkv = product(residual)
            return store_key_value(qkv, rotation, head_norm, keys, values, t_slot, scales)
        inner = norm if tile.kind is Kind.MULTIPLY_ADD else None
        if inner is None:
            residual = rms_norm(residual, norm.weight, norm.epsilon)
        count = n // head_dim - 2 * kv_heads
        q = torch.empty((tokens, count, head_dim), dtype=residual.dtype, device=residual.device)
        places = HeadsOut(
            rotation.t_position,
            t_slot,
            rotation.inverse_frequencies,
            rotation.scale,
            rotation.cos,
            rotation.sin,
            keys,
            values,
            keys.stride(0),
            values.stride(0),
            scales.keys if scales else None,
            scales.values if scales else None,
            count,
            kv_heads,
        )
        multiply(residual, weight, bias, q.flatten(1), tile, norm=inner, heads=places)
        return q

    return heads


def _owns_pairs(tile: Tile, head_dim: int) -> bool:
    """Whether a program's rows can be pairs of dimensions of one head."""
    if tile.kind is Kind.LIBRARY:
        return False
    rows = _rows_of(tile, gated=False)
    return rows % 2 == 0 and head_dim % rows == 0


def _rows_of(tile: Tile, *, gated: bool) -> int:
    """Outputs that a program makes."""
    least = LEAST_MATRIX_ROWS if tile.kind is Kind.MATRIX else 1
    return max(least, tile.block_n // 2 if gated else tile.block_n)


def prepare_add_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> AddLinear:
    """See `ops.PrepareAddLinear`: the sum is made where the product ends."""
    table, (n, k) = _table_for(weight, tiles), weight.shape
    transposed = weight.t()

    def add_product(x: torch.Tensor, residual: torch.Tensor) -> None:
        tile = table.choose(n, k, len(x))
        if tile.kind is not Kind.LIBRARY:
            multiply(x, weight, bias, residual, tile, add=True)
        elif bias is None:
            residual.addmm_(x, transposed)
        else:
            residual += functional.linear(x, weight, bias)

    return add_product


def _table_for(weight: torch.Tensor, tiles: Tiles | None) -> Tiles:
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
    heads: HeadsOut | None = None,
) -> None:
    """Y [T, n] = (or += with `add`) x [T, k] · weightᵀ + bias, with one of our kernels.

    With an `activation` the weight is [2n, k], gates first. Rows of x, y and weight are contiguous;
    `norm` needs `Kind.MULTIPLY_ADD`. Only a `Kind.MATRIX` without activation or heads heeds
    `splits`. With `heads`, y [T, H · D] gets queries and the pool the rest.
    """
    tokens, k = x.shape
    n = len(weight) if activation is None else len(weight) // 2
    block_n, block_k = _rows_of(tile, gated=activation is not None), tile.block_k
    common = {
        "BIAS": bias is not None,
        "ACTIVATION": "none" if activation is None else activation.value,
        "HALF": 0 if heads is None else heads.key_pool.shape[2] // 2,
        "ADD": add,
        "EVEN": k % block_k == 0,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **launch_options(x.device),
    }
    common["AHEAD"] = tile.ahead if common["OVERLAP"] else 0
    common["BULK"] = tile.bulk and _allows_bulk(weight, block_k)
    plain = activation is None and heads is None
    splits = tile.splits if tile.kind is Kind.MATRIX and plain else 1
    grid = (triton.cdiv(n, block_n), splits)
    biases = weight if bias is None else bias
    block_t = triton.next_power_of_2(tokens)
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
            heads,
            NORM=norm is not None,
            BLOCK_T=block_t,
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
            heads,
            BLOCK_T=max(block_t, LEAST_MATRIX_ROWS),
            SPLITS=splits,
            **common,
        )
        if splits > 1:
            add_shares[(tokens, triton.cdiv(n, SHARES_BLOCK))](
                target,
                biases,
                y,
                y.stride(0),
                tokens,
                n,
                BIAS=bias is not None,
                ADD=add,
                SPLITS=splits,
                BLOCK=SHARES_BLOCK,
                num_warps=2,
                **launch_options(x.device),
            )


def _allows_bulk(weight: torch.Tensor, block_k: int) -> bool:
    """Every row, and every block of it, begins where a bulk request may."""
    starts = (weight.data_ptr(), weight.stride(0) * weight.itemsize, block_k * weight.itemsize)
    return all(start % BULK_BYTES == 0 for start in starts)
