"""What DoRA multiplies outputs with: "Weight-Decomposed Low-Rank Adaptation", Liu et al., 2024.

Each output of an adapted weight has a length of its own, m: m · (W + B · A) / ‖W + B · A‖, the
lengths being those of rows of outputs. So a product is scaled by m / ‖W + B · A‖, one number for
each output, which is made once, while an adapter is read:

    ‖W + B · A‖² = ‖W‖² + 2 Σ B · (W · Aᵀ) + B · (A · Aᵀ) · Bᵀ

‖W‖² is measured before products take their weights, which they may hold in another layout; W · Aᵀ
is the base's own product, whatever its format. So nothing of W's size is made. Of products whose
inputs ranks divide, each rank knows a summand of that: they add them up while the adapter is put
into a slot, which all do in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch

from tokenpod.kernels.operations.adapter_ops import BaseLinear
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.weight import LinearWeight, Stored
from tokenpod.models.adapters.copies import fill
from tokenpod.models.adapters.targets import Product, scaled_order
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.tensor_file import Rest, no_rest

#: Rows that the base multiplies at a time, the last of which is zeros. Any number of rows of a
#: factor is multiplied so: kernels are made for one shape.
_ROWS = 32
#: Length that rows of a factor get for it, by a power of two: rounding of a bias beside them must
#: not be seen.
_LENGTH = 32.0
#: Numbers of a weight that are made float32 at a time.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Factors:
    """A rank's part of what an adapter adds to one part of a product, on the host."""

    #: [r, in]
    down: torch.Tensor
    #: [outputs of the part, r], with the scale.
    up: torch.Tensor
    #: [outputs of the part] float32: lengths that outputs get (DoRA); None: they stay as they are.
    lengths: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """What an adapter multiplies outputs with, on the host."""

    #: [outputs of all products] float32; of what ranks sum, the lengths that outputs get.
    scale: torch.Tensor
    #: [outputs of what ranks sum] float32: this rank's summands of the squares of the lengths that
    #: these have; 0: they stay as they are.
    squares: torch.Tensor


@dataclass
class Scales:
    """Every slot's, all memory taken.

    Args:
        products: of a rank, by name.
        slots: how many.
        dtype: of the model.
        device: of the base.
        group: the ranks that divide the model; None: there is one.
    """

    products: Mapping[str, Product]
    slots: int
    dtype: torch.dtype
    device: torch.device
    group: Group | None = None
    #: ‖W‖² by product, [out] float32 on the device.
    _squares: dict[str, torch.Tensor] = field(default_factory=dict)
    _linears: dict[str, BaseLinear] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = scaled_order(self.products.values())
        self._places, at = {}, 0
        self._alone = 0
        for product in order:
            self._places[product.name] = slice(at, at + product.outputs)
            at += product.outputs
            if self.group is None or not product.divided:
                self._alone = at
        # Written at once, as slots are.
        self._table = torch.ones((self.slots, at), dtype=torch.float32, device=self.device)
        #: [S] int32: whether a slot's are to be looked at.
        self.scaled = torch.zeros(self.slots, dtype=torch.int32, device=self.device)
        self._sums = torch.zeros(at - self._alone, dtype=torch.float32, device=self.device)

    @property
    def nbytes(self) -> int:
        """Of all that is taken, but for a number per slot."""
        own = sum(squares.nbytes for squares in self._squares.values())
        return self._table.nbytes + self._sums.nbytes + own

    def of(self, name: str) -> torch.Tensor:
        """[S, out]: a product's, of each slot."""
        return self._table[:, self._places[name]]

    # -- the base ------------------------------------------------------------------------------

    def measure(self, name: str, weight: torch.Tensor | LinearWeight) -> None:
        """Know how long the rows of a product's weight are, before the product takes it."""
        parts = weight.parts if isinstance(weight, LinearWeight) else (weight,)
        self._squares[name] = torch.cat([_squares(part) for part in parts])

    def meet(self, name: str, product: BaseLinear) -> None:
        """Note the product of a weight that was measured."""
        if name in self._squares:
            self._linears[name] = product

    def warm(self) -> None:
        """Let products get ready for what `made` asks of them: before others would have to wait."""
        shapes = {(each.inputs, each.rows): name for name, each in self.products.items()}
        with torch.inference_mode(), self._beside:
            for (inputs, _), name in shapes.items():
                if name in self._linears:
                    self._linears[name](self._rows(inputs))

    # -- adapters ------------------------------------------------------------------------------

    def made(
        self, factors: Mapping[str, Mapping[int, Factors]], rest: Rest = no_rest
    ) -> Made | None:
        """What an adapter multiplies outputs with; None: nothing. Any one thread may ask.

        Raises ModelError for a product whose weight is not at hand.
        """
        lengths = torch.ones(self._table.shape[1])
        found: list[tuple[slice, torch.Tensor]] = []
        with torch.inference_mode(), self._beside:
            for name, parts in factors.items():
                place = self._places[name]
                for part, each in parts.items():
                    if each.lengths is None:
                        continue
                    if name not in self._linears:
                        raise ModelError(f"DoRA: {name} is no product whose weight is at hand")
                    first = sum(self.products[name].rows[:part])
                    at = slice(place.start + first, place.start + first + len(each.up))
                    lengths[at] = each.lengths
                    found.append((at, self._moved(name, first, each, rest)))
            if not found:
                return None
            squares = torch.zeros_like(self._table[0])
            for at, own in found:
                squares[at] = own
            known = squares.cpu()
        alone = self._alone
        lengths[:alone] *= _inverse(known[:alone])
        return Made(lengths, known[alone:])

    def row(self, made: Made, name: str) -> torch.Tensor | None:
        """[out]: what a product's outputs are multiplied with; None: ranks must sum first."""
        place = self._places[name]
        return None if place.start >= self._alone else made.scale[place]

    def put(
        self, slot: int, scale: tuple[torch.Tensor, ...], squares: tuple[torch.Tensor, ...]
    ) -> None:
        """Put an adapter's into a slot, from 1, in the order of the device's queue.

        Pieces are those of `Made`'s tensors; none: it scales nothing. All ranks call it together.
        """
        at = slot - 1
        self.scaled[at : at + 1].fill_(int(bool(scale)))
        if not scale:
            return
        fill(self._table[at], scale)
        if self.group is None or not len(self._sums):
            return
        fill(self._sums, squares)
        self.group.sum(self._sums.view(1, -1))
        self._table[at, self._alone :] *= _inverse(self._sums)

    # -- parts ---------------------------------------------------------------------------------

    @cached_property
    def _beside(self) -> AbstractContextManager[object]:
        """Where steps on a GPU do not wait for what is made here, nor that for them."""
        if self.device.type != "cuda":
            return nullcontext()
        own = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # The base may still be on its way.
        own.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(own)

    def _rows(self, inputs: int) -> torch.Tensor:
        return torch.zeros((_ROWS, inputs), dtype=self.dtype, device=self.device)

    def _moved(self, name: str, start: int, factors: Factors, rest: Rest) -> torch.Tensor:
        """[outputs of the part] float32: this rank's summands of ‖W + B · A‖²."""
        rows = slice(start, start + len(factors.up))
        down, up = factors.down.to(self.device), factors.up.to(self.device).float()
        total = self._squares[name][rows].clone()
        for first in range(0, len(down), _ROWS - 1):
            some = down[first : first + _ROWS - 1].float()
            length = some.norm(dim=1, keepdim=True)
            factor = torch.where(length > 0, (_LENGTH / length).log2().floor().exp2(), 1.0)
            x = self._rows(down.shape[1])
            x[: len(some)] = some * factor
            y = self._linears[name](x)[:, rows].float()
            # The last row is the bias, if there is one.
            across = (y[: len(some)] - y[-1]) / factor
            total += 2 * (across.t() * up[:, first : first + len(some)]).sum(1)
            rest()
        wide = down.float()
        total += ((up @ (wide @ wide.t())) * up).sum(1)
        rest()
        return total


def _inverse(squares: torch.Tensor) -> torch.Tensor:
    """1 / √ of it; 1 where there is nothing."""
    return torch.where(squares > 0, squares.rsqrt(), 1.0)


def _squares(weight: Stored) -> torch.Tensor:
    """[out] float32: of each row's numbers, as products have them, the sum of squares."""
    outputs, inputs = weight.shape
    step = max(_AT_ONCE // max(inputs, 1), 1)
    found = []
    for first in range(0, outputs, step):
        some = slice(first, min(first + step, outputs))
        if isinstance(weight, torch.Tensor):
            wide = weight[some].float()
        else:
            wide = weight.outputs(some).dequantised(torch.float32)
        found.append(wide.square().sum(1))
    return torch.cat(found)
