"""Products of a model. Which operation makes a product is decided here and nowhere else.

A product is given the step it is part of, so that what it adds may depend on whose token it is.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch

from tokenpod.kernels.adapter_ops import AdaptedAdd, AdaptedLinear, Added
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

#: (weight's name, step) -> what adapters add to that product, or None.
Delta = Callable[[str, ForwardBatch | None], Added | None]


def no_delta(name: str, step: ForwardBatch | None) -> None:
    """Nothing is added to any product."""
    del name, step


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
        weight, bias = self._take(name)
        return self._with_delta(name, self._plain(weight, bias), self._adapted(weight, bias))

    def norm_linear(self, name: str, norm: RowNorm, activation: Activation | None) -> Product:
        """The product `name` of the normed stream; gated if there is an `activation`."""
        weight, bias = self._take(name)
        if len(weight.parts) == 1:
            fused = fused_norm_linear(self.ops, weight.parts[0], bias, norm, activation)
            if fused is not None:
                also = self._adapted(weight, bias, norm, activation)
                return self._with_delta(name, fused, also, norm)
        ops = self.ops
        plain = self._with_delta(name, self._plain(weight, bias), self._adapted(weight, bias))

        def normed_product(x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
            y = plain(ops.rms_norm(x, norm.weight, norm.epsilon), step)
            return y if activation is None else ops.act_mul(y, activation)

        return normed_product

    def sum_linear(self, name: str) -> Product:
        """The product `name` whose inputs ranks divide: the sum over all of them."""
        weight, bias = self._take(name)
        adapted = self._adapted(weight, None)
        product = self._with_delta(name, self._plain(weight, None), adapted)
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
            adapted, whole = self.ops.adapted, weight.parts[0]
            also = None
            if adapted is not None and isinstance(whole, torch.Tensor):
                also = adapted.add_linear(whole, bias)
            return self._added(name, fused, also)
        product = self.sum_linear(name)

        def add(x: torch.Tensor, stream: torch.Tensor, step: ForwardBatch | None) -> None:
            stream += product(x, step)

        return add

    def _added(self, name: str, fused: AddLinear, adapted: AdaptedAdd | None) -> AddProduct:
        delta = self.delta
        if delta is no_delta:
            return lambda x, stream, step: fused(x, stream)

        def add_product(x: torch.Tensor, stream: torch.Tensor, step: ForwardBatch | None) -> None:
            added = delta(name, step)
            if added is None:
                fused(x, stream)
            elif adapted is None:
                fused(x, stream, added.made(x))
            else:
                adapted(x, stream, added)

        return add_product

    def _with_delta(
        self,
        name: str,
        product: Linear,
        adapted: AdaptedLinear | None,
        norm: RowNorm | None = None,
    ) -> Product:
        """`norm`: of what is multiplied, where that is part of the product."""
        delta, rms_norm = self.delta, self.ops.rms_norm
        if delta is no_delta:
            return lambda x, step: product(x)

        def product_of_step(x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
            added = delta(name, step)
            if added is None:
                return product(x)
            if adapted is not None:
                return adapted(x, added)
            read = x if norm is None else rms_norm(x, norm.weight, norm.epsilon)
            return product(x, added.made(read))

        return product_of_step

    def _adapted(
        self,
        weight: LinearWeight,
        bias: torch.Tensor | None,
        norm: RowNorm | None = None,
        activation: Activation | None = None,
    ) -> AdaptedLinear | None:
        """The plain product with adapters' terms, where there is one of the whole weight."""
        whole = weight.parts[0]
        if self.ops.adapted is None or len(weight.parts) > 1 or not isinstance(whole, torch.Tensor):
            return None
        return self.ops.adapted.linear(whole, bias, norm, activation)

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
