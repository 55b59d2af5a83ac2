"""Products of a model. Which operation makes a product is decided here and nowhere else.

A product is given the step it is part of, so that what it adds may depend on whose token it is.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch

from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.compose import fused_add_linear, fused_norm_linear, linear_of
from tokenpod.kernels.ops import AddLinear, Linear, Operations
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.weight import LinearWeight, StackedWeight

#: Weights by our names, as they were loaded.
Weights = MutableMapping[str, torch.Tensor | LinearWeight | StackedWeight]

#: x [T, in] -> [T, out], of a step; None: outside of one.
Product = Callable[[torch.Tensor, ForwardBatch | None], torch.Tensor]

#: x [T, in], the stream [T, out], changed in place, and the step.
AddProduct = Callable[[torch.Tensor, torch.Tensor, ForwardBatch | None], None]

#: What a product multiplies, [T, in]. Called only where something is to be made of it, since behind
#: a norm that is part of the product it must be computed apart.
Read = Callable[[], torch.Tensor]

#: (weight's name, x [T, in], step) -> [T, out] that the product's sum starts from, or None.
Delta = Callable[[str, Read, ForwardBatch | None], torch.Tensor | None]


def no_delta(name: str, x: Read, step: ForwardBatch | None) -> None:
    """Nothing is added to any product."""
    del name, x, step


@dataclass(frozen=True, slots=True)
class Products:
    """Makes products of weights that it takes out of a table.

    Each weight [out, in] and, if there is one, its bias [out] are removed: an operation may hold
    the weight in another layout, and the original must not live on beside it.
    """

    ops: Operations
    weights: Weights
    delta: Delta = no_delta

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        table = self.weights["embedding"]
        assert isinstance(table, torch.Tensor)
        return table.device

    def linear(self, name: str) -> Product:
        """The product `name`: of ranks, this rank's rows."""
        product = self._plain(*self._take(name))
        return self._with_delta(name, product)

    def norm_linear(self, name: str, norm: RowNorm, activation: Activation | None) -> Product:
        """The product `name` of the normed stream; gated if there is an `activation`."""
        weight, bias = self._take(name)
        if len(weight.parts) == 1:
            fused = fused_norm_linear(self.ops, weight.parts[0], bias, norm, activation)
            if fused is not None:
                return self._with_delta(name, fused, norm)
        ops, plain = self.ops, self._with_delta(name, self._plain(weight, bias))

        def normed_product(x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
            y = plain(ops.rms_norm(x, norm.weight, norm.epsilon), step)
            return y if activation is None else ops.act_mul(y, activation)

        return normed_product

    def sum_linear(self, name: str) -> Product:
        """The product `name` whose inputs ranks divide: the sum over all of them."""
        weight, bias = self._take(name)
        product = self._with_delta(name, self._plain(weight, None))
        group = self.ops.group

        def summed_product(x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
            y = product(x, step)
            if group is not None:
                group.sum(y)
            return y if bias is None else y.add_(bias)

        return summed_product

    def add_linear(self, name: str) -> AddProduct:
        """The product `name` whose inputs ranks divide, added to the stream."""
        weight, bias = self._peek(name), self._bias(name)
        fused = None
        if len(weight.parts) == 1:
            fused = fused_add_linear(self.ops, weight.parts[0], bias)
        if fused is not None:
            self._take(name)
            return self._added(name, fused)
        product = self.sum_linear(name)

        def add(x: torch.Tensor, stream: torch.Tensor, step: ForwardBatch | None) -> None:
            stream += product(x, step)

        return add

    def _added(self, name: str, fused: AddLinear) -> AddProduct:
        delta = self.delta
        if delta is no_delta:
            return lambda x, stream, step: fused(x, stream)

        def add_product(x: torch.Tensor, stream: torch.Tensor, step: ForwardBatch | None) -> None:
            fused(x, stream, delta(name, lambda: x, step))

        return add_product

    def _with_delta(self, name: str, product: Linear, norm: RowNorm | None = None) -> Product:
        """`norm`: of what is multiplied, where that is part of the product."""
        delta, rms_norm = self.delta, self.ops.rms_norm
        if delta is no_delta:
            return lambda x, step: product(x)

        def product_of_step(x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
            def read() -> torch.Tensor:
                return x if norm is None else rms_norm(x, norm.weight, norm.epsilon)

            return product(x, delta(name, read, step))

        return product_of_step

    def _plain(self, weight: LinearWeight, bias: torch.Tensor | None) -> Linear:
        """One launch per part."""
        if len(weight.parts) == 1:
            return linear_of(self.ops, weight.parts[0], bias)
        lengths = [part.shape[0] for part in weight.parts]
        biases = [None] * len(lengths) if bias is None else list(torch.split(bias, lengths))
        products = [linear_of(self.ops, *part) for part in zip(weight.parts, biases, strict=True)]

        def joined(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
            y = torch.cat([product(x) for product in products], dim=-1)
            return y if delta is None else y.add_(delta)

        return joined

    def _peek(self, name: str) -> LinearWeight:
        weight = self.weights[name]
        assert not isinstance(weight, StackedWeight), name
        return weight if isinstance(weight, LinearWeight) else LinearWeight((weight,))

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
