"""Products with weights of 8 and 4 bits by sums of whole numbers, for any number of tokens.

Codes are laid out anew, as the instruction reads them (`dots`): 16 outputs, 4 inputs of each in a
row. A token's inputs become whole numbers too, of digits of 8 bits: two where inputs have 16 bits,
scale · (256 · high + low), three where they are float32, which loses no more than sums of floats
do; or one, if the format rounds inputs. Sums within a group of inputs are exact; scales and zeros
meet them afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tokenpod.kernels.compiled.kinds import KINDS, narrow, tensor, wide
from tokenpod.kernels.compiled.loops import END, FIRST, Loop, arguments, floats, loop, take
from tokenpod.kernels.operations.ops import Linear
from tokenpod.kernels.products.compiled_dots import LANES, QUAD, available, tile
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Number, Rounding

#: What a digit is worth in those behind it.
BASE = 256
#: Rows of digits whose sums are in registers at a time, at most.
ROWS = 12
#: Blocks of 16 outputs that are laid out at a time.
BLOCKS_AT_ONCE = 16
#: Inputs of a group, at most: sums of 255 · 128 each stay within 32 bits.
MOST_IN_GROUP = 1 << 16

_F = np.float32
_LEAST = _F(1e-30)
_STEP = LANES * QUAD
#: The code of zero in a weight of 8 bits, whose numbers have a sign.
_MIDDLE = 128


@dataclass(frozen=True, slots=True)
class WholeTiles:
    """A weight [out, in] as the instruction reads it: (code - zero) · scale, by output and group.

    Outputs are filled up to a multiple of 16, inputs of each group to one of 4, or of 8.
    """

    #: [⌈out / 16⌉, groups, steps, 64] uint8; see `dots.tile`.
    codes: torch.Tensor
    #: [groups, ⌈out / 16⌉ · 16] float32
    scale: torch.Tensor
    #: int32, as `scale`
    zero: torch.Tensor
    outputs: int
    inputs: int
    #: Inputs that share a scale; the last group may have fewer.
    group: int
    bits: int

    @classmethod
    def of(
        cls,
        codes: Callable[[slice], torch.Tensor],
        scale: torch.Tensor,
        zero: torch.Tensor,
        inputs: int,
        group: int,
        bits: int,
    ) -> WholeTiles:
        """Of scale and zero [out, groups]; `codes` yields those of some outputs, [n, in] uint8."""
        outputs, groups = scale.shape
        blocks, spare = -(-outputs // LANES), -outputs % LANES
        steps = -(-group * bits // (8 * QUAD))
        tiles = torch.empty((blocks, groups, steps, _STEP), dtype=torch.uint8)
        for first in range(0, blocks, BLOCKS_AT_ONCE):
            some = codes(slice(first * LANES, min((first + BLOCKS_AT_ONCE) * LANES, outputs)))
            made = _laid_out(functional.pad(some, (0, groups * group - inputs)), groups, bits)
            tiles[first : first + len(made)] = made

        def by_group(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return functional.pad(values.to(dtype), (0, 0, 0, spare)).t().contiguous()

        scales, zeros = by_group(scale, torch.float32), by_group(zero, torch.int32)
        return cls(tiles, scales, zeros, outputs, inputs, group, bits)

    @property
    def filled(self) -> int:
        """Inputs of a group, as they are stored."""
        return self.codes.shape[2] * QUAD * 8 // self.bits


def _laid_out(codes: torch.Tensor, groups: int, bits: int) -> torch.Tensor:
    """Codes [n, groups · group] -> [⌈n / 16⌉, groups, steps, 64]."""
    spare, filled = -len(codes) % LANES, QUAD * 8 // bits
    whole = functional.pad(codes, (0, 0, 0, spare)).view(
        -1, LANES, groups, codes.shape[1] // groups
    )
    whole = functional.pad(whole, (0, -whole.shape[3] % filled))
    quads: torch.Tensor = whole.unflatten(3, (-1, QUAD)).permute(0, 2, 3, 1, 4).flatten(3)
    if bits == 8:
        return quads
    return quads[:, :, 0::2] | quads[:, :, 1::2] << 4


def prepare(
    tiles: WholeTiles,
    bias: torch.Tensor | None,
    rounding: Rounding | None = None,
    order: torch.Tensor | None = None,
) -> Linear:
    """The product with a weight, for inputs of any float type.

    Args:
        tiles: the weight.
        bias: [out], or None.
        rounding: how inputs are rounded to 8 bits, one scale for all of a token's; None: they
            become two or three digits.
        order: [in] int64: which input each stored one is; None: as they come.
    """
    spare = -tiles.outputs % LANES
    offset = torch.zeros(tiles.outputs + spare)
    if bias is not None:
        offset[: tiles.outputs] = bias.float()

    def linear(x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype if x.dtype in KINDS else torch.float32
        numbers = x if order is None else x.index_select(1, order)
        numbers = numbers.to(kind).contiguous()
        return _multiply(_digits(numbers, tiles, rounding), tiles, offset, kind).to(x.dtype)

    return linear


@dataclass(frozen=True, slots=True)
class Digits:
    """Inputs of T tokens as whole numbers: scale · the digits, each 256 times the one behind it."""

    #: [T, planes, groups · filled] int8; inputs that fill groups up are 0.
    planes: torch.Tensor
    #: [T, planes, groups] int32
    sums: torch.Tensor
    #: [T] float32
    scale: torch.Tensor


def _digits(x: torch.Tensor, tiles: WholeTiles, rounding: Rounding | None) -> Digits:
    tokens, groups = len(x), tiles.scale.shape[0]
    filled = tiles.filled
    if rounding is not None:
        numbers, scale = rounding.rounded(x)
        whole = functional.pad(numbers, (0, groups * tiles.group - tiles.inputs))
        whole = functional.pad(whole.view(tokens, groups, tiles.group), (0, filled - tiles.group))
        sums = whole.sum(2, dtype=torch.int32)[:, None]
        return Digits(whole.view(tokens, 1, -1), sums.contiguous(), scale[:, 0].contiguous())
    planes = 3 if x.dtype == torch.float32 else 2
    made = Digits(
        torch.empty((tokens, planes, groups * filled), dtype=torch.int8),
        torch.empty((tokens, planes, groups), dtype=torch.int32),
        torch.empty(tokens),
    )
    _split(x.dtype, planes)(
        tokens,
        *(x.data_ptr(), made.planes.data_ptr(), made.sums.data_ptr(), made.scale.data_ptr()),
        *(tokens, tiles.inputs, groups, tiles.group, filled),
    )
    return made


def _multiply(
    digits: Digits, tiles: WholeTiles, offset: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    tokens, planes, width = digits.planes.shape
    blocks, groups, steps, _ = tiles.codes.shape
    y = torch.empty((tokens, tiles.outputs), dtype=dtype)
    _product(planes, tiles.bits, dtype)(
        blocks,
        *(digits.planes.data_ptr(), digits.sums.data_ptr(), digits.scale.data_ptr()),
        *(tiles.codes.data_ptr(), tiles.scale.data_ptr(), tiles.zero.data_ptr()),
        *(offset.data_ptr(), y.data_ptr()),
        *(tokens, width, groups, steps, tiles.outputs),
    )
    return y


@functools.cache
def _split(dtype: torch.dtype, planes: int) -> Loop:
    """The loop that makes so many digits of each number of a token of `dtype`."""
    kind, half, base = KINDS[dtype], np.int32(BASE // 2), np.int32(BASE)
    int8, int32 = KINDS[torch.int8], KINDS[torch.int32]
    most = _F(127 * BASE ** (planes - 1))

    def body(address):
        a = arguments(address)
        tokens, inputs, groups = a[FIRST + 4], a[FIRST + 5], a[FIRST + 6]
        group, filled = a[FIRST + 7], a[FIRST + 8]
        x = tensor(a[FIRST], (tokens, inputs), kind)
        digits = tensor(a[FIRST + 1], (tokens, planes, groups, filled), int8)
        sums = tensor(a[FIRST + 2], (tokens, planes, groups), int32)
        scale = floats(a[FIRST + 3], (tokens,))
        numbers = np.empty(filled, np.int32)
        token = take(a)
        while token < a[END]:
            largest, nothing = _F(0), _F(0)
            for i in range(inputs):
                v = abs(wide(x[token, i]))
                largest = v if v > largest else largest
                nothing += v * _F(0)  # NaN if a number is not finite
            inverse = most / largest if largest > _LEAST else _F(0)
            scale[token] = largest / most + nothing
            for g in range(groups):
                count = min(group, inputs - g * group)
                for i in range(count):
                    v = wide(x[token, g * group + i]) * inverse
                    v = v if v > -most else -most
                    numbers[i] = np.int32(np.rint(v if v < most else most))
                for i in range(count, filled):
                    numbers[i] = 0
                for p in range(planes - 1, -1, -1):
                    total = np.int32(0)
                    for i in range(filled):
                        ahead = (numbers[i] + half) >> np.int32(8) if p else np.int32(0)
                        digit = numbers[i] - ahead * base
                        digits[token, p, g, i] = np.int8(digit)
                        total += digit
                        numbers[i] = ahead
                    sums[token, p, g] = total
            token = take(a)

    return loop(body)


@functools.cache
def _product(planes: int, bits: int, dtype: torch.dtype) -> Loop:
    """The loop over blocks of 16 outputs, for tokens of so many digits and results of `dtype`."""
    kind = KINDS[dtype]
    most = ROWS // planes  # tokens of a tile

    def body(address):
        a = arguments(address)
        tokens, width, groups = a[FIRST + 8], a[FIRST + 9], a[FIRST + 10]
        steps, outputs = a[FIRST + 11], a[FIRST + 12]
        blocks = a[END]
        x_scale = floats(a[FIRST + 2], (tokens,))
        offset = floats(a[FIRST + 6], (blocks * LANES,))
        y = tensor(a[FIRST + 7], (tokens, outputs), kind)
        in_group = width // groups
        total = np.empty((most, LANES), np.float32)
        block = take(a)
        while block < blocks:
            first_output = block * LANES
            count = min(LANES, outputs - first_output)
            t = 0
            while t < tokens:
                some = most if tokens - t >= most else 1
                for j in range(some):
                    for o in range(LANES):
                        total[j, o] = _F(0)
                for g in range(groups):
                    x = a[FIRST] + t * planes * width + g * in_group
                    sums = a[FIRST + 1] + (t * planes * groups + g) * 4
                    codes = a[FIRST + 3] + (block * groups + g) * steps * _STEP
                    at = (g * blocks * LANES + first_output) * 4
                    scale, zero, into = a[FIRST + 4] + at, a[FIRST + 5] + at, total.ctypes.data
                    if some == most:
                        tile(
                            most,
                            planes,
                            bits,
                            x,
                            width,
                            codes,
                            steps,
                            zero,
                            scale,
                            sums,
                            groups * 4,
                            into,
                        )
                    else:
                        tile(
                            1,
                            planes,
                            bits,
                            x,
                            width,
                            codes,
                            steps,
                            zero,
                            scale,
                            sums,
                            groups * 4,
                            into,
                        )
                for j in range(some):
                    for o in range(count):
                        value = total[j, o] * x_scale[t + j] + offset[first_output + o]
                        y[t + j, first_output + o] = narrow(value, kind)
                t += some
            block = take(a)

    return loop(body)


def prepare_int8(weight: Int8Weight, bias: torch.Tensor | None) -> Linear | None:
    """The product x · weightᵀ + bias with a weight of the format.

    None: not this processor, or not this weight.
    """
    rounding, (outputs, inputs) = weight.rounding, weight.shape
    if not available() or inputs > MOST_IN_GROUP:
        return None
    if rounding is not None and (rounding.group is not None or rounding.number is not Number.INT8):
        return None
    tiles = WholeTiles.of(
        lambda some: weight.numbers[some].view(torch.uint8) ^ _MIDDLE,
        weight.scale[:, None],
        torch.full((outputs, 1), _MIDDLE),
        inputs,
        inputs,
        8,
    )
    return prepare(tiles, bias, rounding)


def prepare_int4(weight: Int4Weight, bias: torch.Tensor | None) -> Linear | None:
    """The product x · weightᵀ + bias with a weight of the format.

    None: not this processor, or not this weight.
    """
    inputs = weight.width
    group = min(weight.group, inputs)
    if not available() or group > MOST_IN_GROUP or weight.index is not None:
        return None
    tiles = WholeTiles.of(
        lambda some: weight.outputs(some).numbers, weight.scale, weight.zeros, inputs, group, 4
    )
    return prepare(tiles, bias, order=weight.order)
