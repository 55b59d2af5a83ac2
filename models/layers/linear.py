"""Products of a model. Which operation makes a product is decided here and nowhere else.

A product is given the step it is part of, so that what it adds may depend on whose token it is.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch

from tokenpod.kernels.operations.adapter_ops import (
    AdaptedAdd,
    AdaptedLinear,
    Added,
    BaseLinear,
    DenseWeight,
)
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.compose import (
    adapted_linear_of,
    fused_add_linear,
    fused_norm_linear,
    laid_out,
    linear_of,
)
from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.ops import AddLinear, Operations
from tokenpod.kernels.operations.pointwise_ops import Activation, ActMul, RmsNorm, RowNorm
from tokenpod.kernels.operations.weight import LinearWeight, StackedWeight

#: Weights by our names, as they were loaded.
Weights = MutableMapping[str, torch.Tensor | LinearWeight | StackedWeight]

#: x [T, in] -> [T, out], of a step; None: outside of one.
Product = Callable[[torch.Tensor, ForwardBatch | None], torch.Tensor]

#: x [T, in], the stream [T, out], changed in place, and the step.
AddProduct = Callable[[torch.Tensor, torch.Tensor, ForwardBatch | None], None]


#: (weight's name, step) -> what adapters make of that product; None: they leave it.
Delta = Callable[[str, ForwardBatch | None], Added | None]

#: Gets each weight's name and the base's product with it: this rank's, neither normed nor gated. It
#: has the weight's bias, but of products whose inputs several ranks divide.
Meet = Callable[[str, BaseLinear], None]


def no_delta(name: str, step: ForwardBatch | None) -> None:
    """No product is changed."""
    del name, step


def nobody(name: str, product: BaseLinear) -> None:
    """Nobody asks for products."""
    del name, product


@dataclass(frozen=True, slots=True)
class Products:
    """Makes products of weights that it takes out of a table.

    Each weight [out, in] and, if there is one, its bias [out] are removed: an operation may hold
    the weight in another layout, and the original must not live on beside it.
    """

    ops: Operations
    weights: Weights
    delta: Delta = no_delta
    meet: Meet = nobody

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        table = self.weights["embedding"]
        assert isinstance(table, torch.Tensor)
        return table.device

    def linear(self, name: str) -> Product:
        """The product `name`: of ranks, this rank's rows."""
        weight, bias = self._take(name)
        plain = self._plain(weight, bias)
        return self._adapted(name, plain, plain, _dense(weight, bias))

    def activated_linear(self, name: str, activation: Activation) -> Product | None:
        """The product `name` with its activation; None where that is not one operation."""
        prepare, (weight, *others) = self.ops.prepare_activated_linear, self._peek(name).parts
        if prepare is None or self.delta is not no_delta or others:
            return None
        if not isinstance(weight, torch.Tensor):
            return None
        fused = prepare(weight, self._bias(name), activation)
        if fused is None:
            return None
        self._take(name)
        return BaseProduct(fused)

    def norm_linear(self, name: str, norm: RowNorm, activation: Activation | None) -> Product:
        """The product `name` of the normed stream; gated if there is an `activation`."""
        ops, (weight, bias) = self.ops, self._take(name)
        fused: BaseLinear | None = None
        if self._fuses(weight):
            fused = fused_norm_linear(ops, weight.parts[0], bias, norm, activation)
        plain = None
        if fused is None or self.delta is not no_delta:
            plain = self._plain(weight, bias)
        if fused is None:
            assert plain is not None
            fused = NormedBase(plain, norm, ops.rms_norm, activation, ops.act_mul)
        return self._adapted(name, fused, plain, _dense(weight, bias), norm, activation)

    def part_linear(self, name: str) -> Product:
        """The product `name` whose inputs ranks divide: this rank's summand."""
        product, late = self._divided(name)
        if late is None or (self.ops.group is not None and self.ops.group.rank):
            return product
        return BiasedProduct(product, late)

    def _divided(self, name: str) -> tuple[Product, torch.Tensor | None]:
        """The product of a rank's inputs, and the bias that follows the sum: none of one rank."""
        weight, bias = self._take(name)
        own, late = (bias, None) if self.ops.group is None else (None, bias)
        plain = self._plain(weight, own)
        return self._adapted(name, plain, plain, _dense(weight, own)), late

    def sum_linear(self, name: str) -> Product:
        """The product `name` whose inputs ranks divide: the sum over all of them."""
        product, late = self._divided(name)
        group = self.ops.group
        return product if group is None else SummedProduct(product, group, late)

    def add_linear(self, name: str) -> AddProduct:
        """The product `name` whose inputs ranks divide, added to the stream."""
        weight, bias = self._peek(name), self._bias(name)
        fused = None
        if self._fuses(weight):
            fused = fused_add_linear(self.ops, weight.parts[0], bias)
        if fused is not None:
            self._take(name)
            return self._adapted_add(name, fused, weight, bias)
        return AddedProduct(self.sum_linear(name))

    def _fuses(self, weight: LinearWeight) -> bool:
        """Whether a product may be one operation with what is beside it.

        Where adapters need the product alone, and the operation would be made of it, it is not: a
        weight that is laid out anew for a product would be there twice.
        """
        alone = self.delta is not no_delta and self.ops.adapted is None
        return len(weight.parts) == 1 and not alone

    def _adapted(
        self,
        name: str,
        product: BaseLinear,
        plain: BaseLinear | None,
        dense: DenseWeight | None,
        norm: RowNorm | None = None,
        activation: Activation | None = None,
    ) -> Product:
        """The product of steps with adapters and without.

        Args:
            name: of its weight.
            product: without adapters, norm and gate included.
            plain: without norm and gate; None: there are no adapters.
            dense: as `PrepareAdaptedLinear` has it.
            norm: of what is multiplied.
            activation: of the gate.
        """
        delta, ops = self.delta, self.ops
        if delta is no_delta:
            return BaseProduct(product)
        assert plain is not None, name
        self.meet(name, plain)
        if ops.adapted is not None:
            adapted = ops.adapted.linear(plain, dense, norm, activation)
        else:
            adapted = adapted_linear_of(plain, ops.rms_norm, ops.act_mul, norm, activation)
        return AdaptedProduct(name, product, adapted, delta)

    def _adapted_add(
        self, name: str, fused: AddLinear, weight: LinearWeight, bias: torch.Tensor | None
    ) -> AddProduct:
        delta, ops = self.delta, self.ops
        if delta is no_delta:
            return BaseAdd(fused)
        assert ops.adapted is not None, "the product would be there twice"
        # Ranks add a bias behind the sum: what scales a rank's part must not scale it.
        own, late = (bias, None) if ops.group is None else (None, bias)
        plain = self._plain(weight, own)
        self.meet(name, plain)
        adapted = ops.adapted.add_linear(plain, _dense(weight, own))
        return AdaptedAddProduct(name, fused, adapted, delta, late)

    def _plain(self, weight: LinearWeight, bias: torch.Tensor | None) -> BaseLinear:
        """One launch per part."""
        if len(weight.parts) == 1:
            return linear_of(self.ops, weight.parts[0], bias)
        lengths = [part.shape[0] for part in weight.parts]
        biases = [None] * len(lengths) if bias is None else list(torch.split(bias, lengths))
        parts = zip(weight.parts, biases, strict=True)
        return PartsBase(tuple(linear_of(self.ops, *part) for part in parts))

    def _peek(self, name: str) -> LinearWeight:
        weight = self.weights[name]
        assert not isinstance(weight, StackedWeight), name
        if not isinstance(weight, LinearWeight):
            return LinearWeight((weight,))
        # Once, however many products are made of it; the original is not kept beside it.
        own = LinearWeight(tuple(laid_out(self.ops, part) for part in weight.parts))
        self.weights[name] = own
        return own

    def _take(self, name: str) -> tuple[LinearWeight, torch.Tensor | None]:
        weight, bias = self._peek(name), self._bias(name)
        del self.weights[name]
        self.weights.pop(f"{name}_bias", None)
        return weight, bias

    def _bias(self, name: str) -> torch.Tensor | None:
        found = self.weights.get(f"{name}_bias")
        assert found is None or isinstance(found, torch.Tensor), name
        return found

    def experts(self, name: str) -> torch.Tensor | StackedWeight:
        """Weights of all experts, which one operation takes together."""
        found = self.weights.pop(name)
        assert not isinstance(found, LinearWeight), name
        return found

    def optional(self, name: str) -> torch.Tensor | None:
        """A weight that no product is made with, if there is one."""
        return self.tensor(name) if name in self.weights else None

    def tensor(self, name: str) -> torch.Tensor:
        """A weight that no product is made with."""
        found = self.weights.pop(name)
        assert isinstance(found, torch.Tensor), name
        return found


def _dense(weight: LinearWeight, bias: torch.Tensor | None) -> DenseWeight | None:
    return None if weight.dense is None else DenseWeight(weight.dense, bias)


# -- what products are made of: x [T, in] -> [T, out], or added to the stream [T, out] --------


@dataclass(frozen=True, slots=True)
class PartsBase:
    """A product whose outputs are those of several weights, one behind the other."""

    parts: tuple[BaseLinear, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """One launch per part."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


@dataclass(frozen=True, slots=True)
class NormedBase:
    """Norm, product, and gate if there is one, one after the other."""

    base: BaseLinear
    norm: RowNorm
    rms_norm: RmsNorm
    activation: Activation | None
    act_mul: ActMul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Gated: half as many outputs."""
        y = self.base(self.rms_norm(x, self.norm.weight, self.norm.epsilon))
        return y if self.activation is None else self.act_mul(y, self.activation)


@dataclass(frozen=True, slots=True)
class BaseProduct:
    """A product that no adapter changes."""

    base: BaseLinear

    def __call__(self, x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        """Whatever the step."""
        return self.base(x)


@dataclass(frozen=True, slots=True)
class AdaptedProduct:
    """A product that adapters change in steps in which rows have any."""

    name: str
    base: BaseLinear
    adapted: AdaptedLinear
    delta: Delta

    def __call__(self, x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        """By what the step's adapters make of the weight's name."""
        added = self.delta(self.name, step)
        return self.base(x) if added is None else self.adapted(x, added)


@dataclass(frozen=True, slots=True)
class BiasedProduct:
    """The first rank's summand of a product whose inputs ranks divide, and the bias."""

    product: Product
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        """Of this rank; ranks are summed elsewhere."""
        return self.product(x, step).add_(self.bias)


@dataclass(frozen=True, slots=True)
class SummedProduct:
    """A product whose inputs ranks divide, summed over them; the bias is added behind the sum."""

    product: Product
    group: Group
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        """The same on all ranks, which call it together."""
        y = self.product(x, step)
        self.group.sum(y)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True, slots=True)
class AddedProduct:
    """A product, then the sum with the stream."""

    product: Product

    def __call__(self, x: torch.Tensor, stream: torch.Tensor, step: ForwardBatch | None) -> None:
        """In place."""
        stream += self.product(x, step)


@dataclass(frozen=True, slots=True)
class BaseAdd:
    """A product that ends in the stream, and that no adapter changes."""

    base: AddLinear

    def __call__(self, x: torch.Tensor, stream: torch.Tensor, step: ForwardBatch | None) -> None:
        """In place, whatever the step."""
        self.base(x, stream)


@dataclass(frozen=True, slots=True)
class AdaptedAddProduct:
    """A product that ends in the stream, and that adapters change in steps with any.

    The adapted one has no bias where ranks sum; it is added behind.
    """

    name: str
    base: AddLinear
    adapted: AdaptedAdd
    delta: Delta
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, stream: torch.Tensor, step: ForwardBatch | None) -> None:
        """In place."""
        added = self.delta(self.name, step)
        if added is None:
            self.base(x, stream)
            return
        self.adapted(x, stream, added)
        if self.bias is not None:
            stream += self.bias
