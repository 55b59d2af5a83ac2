"""Products with a weight in panels of 48 outputs, in one loop for any number of rows.

The weight is read as it is stored and widened in registers; sums are float32. Norm, gate and sum
with the stream are parts of the loop, so a step of few rows makes few calls. A row's results do not
depend on the rows beside it.
"""

from __future__ import annotations

import functools
from enum import IntEnum

import numba
import numpy as np
import torch

from tokenpod.kernels.compiled.arithmetic import LOG2_E, exp2
from tokenpod.kernels.compiled.kinds import KINDS, narrow, tensor, wide
from tokenpod.kernels.compiled.loops import (
    END,
    FIRST,
    LINE,
    Loop,
    arguments,
    bits,
    fetch_to_write,
    floats,
    inlined,
    loop,
    real,
    take,
)
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.pointwise.compiled_pointwise import norm_factor
from tokenpod.kernels.products.compiled_tiles import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    HEIGHTS,
    LANES,
    PANEL,
    available,
    finish,
    tile,
)
from tokenpod.kernels.products.formats.narrow import NarrowWeight

#: Inputs, and rows, whose parts of a weight and of x stay in a core's second cache; of 16 bits a
#: block that is widened stays in its first one, for more rows.
INPUTS, ROWS = 512, 64
NARROW_INPUTS, NARROW_ROWS = 128, 256

_F = np.float32
_CODES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class Ending(IntEnum):
    """What becomes of the sums."""

    WRITTEN = 0
    #: Added to what is there.
    ADDED = 1
    #: The first half are gates of the other: silu(gate) · up is written.
    GATED = 2


def fits(weight: torch.Tensor | NarrowWeight, ending: Ending = Ending.WRITTEN) -> bool:
    """Whether this processor makes products with a weight [out, in] in panels."""
    weight = numbers_of(weight)
    outputs = weight.shape[0] // (2 if ending is Ending.GATED else 1)
    return available() and weight.dtype in _CODES and outputs >= PANEL and weight.shape[1] > 0


def numbers_of(weight: torch.Tensor | NarrowWeight) -> torch.Tensor:
    """Of a weight, as they are stored."""
    return weight.numbers if isinstance(weight, NarrowWeight) else weight


class Panels:
    """The product with a weight [out, in], of which it keeps a copy in another layout.

    Args:
        weight: for which `fits` says so. Rows and results have its type, or are float32.
        bias: [out], or None.
        ending: what becomes of the sums.
        norm: of the rows that are multiplied, or None.
    """

    def __init__(
        self,
        weight: torch.Tensor | NarrowWeight,
        bias: torch.Tensor | None,
        ending: Ending = Ending.WRITTEN,
        norm: RowNorm | None = None,
    ) -> None:
        self._dtype = torch.float32 if isinstance(weight, NarrowWeight) else weight.dtype
        weight = numbers_of(weight)
        outputs, self._inputs = weight.shape
        parts = [*weight.detach().chunk(2 if ending is Ending.GATED else 1)]
        self._width = len(parts[0])
        #: [⌈out / 48⌉, parts, in, 48]; gated: gates, and what they open. The last panel ends with
        #: the last output, and may have some of the panel before.
        self._numbers = weight.new_empty(-(-self._width // PANEL), len(parts), self._inputs, PANEL)
        for at, part in enumerate(parts):
            _lay_out(part, self._numbers[:, at])
        self._offset = torch.zeros(outputs) if bias is None else bias.float().contiguous()
        self._norm = None if norm is None else norm.weight.contiguous()
        panels = len(self._numbers) * len(parts)
        self._items = -(-panels // 2)
        # As the loop reads them.
        norms = (0, 0)
        if self._norm is not None and norm is not None:
            norms = self._norm.data_ptr(), bits(norm.epsilon)
        self._fixed = *norms, self._numbers.data_ptr(), self._offset.data_ptr()
        self._sizes = self._inputs, self._width, panels, int(ending)
        self._loop = _loop(
            self._dtype, weight.dtype, self._dtype if norm is None else norm.weight.dtype
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, in] -> [T, out], or [T, out / 2] of gates."""
        y = torch.empty((x.shape[0], self._width), dtype=x.dtype)
        self.into(x, y)
        return y

    def into(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """The same, added to the residual stream; otherwise written in its place."""
        rows, inputs = x.shape
        # The loop reads memory: whatever else these were, it would compute something.
        assert x.dtype is residual.dtype is self._dtype, (x.dtype, residual.dtype)
        assert inputs == self._inputs, x.shape
        assert residual.is_contiguous(), residual.stride()
        x, to = x.contiguous(), residual.data_ptr()
        self._loop(self._items, x.data_ptr(), to, rows, *self._fixed, *self._sizes)


def _lay_out(weight: torch.Tensor, panels: torch.Tensor) -> None:
    """[n, in] into [⌈n / 48⌉, in, 48]."""
    n, inputs = weight.shape
    whole = n // PANEL
    panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2)
    panels[-1] = weight[-PANEL:].t()


@inlined()
def _height(rows):
    """Rows of the next tile, of so many that are left."""
    if rows >= 8:
        return 8
    return 4 if rows == 7 else 3 if rows == 5 else rows


@inlined()
def _at_line(array):
    """A part of it that begins with a line of memory, 16 numbers less: as fast as it gets."""
    return array[-(numba.int64(array.ctypes.data) >> 2) & (LANES - 1) :]


@inlined()
def _keep(array):
    """Use an array once more: its memory is given back behind its last use."""
    return len(array)


@functools.cache
def _loop(dtype: torch.dtype, weight_dtype: torch.dtype, norm_dtype: torch.dtype) -> Loop:
    """The loop over pairs of panels, for rows of `dtype`."""
    kind, norm_kind, code, size = KINDS[dtype], KINDS[norm_dtype], _CODES[dtype], dtype.itemsize
    of, weight_size = _CODES[weight_dtype], weight_dtype.itemsize
    whole, highest = of == FLOAT32, HEIGHTS[1][0]
    deep, tall = (INPUTS, ROWS) if whole else (NARROW_INPUTS, NARROW_ROWS)
    written, added, gated = (int(ending) for ending in Ending)
    rounds = norm_dtype == dtype
    as_it_is = code == FLOAT32

    def body(address):
        a = arguments(address)
        y, rows = a[FIRST + 1], a[FIRST + 2]
        normed, epsilon = a[FIRST + 3] != 0, real(a, FIRST + 4)
        weight, offset = a[FIRST + 5], a[FIRST + 6]
        inputs, width, panels, ending = a[FIRST + 7], a[FIRST + 8], a[FIRST + 9], a[FIRST + 10]
        x, stride, panel_size = a[FIRST], inputs * 4, inputs * PANEL * weight_size
        # Each thread norms the rows for itself: the others would wait for it as long.
        own = np.empty((0 if as_it_is and not normed else rows, inputs), np.float32)
        if len(own):
            given = tensor(a[FIRST], (rows, inputs), kind)
            norm_weight = tensor(a[FIRST + 3], (inputs,), norm_kind)
            for row in range(rows):
                if normed:
                    square_sum = _F(0)
                    for i in range(inputs):
                        square_sum += wide(given[row, i]) * wide(given[row, i])
                    factor = norm_factor(square_sum, inputs, epsilon)
                    for i in range(inputs):
                        value = wide(given[row, i]) * factor
                        if rounds:
                            value = wide(narrow(value, kind))
                        own[row, i] = wide(narrow(value * wide(norm_weight[i]), kind))
                else:
                    for i in range(inputs):
                        own[row, i] = wide(given[row, i])
            x = own.ctypes.data
        results = tensor(y, (rows, width), kind)
        offsets = floats(offset, (2 * width,))
        # Sums of two panels, beside each other for one row or two, else one behind the other.
        few, most = rows <= 2, min(rows, tall)
        sums = _at_line(np.zeros(2 * most * PANEL + LANES, np.float32))
        # A block of a panel of 16 bits, widened for the tiles behind the first one.
        widened = _at_line(np.empty(LANES if whole else deep * PANEL + LANES, np.float32))
        near = widened.ctypes.data
        apart, second = (2 * PANEL, PANEL) if few else (PANEL, most * PANEL)
        # Of many rows a tile's results are written behind it, where a panel makes them alone: the
        # last one may have outputs of the panel before, to be added once, and gates open others.
        alone = ending == written or (ending == added and width % PANEL == 0)
        at_once = alone and not few
        item = take(a)
        while item < a[END]:
            count = min(2, panels - 2 * item)
            numbers = weight + 2 * item * panel_size
            for top in range(0, rows, tall):
                height = min(tall, rows - top)
                for begin in range(0, inputs, deep):
                    many = min(deep, inputs - begin)
                    block = numbers + begin * PANEL * weight_size
                    at = x + top * stride + begin * 4
                    into = sums.ctypes.data
                    if few and count == 2:
                        tile(2, of, rows, at, stride, block, panel_size, many, into, 0, 0)
                        continue
                    # What is read behind these panels; a tile fetches a third of it.
                    behind = numbers + count * panel_size
                    if begin + many < inputs:
                        behind = block + many * PANEL * weight_size
                    for panel in range(count):
                        number = 2 * item + panel
                        start = (number // 2 if ending == gated else number) * PANEL
                        start = min(start, width - PANEL)
                        next_block = behind if panel == count - 1 else block + panel_size
                        row, left, total = at, height, into + panel * most * PANEL * 4
                        while left > 0:
                            some, tiles, ahead = _height(left), (height - left) // 8, row
                            if top == 0 and tiles * LINE < PANEL * weight_size:
                                ahead = next_block + tiles * many * LINE
                            to = y + ((top + height - left) * width + start) * size
                            last = begin + many == inputs
                            if last:  # stores to what is far away would hold up the next tile
                                for each in range(some):
                                    there = to + each * width * size
                                    for byte in range(0, PANEL * size, LINE):
                                        fetch_to_write(there + byte)
                                    fetch_to_write(there + PANEL * size - 1)
                            # Only the first one widens the block, if it is of full height.
                            if whole or row == at or height < highest:
                                tile(1, of, some, row, stride, block, 0, many, total, ahead, near)
                            else:
                                tile(
                                    1, FLOAT32, some, row, stride, near, 0, many, total, ahead, near
                                )
                            if at_once and last:
                                more = offset + start * 4
                                if ending == added:
                                    finish(1, code, some, total, PANEL * 4, more, to, width * size)
                                else:
                                    finish(0, code, some, total, PANEL * 4, more, to, width * size)
                            row += some * stride
                            left -= some
                            total += some * PANEL * 4
                        block += panel_size
                if at_once:
                    continue
                if ending == gated:
                    start = min(item * PANEL, width - PANEL)
                    gate_bias = floats(offset + start * 4, (PANEL,))
                    up_bias = floats(offset + (width + start) * 4, (PANEL,))
                    for row in range(height):
                        gates = floats(sums.ctypes.data + row * apart * 4, (PANEL,))
                        ups = floats(sums.ctypes.data + (row * apart + second) * 4, (PANEL,))
                        to = y + ((top + row) * width + start) * size
                        result = tensor(to, (PANEL,), kind)
                        for o in range(PANEL):
                            gate = gates[o] + gate_bias[o]
                            active = gate / (_F(1) + exp2(-gate * LOG2_E))
                            result[o] = narrow(active * (ups[o] + up_bias[o]), kind)
                        for o in range(PANEL):
                            gates[o] = _F(0)
                            ups[o] = _F(0)
                    continue
                for panel in range(count):
                    start = min((2 * item + panel) * PANEL, width - PANEL)
                    total = sums.ctypes.data + panel * second * 4
                    to, more = y + (top * width + start) * size, offset + start * 4
                    between = apart * 4 if count == 2 else PANEL * 4
                    again = (2 * item + panel) * PANEL - start
                    if ending == added and again > 0:  # outputs that the panel before adds
                        for row in range(height):
                            for o in range(PANEL):
                                at = panel * second + row * (between // 4) + o
                                if o >= again:
                                    value = sums[at] + offsets[start + o]
                                    value += wide(results[top + row, start + o])
                                    results[top + row, start + o] = narrow(value, kind)
                                sums[at] = _F(0)
                    elif ending == added:
                        finish(1, code, height, total, between, more, to, width * size)
                    else:
                        finish(0, code, height, total, between, more, to, width * size)
            item = take(a)
        _keep(own)
        _keep(widened)

    return loop(body)
