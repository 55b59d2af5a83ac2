"""Products with weights of fewer bits: which kernel makes them, for how many tokens.

Weights whose inputs stay as they are go another way (`lane_products`), but for e4m3. Where the
format rounds inputs, one token has a kernel of its own (`token_product`); more are rounded by one
launch (`input_rounding`) and multiplied on the matrix unit as they are (`matrix`), or by the
library, where it scales by rows. What is left the library multiplies, from a copy in 16 bits.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenpod.kernels.gpu.launch import capability, launch_options, most_stages
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.pointwise.triton_pointwise import rms_norm
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.grouped import GroupedWeight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.quantised.around import Around, Product, put
from tokenpod.kernels.products.quantised.input_rounding import Rounded, round_inputs
from tokenpod.kernels.products.quantised.lane_products import is_aligned, prepare_lanes
from tokenpod.kernels.products.quantised.lanes import Lanes, lanes_of
from tokenpod.kernels.products.quantised.matrix import multiply_rounded
from tokenpod.kernels.products.quantised.parts import LEAST_COLUMNS
from tokenpod.kernels.products.quantised.quantised_tiles import (
    MatrixTile,
    Tiles,
    TokenTile,
    measured,
)
from tokenpod.kernels.products.quantised.token_product import THREAD_BYTES, multiply_token, token_of
from tokenpod.kernels.products.triton_product import add_up

#: The generation from which on the matrix unit takes e4m3, and the library scales by rows.
FP8_CAPABILITY = (8, 9)
SCALED_CAPABILITY = (9, 0)
#: Inputs that the matrix unit takes of e4m3 at a time.
LEAST_GROUP = 32
#: The matrix unit's fewest rows of factors in shared memory.
LEAST_TILE = 64
#: Tokens from which on the library's product is faster, where it scales.
MANY = 65

Format = Int8Weight | Fp8Weight
AnyFormat = Format | Int4Weight | GroupedWeight | Lanes


def prepare_product(
    weight: AnyFormat, bias: torch.Tensor | None, around: Around, tiles: Tiles | None = None
) -> Product:
    """The product with a weight: x after its norm, gated or added to y, as `around` says."""
    if isinstance(weight, Lanes):
        return prepare_lanes(weight, bias, around, tiles)
    as_they_come = isinstance(weight, Int8Weight) and weight.rounding is None
    if isinstance(weight, (Int4Weight, GroupedWeight)) or as_they_come:
        made = lanes_of(weight)
        if made is None:
            return _composed(weight, bias, around)
        return prepare_lanes(made, bias, around, tiles)
    (n, k), kind = weight.shape, kind_of(weight)
    chosen = tiles or measured(capability(weight.numbers.device))
    plain = _composed(weight, bias, around)
    but = None if _can_take_token(weight) else TokenTile

    def product(x: torch.Tensor, y: torch.Tensor) -> None:
        tile = None if x.itemsize > 2 else chosen.choose(kind, n, k, len(x), but=but)
        if len(x) >= MANY and _library_scales(weight, x):
            tile = None
        if isinstance(tile, TokenTile) and weight.rounding is not None:
            token = token_of(x, weight.rounding, around.norm, tile)
            which = token, around.norm, weight.numbers, weight.scale
            multiply_token(*which, bias, y, around.activation, around.add, tile)
        elif isinstance(tile, MatrixTile) and weight.rounding is not None and _can_round(weight):
            rounded = round_inputs(x, weight.rounding, norm=around.norm)
            multiply(rounded, weight, bias, y, around.activation, around.add, tile)
        else:
            plain(x, y)

    return product


def kind_of(weight: Format) -> str:
    """The name under which its tiles are."""
    if isinstance(weight, Int8Weight):
        if not weight.numbers.is_contiguous():
            raise ValueError(f"a weight {list(weight.shape)} of 8 bits is not contiguous")
        return "int8-rounded"
    return "fp8" if weight.by_output else "fp8-blocks"


def _can_round(weight: Format) -> bool:
    """Whether the matrix unit may have it with rounded inputs."""
    if not isinstance(weight, Fp8Weight):
        return True
    generation = capability(weight.numbers.device)
    if weight.rounding is None or (generation is not None and generation < FP8_CAPABILITY):
        return False
    if weight.by_output:
        return weight.rounding.group is None
    group = weight.rounding.group or weight.columns
    return weight.columns % LEAST_GROUP == 0 and group % LEAST_GROUP == 0


def _can_take_token(weight: Format) -> bool:
    """Whether `token_product` has it: e4m3 with a scale per row, and inputs that it can round."""
    by_output = isinstance(weight, Fp8Weight) and weight.by_output
    return by_output and _can_round(weight) and weight.shape[1] % THREAD_BYTES == 0


def _composed(weight: QuantisedWeight, bias: torch.Tensor | None, around: Around) -> Product:
    """One operation after the other."""

    def product(x: torch.Tensor, y: torch.Tensor) -> None:
        if isinstance(weight, Fp8Weight) and _library_scales(weight, x):
            made = _scaled_by_rows(x, weight, bias, around.norm)
        else:
            if around.norm is not None:
                x = rms_norm(x, around.norm.weight, around.norm.epsilon)
            made = _many(x, weight, bias)
        put(made, y, around)

    return product


def _scaled_by_rows(
    x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None, norm: RowNorm | None
) -> torch.Tensor:
    """X after its norm · weightᵀ + bias by the library, both of e4m3 with a scale per row."""
    assert weight.rounding is not None
    rounded = round_inputs(x, weight.rounding, norm=norm)
    return torch._scaled_mm(
        rounded.numbers,
        weight.numbers.t(),
        scale_a=rounded.scale.view(-1, 1),
        scale_b=weight.scale.t(),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


def _many(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """X · weightᵀ + bias by the library, for as many tokens as there may be.

    A weight of 8 bits is written out in 16 for it: hundreds of tokens pay for that.
    """
    if isinstance(weight, (Fp8Weight, Int8Weight)) and x.itemsize == 2:
        rounded_x = weight.rounded_inputs(x).to(x.dtype)
        return functional.linear(rounded_x, weight.dequantised(x.dtype), bias)
    return weight.multiply(x, bias)


def _library_scales(weight: QuantisedWeight, x: torch.Tensor) -> bool:
    """Its product with a scale per row of both, which makes bfloat16 of multiples of 16."""
    generation = capability(x.device)
    return (
        isinstance(weight, Fp8Weight)
        and generation is not None
        and generation >= SCALED_CAPABILITY
        and x.dtype == torch.bfloat16
        and weight.by_output
        and weight.rounding is not None
        and weight.rounding.group is None
        and not any(size % 16 for size in weight.shape)
    )


def _can_describe(x: torch.Tensor, weight: torch.Tensor, tile: MatrixTile) -> bool:
    """Whether the tensor memory engine can fetch blocks of both factors, and writes others."""
    generation = capability(x.device)
    has_engine = generation is None or generation >= SCALED_CAPABILITY
    return has_engine and tile.parts == 1 and is_aligned(x) and is_aligned(weight)


def multiply(
    x: Rounded,
    weight: Format,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    activation: Activation | None,
    add: bool,
    tile: MatrixTile,
) -> None:
    """Y [T, n] = (or += with `add`) x · weightᵀ + bias on the matrix unit; gates come first."""
    tokens, n = y.shape
    width = x.numbers.shape[1]
    layout, block_k = (1, 1, 1, 1, 1), tile.block_k
    kind, grouped = "fp8" if isinstance(weight, Fp8Weight) else "int8", False
    if isinstance(weight, Fp8Weight) and not weight.by_output:
        # Where ranks cut blocks, those of the weight are narrower than groups of inputs.
        group = (weight.rounding and weight.rounding.group) or weight.columns
        block_k = gcd(block_k, gcd(weight.columns, group))
        grouped = weight.scale.shape[1] > 1 or len(x.scale) > 1
        layout = (
            *(weight.scale.shape[1], weight.rows, weight.columns // block_k),
            *(len(x.scale), group // block_k),
        )
    numbers, stored = x.numbers, weight.numbers
    if capability(y.device) is None:
        numbers, stored = numbers.view(torch.int8), stored.view(torch.int8)
    gates = 1 if activation is None else 2
    block_t = min(tile.block_t, triton.next_power_of_2(tokens))
    # One scale for all rows of a tile, and one for all that its gates open.
    whole = grouped and layout[1] % tile.block_n == 0 and n % tile.block_n == 0
    shared = whole and tile.parts == 1 and block_t >= LEAST_TILE
    splits = 1 if activation is not None else tile.splits
    rows = tile.block_n * gates
    columns = max(tile.parts * block_t, LEAST_COLUMNS)
    described = tile.described and columns == block_t
    described = described and _can_describe(x.numbers, weight.numbers, tile)
    # Tables have tiles of shapes as they were timed: with gates, a tile has twice the rows.
    stages = most_stages(y.device, block_k * (rows * tile.parts + columns))
    target = y
    if splits > 1:
        target = torch.empty((splits, tokens, n), dtype=torch.float32, device=y.device)
    written = described and splits == 1 and is_aligned(y)
    if described:
        numbers = TensorDescriptor.from_tensor(numbers, [block_t, block_k])
        stored = TensorDescriptor.from_tensor(stored, [tile.block_n, block_k])
    if written:
        target = TensorDescriptor.from_tensor(y, [block_t, tile.block_n])
    multiply_rounded[(triton.cdiv(n, tile.block_n) * triton.cdiv(tokens, block_t), splits)](
        *(numbers, x.scale, stored, weight.scale),
        *(bias, target, n if splits > 1 else y.stride(0), tokens, n, width, *layout),
        KIND=kind,
        GROUPED=grouped,
        SHARED=shared,
        DESCRIBED=described,
        WRITTEN=written,
        ACTIVATION="none" if activation is None else activation.value,
        ADD=add and splits == 1,
        EVEN=width % (block_k * tile.parts * splits) == 0,
        SPLITS=splits,
        PARTS=tile.parts,
        COLUMNS=columns,
        BLOCK_T=block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        PANEL=tile.panel,
        STAGES=min(tile.stages, stages),
        num_warps=tile.warps,
        **launch_options(y.device),
    )
    if splits > 1:
        add_up(target, bias, y, add=add)
