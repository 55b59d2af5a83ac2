"""Products with weights of fewer bits: which kernel makes them, for how many tokens.

- a handful: `multiply_add`, which norms, gates and adds as the product of 16 bits does;
- more: inputs are rounded to 8 bits, or made two digits of 8 bits, by one launch (`rounding`), and
  multiplied on the matrix unit as they are (`matrix`);
- many, bound by arithmetic: where the format rounds inputs the same, or the library's product of 8
  bits; where it does not, the library's product of 16 bits with a float copy of the weight.

What a token gets depends on which by rounding alone: where the format rounds inputs, all do.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch.nn import functional

from tokenpod.kernels.formats.fp8 import Fp8Weight
from tokenpod.kernels.formats.grouped import GroupedWeight
from tokenpod.kernels.formats.int4 import Int4Weight, block_of
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.triton.launch import capability, launch_options
from tokenpod.kernels.triton.pointwise import act_mul, rms_norm
from tokenpod.kernels.triton.product import BULK_BYTES, PARTIALS_BLOCK
from tokenpod.kernels.triton.product_kernels import add_partials
from tokenpod.kernels.triton.quantised.around import Around, Product, start_from
from tokenpod.kernels.triton.quantised.grouped import prepare_grouped
from tokenpod.kernels.triton.quantised.matrix import multiply_rounded
from tokenpod.kernels.triton.quantised.multiply_add import multiply_add_bytes, multiply_add_words
from tokenpod.kernels.triton.quantised.rounding import Rounded, arrange_inputs, round_inputs
from tokenpod.kernels.triton.quantised.stored_products import multiply_stored
from tokenpod.kernels.triton.quantised.tiles import AddTile, MatrixTile, StoredTile, Tiles, measured
from tokenpod.kernels.triton.quantised.walked import Walked, walked
from tokenpod.kernels.triton.quantised.widen import widen_bytes, widen_words

#: The matrix unit's smallest side.
LEAST_MATRIX_ROWS = 16
#: The generation from which on the matrix unit takes e4m3, and the library scales by rows.
FP8_CAPABILITY = (8, 9)
SCALED_CAPABILITY = (9, 0)

#: Inputs that programs of `multiply_add_words` keep in registers.
MOST_IN_REGISTERS = 1 << 15

Format = Int8Weight | Fp8Weight | Int4Weight
AnyFormat = Format | GroupedWeight


def prepare_product(
    weight: AnyFormat, bias: torch.Tensor | None, around: Around, tiles: Tiles | None = None
) -> Product:
    """The product with a weight: x after its norm, gated or added to y, as `around` says."""
    if isinstance(weight, GroupedWeight):
        made = prepare_grouped(weight, bias, around, tiles)
        return _composed(weight, bias, around) if made is None else made
    known = kind_of(weight)
    chosen = tiles or measured(capability(_device(weight)))
    plain = _composed(weight, bias, around)
    if known is None:
        return plain
    (n, k), kind = weight.shape, known
    stored = _stored(weight)

    def product(x: torch.Tensor, y: torch.Tensor, delta: torch.Tensor | None) -> None:
        tile = None if x.itemsize > 2 else chosen.choose(kind, n, k, len(x))
        if isinstance(tile, AddTile) and _can_add(weight, len(x)):
            _multiply_add(x, weight, bias, y, delta, around, tile)
        elif isinstance(tile, MatrixTile) and _can_round(weight):
            rounded = _rounded(x, weight, around.norm)
            start_from(
                delta,
                y,
                around,
                lambda out, gate, add: multiply(rounded, weight, bias, out, gate, add, tile),
            )
        elif isinstance(tile, StoredTile) and stored is not None:
            arranged = _arranged(x, weight, around.norm)
            start_from(
                delta,
                y,
                around,
                lambda out, gate, add: multiply_stored(
                    arranged, stored, bias, out, gate, add, tile
                ),
            )
        else:
            plain(x, y, delta)

    return product


def kind_of(weight: Format) -> str | None:
    """The name under which its tiles are; None: no kernel takes it."""
    if isinstance(weight, Int4Weight):
        regular = weight.index is None and weight.group % block_of(weight.group) == 0
        return "int4" if regular else None
    if isinstance(weight, Int8Weight):
        if not weight.numbers.is_contiguous():
            raise ValueError(f"a weight {list(weight.shape)} of 8 bits is not contiguous")
        return "int8" if weight.rounding is None else "int8-rounded"
    return "fp8" if weight.by_output else "fp8-blocks"


def _device(weight: Format) -> torch.device:
    return weight.packed.device if isinstance(weight, Int4Weight) else weight.numbers.device


def _can_add(weight: Format, tokens: int) -> bool:
    """Whether inputs stay as they are, and a row has one scale; or of 4 bits, is one tile."""
    if isinstance(weight, Int4Weight):
        return tokens == 1 and weight.width <= MOST_IN_REGISTERS
    by_output = weight.by_output if isinstance(weight, Fp8Weight) else True
    return weight.rounding is None and by_output


def _can_round(weight: Format) -> bool:
    """Whether the matrix unit may have it with rounded inputs."""
    if not isinstance(weight, Fp8Weight):
        return not isinstance(weight, Int4Weight) or block_of(weight.group) >= 2 * 32
    generation = capability(_device(weight))
    if weight.rounding is None or (generation is not None and generation < FP8_CAPABILITY):
        return False
    if weight.by_output:
        return weight.rounding.group is None
    return weight.rounding.group == weight.columns and weight.columns % 32 == 0


def _rounded(x: torch.Tensor, weight: Format, norm: RowNorm | None) -> Rounded:
    if isinstance(weight, Int4Weight):
        run = block_of(weight.group) // 8
        return round_inputs(x, None, norm=norm, run=run, order=weight.order)
    return round_inputs(x, weight.rounding, norm=norm)


def _stored(weight: Format) -> Walked | None:
    """The same bytes as tiles that are widened; None where inputs are rounded, or none fit."""
    if not isinstance(weight, Int4Weight):
        return walked(weight) if weight.rounding is None else None
    # Words of a block of inputs are two planes, if inputs are in the order of the nibbles.
    block = block_of(weight.group)
    zero = None if weight.zero is None else (weight.zero.to(torch.int16) - 8).to(torch.int8)
    packed = weight.packed.view(torch.int8)
    inputs = 2 * packed.shape[1]
    return Walked("int4", packed, weight.scale, zero, None, inputs, block // 2, weight.group)


def _arranged(x: torch.Tensor, weight: Format, norm: RowNorm | None) -> torch.Tensor:
    """Inputs after their norm, as `_stored` wants them."""
    if isinstance(weight, Int4Weight):
        return arrange_inputs(x, norm, block_of(weight.group) // 8, weight.order)
    return x if norm is None else rms_norm(x, norm.weight, norm.epsilon)


def _composed(weight: AnyFormat, bias: torch.Tensor | None, around: Around) -> Product:
    """One operation after the other."""

    def product(x: torch.Tensor, y: torch.Tensor, delta: torch.Tensor | None) -> None:
        if around.norm is not None:
            x = rms_norm(x, around.norm.weight, around.norm.epsilon)
        made = _many(x, weight, bias, delta)
        if around.activation is not None:
            made = act_mul(made, around.activation)
        if around.add:
            y += made
        else:
            y.copy_(made)

    return product


def _many(
    x: torch.Tensor, weight: AnyFormat, bias: torch.Tensor | None, delta: torch.Tensor | None
) -> torch.Tensor:
    """X · weightᵀ + bias + delta by the library, for as many tokens as there may be."""
    if isinstance(weight, Fp8Weight) and _library_scales(weight, x):
        rounded = round_inputs(x, weight.rounding)
        y = torch._scaled_mm(
            rounded.numbers,
            weight.numbers.t(),
            scale_a=rounded.scale,
            scale_b=weight.scale.t(),
            bias=bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    elif isinstance(weight, Fp8Weight) and x.itemsize == 2:
        rounded_x = weight.rounded_inputs(x).to(x.dtype)
        y = functional.linear(rounded_x, weight.dequantised(x.dtype), bias)
    elif isinstance(weight, Int8Weight) and weight.rounding is None and x.itemsize == 2:
        y = functional.linear(x, widen_bytes(weight, x.dtype), bias)
    elif isinstance(weight, Int4Weight) and kind_of(weight) is not None and x.itemsize == 2:
        ordered = x if weight.order is None else x.index_select(1, weight.order)
        y = functional.linear(ordered, widen_words(weight, x.dtype), bias)
    else:
        return weight.multiply(x, bias, delta)
    return y if delta is None else y.add_(delta)


def _library_scales(weight: Fp8Weight, x: torch.Tensor) -> bool:
    """Its product with a scale per row of both, which makes bfloat16 of multiples of 16."""
    generation = capability(x.device)
    return (
        generation is not None
        and generation >= SCALED_CAPABILITY
        and x.dtype == torch.bfloat16
        and weight.by_output
        and weight.rounding is not None
        and weight.rounding.group is None
        and not any(size % 16 for size in weight.shape)
    )


def _multiply_add(
    x: torch.Tensor,
    weight: Format,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    delta: torch.Tensor | None,
    around: Around,
    tile: AddTile,
) -> None:
    tokens, n = y.shape
    k = weight.shape[1]
    norm = around.norm
    block_n = max(1, tile.block_n // 2 if around.gated else tile.block_n)
    if isinstance(weight, Int4Weight) and weight.order is not None:
        x = x.index_select(1, weight.order)
        if norm is not None:
            norm = RowNorm(norm.weight.index_select(0, weight.order), norm.epsilon)
    common: dict[str, Any] = {
        "ACTIVATION": "none" if around.activation is None else around.activation.value,
        "ADD": around.add,
        "BLOCK_N": block_n,
        "num_warps": tile.warps,
        **launch_options(x.device),
    }
    strides = (x.stride(0), 0 if delta is None else delta.stride(0), y.stride(0), tokens, n, k)
    norm_weight, epsilon = (None, 0.0) if norm is None else norm
    grid = (triton.cdiv(n, block_n),)
    if isinstance(weight, Int4Weight):
        run = block_of(weight.group) // 8
        blocks = weight.packed.shape[1] // run
        programs = min(*grid, tile.programs)
        multiply_add_words[(programs,)](
            *(x, weight.packed, weight.scale, weight.zero, bias, delta, norm_weight, y),
            *(n, k, epsilon, blocks, weight.group // (8 * run)),
            ASSEMBLY=capability(x.device) is not None,
            BLOCKS=triton.next_power_of_2(blocks),
            RUN=run,
            **common,
        )
        return
    multiply_add_bytes[grid](
        *(x, weight.numbers.view(torch.int8), weight.scale, bias, delta, norm_weight, y),
        *(*strides, epsilon),
        FP8=isinstance(weight, Fp8Weight),
        EVEN=k % tile.block_k == 0,
        BLOCK_T=triton.next_power_of_2(tokens),
        BLOCK_K=tile.block_k,
        **common,
    )


def _ahead(tile: MatrixTile, row_bytes: int, device: torch.device) -> int:
    """Bytes of each row to ask for while the kernel before drains."""
    overlaps = bool(launch_options(device)["OVERLAP"])
    return tile.ahead if overlaps and row_bytes % BULK_BYTES == 0 else 0


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
    layout, zero, block_k = (1, 1, 1), None, tile.block_k
    if isinstance(weight, Int4Weight):
        kind, stored, row_bytes, zero = (
            "int4",
            weight.packed.view(torch.int8),
            width // 2,
            weight.zero,
        )
        block_k = block_of(weight.group)
        layout = (weight.scale.shape[1], 1, weight.group // block_k)
    else:
        kind = "fp8" if isinstance(weight, Fp8Weight) else "int8"
        stored, row_bytes = weight.numbers.view(torch.int8), width
        if isinstance(weight, Fp8Weight) and not weight.by_output:
            block_k = min(block_k, weight.columns)
            layout = (weight.scale.shape[1], weight.rows, weight.columns // block_k)
    block_t = min(tile.block_t, max(LEAST_MATRIX_ROWS, triton.next_power_of_2(tokens)))
    splits = 1 if activation is not None else tile.splits
    target = y
    if splits > 1:
        target = torch.empty((splits, tokens, n), dtype=torch.float32, device=y.device)
    multiply_rounded[(triton.cdiv(n, tile.block_n) * triton.cdiv(tokens, block_t), splits)](
        *(x.numbers.view(torch.int8), x.scale, x.sums, stored, weight.scale, zero, bias, target),
        *(target.stride(-2), tokens, n, width, row_bytes, *layout),
        KIND=kind,
        DIGITS=len(x.numbers) // tokens,
        GROUPED=layout[0] > 1 or kind == "int4",
        ACTIVATION="none" if activation is None else activation.value,
        ADD=add and splits == 1,
        ASSEMBLY=capability(y.device) is not None,
        EVEN=width % block_k == 0,
        SPLITS=splits,
        BLOCK_T=block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        PANEL=tile.panel,
        STAGES=tile.stages,
        UNROLL=tile.unroll,
        AHEAD=_ahead(tile, row_bytes, y.device),
        num_warps=tile.warps,
        **launch_options(y.device),
    )
    if splits > 1:
        add_partials[(tokens, triton.cdiv(n, PARTIALS_BLOCK))](
            *(target, y if bias is None else bias, y, y.stride(0), tokens, n),
            BIAS=bias is not None,
            ADD=add,
            SPLITS=splits,
            BLOCK=PARTIALS_BLOCK,
            num_warps=2,
            **launch_options(y.device),
        )
