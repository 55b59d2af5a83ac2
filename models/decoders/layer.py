"""One layer: two branches, and how their results meet the stream.

A branch reads the stream [T, hidden], and writes what it found into it. In between lies all but its
last product, so that branches that read the same stream can run before either writes. Where nothing
lies between a norm and the product behind it, or between a product and the stream, both are one
operation; otherwise they are several plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tokenpod.kernels.operations.expert_ops import AddExperts, ExpertWeights, Shared
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.models.layers.linear import AddProduct, Product, Products
from tokenpod.models.layers.mixer import Mix, Mixer, MixerParts
from tokenpod.models.layers.normed import ActivatedProduct, NormedProduct, normed_product
from tokenpod.models.layers.norms import (
    Norm,
    NormOfSum,
    NormRows,
    make_norm,
    make_norm_of_sum,
)
from tokenpod.models.layers.step import Step
from tokenpod.models.specs.layer_spec import (
    BESIDE,
    SAME,
    Experts,
    Join,
    LayerSpec,
    Mlp,
    PerLayer,
    Same,
)


class Layer(Protocol):
    """A layer with its weights."""

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The stream [T, hidden] before the layer -> the stream behind it; may change `x`."""
        ...


class Branch(Protocol):
    """A layer's mixer or its feed-forward block."""

    def read(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The stream [T, hidden] -> what the branch's last part reads."""
        ...

    def write(self, inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """What was read, into the stream, which is changed in place."""
        ...


def make_layer(spec: LayerSpec, parts: MixerParts) -> Layer:
    """The layer of a spec, with its weights."""
    norms, products = spec.norms, parts.products
    post = spec.join is Join.POST_NORM
    if spec.mixer is None or spec.mlp is None:
        own = _mixer(spec.mixer, spec, parts) if spec.mixer is not None else None
        return _followed(SingleLayer(own or _mlp(spec, parts)), spec, parts)
    if spec.beside is not None:
        norm = make_norm(norms.attention_in, products, parts.named("attention_in"))
        other = replace(parts, beside=BESIDE)
        mixer = mixer_branch(spec.mixer.make(parts, None), parts)
        beside = mixer_branch(spec.beside.make(other, None), other)
        return _followed(BesideLayer(norm, mixer, beside, _mlp(spec, parts)), spec, parts)
    first, mlp = _mixer(spec.mixer, spec, parts), _mlp(spec, parts)
    if spec.join is Join.PARALLEL:
        shared = None
        if norms.mlp_in is SAME:
            shared = make_norm(norms.attention_in, products, parts.named("attention_in"))
        return _followed(ParallelLayer(shared, first, mlp), spec, parts)
    if not post or _norms_sums(spec, parts):
        return _followed(SequentialLayer(first, mlp), spec, parts)
    return PostNormLayer(
        first,
        make_norm(norms.attention_out, products, parts.named("attention_out")),
        mlp,
        make_norm(norms.mlp_out, products, parts.named("mlp_out")),
    )


def _norms_sums(spec: LayerSpec, parts: MixerParts) -> bool:
    """Whether the stream is normed behind each branch, in one operation with the sum."""
    norms = spec.norms.attention_out, spec.norms.mlp_out
    fused = parts.products.ops.add_layer_norm is not None and isinstance(spec.mlp, Mlp)
    layer_norms = all(norm is not None and norm.kind == "layer" for norm in norms)
    return spec.join is Join.POST_NORM and fused and layer_norms and spec.branch_scale == 1.0


def _mixer(mixer: Mixer, spec: LayerSpec, parts: MixerParts) -> Branch:
    norms = spec.norms
    norm_in = None if norms.mlp_in is SAME else norms.attention_in
    mix = mixer.make(parts, norm_in)
    if _norms_sums(spec, parts):
        return MixerBranch(mix, _normed_sum(parts, "output", norms.attention_out, "attention_out"))
    norm_out = None if spec.join is Join.POST_NORM else norms.attention_out
    output = _output(parts, "output", norm_out, "attention_out", spec.branch_scale)
    return MixerBranch(mix, output)


def _mlp(spec: LayerSpec, parts: MixerParts) -> Branch:
    norms, scale = spec.norms, spec.branch_scale
    norm_in = None if isinstance(norms.mlp_in, Same) else norms.mlp_in
    norm_out = None if spec.join is Join.POST_NORM else norms.mlp_out
    assert spec.mlp is not None, "a layer has one branch at least"
    if isinstance(spec.mlp, Mlp) and _norms_sums(spec, parts):
        up = _up(spec.mlp, parts.products, parts.named("up"), norm_in, parts.named("mlp_in"))
        return MlpBranch(up, _normed_sum(parts, "down", norms.mlp_out, "mlp_out"))
    if isinstance(spec.mlp, Experts):
        return ExpertsBranch(spec.mlp, parts, norm_in, norm_out, scale)
    return mlp_branch(spec.mlp, parts, norm_in, norm_out, scale)


@dataclass(frozen=True, slots=True)
class SingleLayer:
    """A layer with one branch."""

    branch: Branch

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """See `Layer`."""
        self.branch.write(self.branch.read(x, step), x, step)
        return x


@dataclass(frozen=True, slots=True)
class BesideLayer:
    """Two mixers read the same, and the feed-forward block what both have written."""

    norm: NormRows
    mixer: Branch
    beside: Branch
    mlp: Branch

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """See `Layer`."""
        seen, mlp = self.norm(x), self.mlp
        found = [each.read(seen, step) for each in (self.mixer, self.beside)]
        self.mixer.write(found[0], x, step)
        self.beside.write(found[1], x, step)
        mlp.write(mlp.read(x, step), x, step)
        return x


@dataclass(frozen=True, slots=True)
class SequentialLayer:
    """The feed-forward block reads what the mixer has written."""

    mixer: Branch
    mlp: Branch

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The stream behind both branches."""
        mixer, mlp = self.mixer, self.mlp
        mixer.write(mixer.read(x, step), x, step)
        mlp.write(mlp.read(x, step), x, step)
        return x


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """Both branches read the same."""

    #: Of what both read; None: each has its own, if any.
    norm: NormRows | None
    mixer: Branch
    mlp: Branch

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The stream behind both branches, each of which has read what was before."""
        seen = x if self.norm is None else self.norm(x)
        mixed, inner = self.mixer.read(seen, step), self.mlp.read(seen, step)
        # In this order: a mixture of experts reads the stream when it writes.
        self.mlp.write(inner, x, step)
        self.mixer.write(mixed, x, step)
        return x


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """The stream is normed behind each branch."""

    mixer: Branch
    after_mixer: NormRows
    mlp: Branch
    after_mlp: NormRows

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The stream, normed behind each branch."""
        mixer, mlp = self.mixer, self.mlp
        mixer.write(mixer.read(x, step), x, step)
        x = self.after_mixer(x)
        mlp.write(mlp.read(x, step), x, step)
        return self.after_mlp(x)


@dataclass(frozen=True, slots=True)
class FollowedLayer:
    """A layer, then a branch that reads an embedding of its own, then a factor (Gemma 4)."""

    layer: Layer
    per_layer: Branch | None
    #: [1]
    scale: torch.Tensor | None

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The stream behind the layer, the branch that follows, and the factor."""
        x = self.layer(x, step)
        if self.per_layer is not None:
            self.per_layer.write(self.per_layer.read(x, step), x, step)
        return x if self.scale is None else x.mul_(self.scale)


def _followed(layer: Layer, spec: LayerSpec, parts: MixerParts) -> Layer:
    if spec.per_layer is None and not spec.scaled:
        return layer
    branch = None if spec.per_layer is None else PerLayerBranch(spec.per_layer, parts)
    scale = parts.products.tensor(parts.named("layer_scale")) if spec.scaled else None
    return FollowedLayer(layer, branch, scale)


class PerLayerBranch:
    """What a layer makes of the stream and of the token's embedding of that layer."""

    def __init__(self, spec: PerLayer, parts: MixerParts) -> None:
        products = parts.products
        self._layer, self._activation = parts.layer, spec.activation
        self._activate = products.ops.activate
        self._gate = products.linear(parts.named("per_layer_gate"))
        norm = make_norm(spec.norm, products, parts.named("per_layer_norm"))
        self._output = ScaledOutput(products.linear(parts.named("per_layer_out")), norm, 1.0)

    def read(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The gate of the stream, times the layer's own embedding of each token."""
        assert step.per_layer is not None, "the decoder has embeddings per layer"
        gate = self._activate(self._gate(x, step.batch), self._activation)
        return gate * step.per_layer[:, self._layer]

    def write(self, inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """Its product, normed, is added to the stream."""
        self._output(inner, x, step)


class Output(Protocol):
    """The end of a branch."""

    def __call__(self, inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """What the branch made, into the stream `x`, which is changed in place."""
        ...


@dataclass(frozen=True, slots=True)
class AddedOutput:
    """A product that ends in the stream."""

    product: AddProduct

    def __call__(self, inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """The product is added to the stream."""
        self.product(inner, x, step.batch)


@dataclass(frozen=True, slots=True)
class ScaledOutput:
    """A product, normed, of which a multiple is added to the stream."""

    product: Product
    norm: NormRows
    scale: float

    def __call__(self, inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """The product, normed and scaled, is added to the stream."""
        x.add_(self.norm(self.product(inner, step.batch)), alpha=self.scale)


@dataclass(frozen=True, slots=True)
class NormedSum:
    """A product that is added to the stream, which is normed then."""

    product: Product
    norm: NormOfSum

    def __call__(self, inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """The stream becomes the norm of its sum with the product."""
        self.norm(x, self.product(inner, step.batch))


def _normed_sum(parts: MixerParts, name: str, norm: Norm | None, norm_name: str) -> Output:
    assert norm is not None, "a stream without a norm is not normed"
    product = parts.products.sum_linear(parts.named(name))
    return NormedSum(product, make_norm_of_sum(norm, parts.products, parts.named(norm_name)))


def _output(
    parts: MixerParts, name: str, norm: Norm | None, norm_name: str, scale: float
) -> Output:
    """The product `name`, normed if there is a norm, times `scale`, added to the stream."""
    products = parts.products
    if norm is None and scale == 1.0:
        return AddedOutput(products.add_linear(parts.named(name)))
    product = products.sum_linear(parts.named(name))
    return ScaledOutput(product, make_norm(norm, products, parts.named(norm_name)), scale)


@dataclass(frozen=True, slots=True)
class MixerBranch:
    """A mixer, and the product behind it."""

    mix: Mix
    output: Output

    def read(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """What heads found, [T, features]."""
        return self.mix(x, step)

    def write(self, inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """The product behind the mixer ends in the stream."""
        self.output(inner, x, step)


@dataclass(frozen=True, slots=True)
class MlpBranch:
    """A dense feed-forward block."""

    up: Product
    output: Output

    def read(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The activated first product, [T, width]."""
        return self.up(x, step.batch)

    def write(self, inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """The second product ends in the stream."""
        self.output(inner, x, step)


def mixer_branch(mix: Mix, parts: MixerParts) -> MixerBranch:
    """A mixer whose result is added to the stream as it is."""
    return MixerBranch(mix, _output(parts, "output", None, "", 1.0))


def mlp_branch(
    spec: Mlp,
    parts: MixerParts,
    norm_in: Norm | None,
    norm_out: Norm | None = None,
    scale: float = 1.0,
) -> MlpBranch:
    """A dense feed-forward block, with its weights."""
    return MlpBranch(
        _up(spec, parts.products, parts.named("up"), norm_in, parts.named("mlp_in")),
        _output(parts, "down", norm_out, "mlp_out", scale),
    )


def _up(spec: Mlp, products: Products, name: str, norm: Norm | None, norm_name: str) -> Product:
    """The first product of a block, of the stream behind a norm, activated."""
    if spec.gated:
        return normed_product(products, name, norm, norm_name, spec.activation)
    if norm is None or norm.kind == "layer":
        fused = products.activated_linear(name, spec.activation)
        if fused is not None:
            if norm is None:
                return fused
            return NormedProduct(make_norm(norm, products, norm_name), fused)
    product = normed_product(products, name, norm, norm_name)
    return ActivatedProduct(product, products.ops.activate, spec.activation)


class ExpertsBranch:
    """A mixture of experts: one operation from the stream to the stream, or several."""

    def __init__(
        self,
        spec: Experts,
        parts: MixerParts,
        norm_in: Norm | None,
        norm_out: Norm | None,
        scale: float,
    ) -> None:
        assert norm_in is not None, "a mixture has a norm of its own"
        products, at = parts.products, parts.named("experts")
        fused = norm_in.kind == "rms" and spec.shared is None and spec.inner is None
        norm_name = parts.named("mlp_in")
        row_norm = RowNorm(products.tensor(norm_name), norm_in.epsilon) if fused else None
        #: Does nothing where the operation norms the stream.
        self._before = make_norm(None if fused else norm_in, products, norm_name)
        weights = ExpertWeights(
            products.tensor(f"{at}.router"),
            products.experts(f"{at}.gate_up"),
            products.experts(f"{at}.down"),
            *(products.optional(f"{at}.{part}") for part in ExpertWeights._fields[3:]),
        )
        self._experts: AddExperts = products.ops.prepare_experts(
            weights, row_norm, spec.activation, spec.routing
        )
        self._shared = None
        if spec.shared is not None:
            down = products.part_linear if spec.inner is None else products.sum_linear
            self._shared = SharedExpert(spec.shared, spec.shared_gate, parts, down)
        #: Products before and behind experts of another width.
        self._ends = None
        if spec.inner is not None:
            names = parts.named("experts_in"), parts.named("experts_out")
            self._ends = products.linear(names[0]), products.linear(names[1])
        self._after = make_norm(norm_out, products, parts.named("mlp_out"))
        self._scale = scale
        #: Whether what the experts say is the stream's as it is.
        self._plain = norm_out is None and scale == 1.0

    def read(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The stream as experts read it, which norm it themselves where they can."""
        del step
        return self._before(x)

    def write(self, inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        """The experts' sum, the shared block's among them, is added to the stream."""
        into = x if self._plain else torch.zeros_like(x)
        shared = None if self._shared is None else self._shared(inner, step)
        if self._ends is None:
            self._experts(inner, into, shared)
        else:
            seen = self._ends[0](inner, step.batch)
            made = torch.zeros_like(seen)
            self._experts(inner, made, None, seen)
            into += self._ends[1](made, step.batch)
            if shared is not None:
                into += shared.result
        if into is not x:
            x.add_(self._after(into), alpha=self._scale)


class SharedExpert:
    """The block that works for every token, and its gate, a number per token."""

    def __init__(
        self, spec: Mlp, has_gate: bool, parts: MixerParts, down: Callable[[str], Product]
    ) -> None:
        products = parts.products
        self._up = _up(spec, products, parts.named("shared_up"), None, "")
        self._gate = products.linear(parts.named("shared_gate")) if has_gate else None
        self._down = down(parts.named("shared_down"))

    def __call__(self, normed: torch.Tensor, step: Step) -> Shared:
        """Of what is normed [T, hidden]: this rank's part of a sum, or the sum."""
        made = self._down(self._up(normed, step.batch), step.batch)
        return Shared(made, None if self._gate is None else self._gate(normed, step.batch))
