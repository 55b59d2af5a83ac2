"""One layer: two branches, and how their results meet the stream.

A branch reads the stream [T, hidden], and writes what it found into it. In between lies all but its
last product, so that branches that read the same stream can run before either writes. Where nothing
lies between a norm and the product behind it, or between a product and the stream, both are one
operation; otherwise they are several plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import AttentionOptions, AttentionPlan, Rotation
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.expert_ops import ExpertWeights
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.models.heads import make_heads
from tokenpod.models.latent import make_latent
from tokenpod.models.layer_spec import (
    SAME,
    Alibi,
    Attention,
    Experts,
    Join,
    Latent,
    LayerSpec,
    Mlp,
    Norm,
)
from tokenpod.models.linear import AddProduct, Product, Products


@dataclass(frozen=True, slots=True)
class Step:
    """A step's tokens, and what all layers share of it."""

    batch: ForwardBatch
    pool: KVPool
    #: By window; of latent rows, which have none, under None.
    plans: Mapping[int | None, AttentionPlan]
    #: By the number of the rotation.
    rotations: list[Rotation]


#: The stream [T, hidden] -> what the branch's last product reads.
Read = Callable[[torch.Tensor, Step], torch.Tensor]

#: What was read, and the stream, changed in place.
Write = Callable[[torch.Tensor, torch.Tensor, Step], None]

#: [T, n] -> the same, normed.
NormRows = Callable[[torch.Tensor], torch.Tensor]

#: The stream before a layer -> the stream behind it; may change its argument.
Layer = Callable[[torch.Tensor, Step], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Branch:
    """A layer's attention or its feed-forward block."""

    read: Read
    write: Write


def make_layer(spec: LayerSpec, products: Products, i: int, rotation: int) -> Layer:
    """Layer `i`, whose heads are turned by the step's rotation of that number."""
    norms, post = spec.norms, spec.join is Join.POST_NORM
    mlp_in = None if norms.mlp_in is SAME else norms.mlp_in
    same = norms.mlp_in is SAME
    shared = make_norm(norms.attention_in, products, f"{i}.attention_in") if same else None
    attention = Branch(
        read_attention(spec.attention, products, i, rotation, None if same else norms.attention_in),
        _write(
            products,
            f"{i}.output",
            None if post else norms.attention_out,
            f"{i}.attention_out",
            spec.branch_scale,
        ),
    )
    mlp_out = None if post else norms.mlp_out
    if isinstance(spec.mlp, Experts):
        mlp = _experts(spec.mlp, products, i, mlp_in, mlp_out, spec.branch_scale)
    else:
        read = _read_mlp(spec.mlp, products, i, mlp_in)
        mlp = Branch(
            read, _write(products, f"{i}.down", mlp_out, f"{i}.mlp_out", spec.branch_scale)
        )
    if spec.join is Join.PARALLEL:
        return _parallel(attention, mlp, shared)
    if not post:
        return _sequential(attention, mlp)
    after_attention = make_norm(norms.attention_out, products, f"{i}.attention_out")
    return _post_norm(
        attention, mlp, after_attention, make_norm(norms.mlp_out, products, f"{i}.mlp_out")
    )


def _sequential(attention: Branch, mlp: Branch) -> Layer:
    def layer(x: torch.Tensor, step: Step) -> torch.Tensor:
        attention.write(attention.read(x, step), x, step)
        mlp.write(mlp.read(x, step), x, step)
        return x

    return layer


def _parallel(attention: Branch, mlp: Branch, shared: NormRows | None) -> Layer:
    def layer(x: torch.Tensor, step: Step) -> torch.Tensor:
        seen = x if shared is None else shared(x)
        attended, inner = attention.read(seen, step), mlp.read(seen, step)
        # In this order: a mixture of experts reads the stream when it writes.
        mlp.write(inner, x, step)
        attention.write(attended, x, step)
        return x

    return layer


def _post_norm(
    attention: Branch, mlp: Branch, after_attention: NormRows, after_mlp: NormRows
) -> Layer:
    def layer(x: torch.Tensor, step: Step) -> torch.Tensor:
        attention.write(attention.read(x, step), x, step)
        x = after_attention(x)
        mlp.write(mlp.read(x, step), x, step)
        return after_mlp(x)

    return layer


def make_norm(norm: Norm | None, products: Products, name: str) -> NormRows:
    """The norm whose weight is `name`; without one, nothing is done."""
    if norm is None:
        return lambda x: x
    weight, bias = (
        products.tensor(at) if has else None
        for at, has in ((name, norm.weight), (f"{name}_bias", norm.bias))
    )
    epsilon = norm.epsilon
    if norm.kind == "layer":
        layer_norm = products.ops.layer_norm
        return lambda x: layer_norm(x, weight, bias, epsilon)
    assert weight is not None, "an rms norm has one"
    rms_norm, scale = products.ops.rms_norm, weight
    return lambda x: rms_norm(x, scale, epsilon)


def _norm_product(
    products: Products, name: str, norm: Norm | None, norm_name: str, mlp: Mlp | None = None
) -> Product:
    """The product `name` of the normed stream, activated as `mlp` says."""
    ops = products.ops
    gate = mlp.activation if mlp and mlp.gated else None
    if norm is not None and norm.kind == "rms":
        row_norm = RowNorm(products.tensor(norm_name), norm.epsilon)
        return _activated(products, products.norm_linear(name, row_norm, gate), mlp)
    before, product = make_norm(norm, products, norm_name), products.linear(name)

    def of_normed(x: torch.Tensor, step: ForwardBatch | None) -> torch.Tensor:
        y = product(before(x), step)
        return y if gate is None else ops.act_mul(y, gate)

    return _activated(products, of_normed, mlp)


def _activated(products: Products, product: Product, mlp: Mlp | None) -> Product:
    """With the activation of a block without gates; gates have had theirs."""
    if mlp is None or mlp.gated:
        return product
    activate, kind = products.ops.activate, mlp.activation
    return lambda x, step: activate(product(x, step), kind)


def _read_latent(
    spec: Latent, products: Products, i: int, rotation: int, norm: Norm | None
) -> Read:
    first = _norm_product(products, f"{i}.latent_in", norm, f"{i}.attention_in")
    attend = make_latent(spec, products, i, first)
    return lambda x, step: attend(
        x, step.batch, step.pool, step.rotations[rotation], step.plans[None]
    )


def read_attention(
    spec: Attention | Latent, products: Products, i: int, rotation: int, norm: Norm | None
) -> Read:
    """What attention of layer `i` reads: heads' results [T, H * D], of a product of the stream."""
    if isinstance(spec, Latent):
        return _read_latent(spec, products, i, rotation, norm)
    ops = products.ops
    qkv = _norm_product(products, f"{i}.qkv", norm, f"{i}.attention_in")
    heads = make_heads(spec, products, i)
    options = _options(spec, products, i)
    window = spec.window

    def read(x: torch.Tensor, step: Step) -> torch.Tensor:
        batch, pool = step.batch, step.pool
        keys, values, scales = pool.keys[i], pool.values[i], pool.scales[i]
        angles = step.rotations[rotation]
        y = heads.before(qkv(x, batch))
        q = ops.store_key_value(y, angles, heads.norm, keys, values, batch.t_slot, scales)
        q = heads.after(q, batch.t_position)
        return ops.attention(q, keys, values, step.plans[window], options, scales)

    return read


def _options(spec: Attention, products: Products, i: int) -> AttentionOptions:
    slopes = None
    if isinstance(spec.positions, Alibi):
        slopes = torch.tensor(spec.positions.slopes, device=products.device)
    return AttentionOptions(
        scale=spec.scale,
        softcap=spec.softcap,
        alibi_slopes=slopes,
        sinks=products.tensor(f"{i}.sinks") if spec.sinks else None,
    )


def mlp_branch(spec: Mlp, products: Products, i: int, norm: Norm | None) -> Branch:
    """A feed-forward block whose result is added to the stream as it is."""
    return Branch(_read_mlp(spec, products, i, norm), plain_write(products, f"{i}.down"))


def plain_write(products: Products, name: str) -> Write:
    """The product `name`, added to the stream."""
    return _write(products, name, None, "", 1.0)


def _read_mlp(spec: Mlp, products: Products, i: int, norm: Norm | None) -> Read:
    up = _norm_product(products, f"{i}.up", norm, f"{i}.mlp_in", spec)
    return lambda x, step: up(x, step.batch)


def _write(products: Products, name: str, norm: Norm | None, norm_name: str, scale: float) -> Write:
    """The product `name`, normed if there is a norm, times `scale`, added to the stream."""
    if norm is None and scale == 1.0:
        add: AddProduct = products.add_linear(name)
        return lambda inner, x, step: add(inner, x, step.batch)
    product, after = products.sum_linear(name), make_norm(norm, products, norm_name)

    def write(inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        x.add_(after(product(inner, step.batch)), alpha=scale)

    return write


def _experts(
    spec: Experts,
    products: Products,
    i: int,
    norm_in: Norm | None,
    norm_out: Norm | None,
    scale: float,
) -> Branch:
    """One operation from the stream to the stream, or two: that and the shared block."""
    assert norm_in is not None, "a mixture has a norm of its own"
    fused = norm_in.kind == "rms" and spec.shared is None
    row_norm = RowNorm(products.tensor(f"{i}.mlp_in"), norm_in.epsilon) if fused else None
    before = make_norm(None if fused else norm_in, products, f"{i}.mlp_in")
    at = f"{i}.experts"
    weights = ExpertWeights(
        products.tensor(f"{at}.router"),
        products.experts(f"{at}.gate_up"),
        products.experts(f"{at}.down"),
        *(products.optional(f"{at}.{part}") for part in ExpertWeights._fields[3:]),
    )
    block = products.ops.prepare_experts(weights, row_norm, spec.activation, spec.routing)
    shared = None if spec.shared is None else _shared(spec.shared, spec.shared_gate, products, i)
    after = make_norm(norm_out, products, f"{i}.mlp_out")

    def write(inner: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        into = x if norm_out is None and scale == 1.0 else torch.zeros_like(x)
        block(inner, into)
        if shared is not None:
            shared(inner, into, step)
        if into is not x:
            x.add_(after(into), alpha=scale)

    return Branch(lambda x, step: before(x), write)


def _shared(spec: Mlp, has_gate: bool, products: Products, i: int) -> Write:
    """The block that works for every token; its gate, a number per token, acts before its end."""
    up = _norm_product(products, f"{i}.shared_up", None, "", spec)
    gate = products.linear(f"{i}.shared_gate") if has_gate else None
    down = products.add_linear(f"{i}.shared_down")

    def write(normed: torch.Tensor, into: torch.Tensor, step: Step) -> None:
        inner = up(normed, step.batch)
        if gate is not None:
            inner = inner * gate(normed, step.batch).sigmoid()
        down(inner, into, step.batch)

    return write
