"""What happens to queries, keys and values between their product and the attention.

The norm of each head with one weight for all is part of the operation that stores keys and values.
Everything else that families do here is plain operations, which every device has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.pointwise_ops import HeadNorm
from tokenpod.models.layer_spec import Attention, Norm, NormOver
from tokenpod.models.linear import Products
from tokenpod.models.shard import Shard
from tokenpod.models.weights import Axis, Division

#: The product [T, (H + 2K) · D] -> the same, changed; may change its argument.
Before = Callable[[torch.Tensor], torch.Tensor]

#: Queries [T, H · D] and keys [T, K · D] -> the same, normed.
BeforeBoth = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: Queries [T, H, D] and positions [T] -> queries.
After = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """What one layer does before keys are stored, while they are, and to queries afterwards."""

    before: Before
    norm: HeadNorm | None
    after: After


def make_heads(spec: Attention, products: Products, i: int) -> HeadSteps:
    """The steps of layer `i`, whose norms' weights are taken."""
    norm, over, clip, growth = spec.qk_norm, spec.qk_norm_over, spec.clip, spec.query_growth
    fused: HeadNorm | None = None
    plain: Before = _as_it_is
    if norm is not None and norm.kind == "rms" and over is NormOver.HEAD:
        query_weight, key_weight = (products.tensor(f"{i}.{x}_norm") for x in "qk")
        fused = HeadNorm(query_weight, key_weight, norm.epsilon)
    elif norm is not None:
        plain = _plain_norm(spec, norm, products, i)

    def before(qkv: torch.Tensor) -> torch.Tensor:
        return plain(qkv if clip is None else qkv.clamp_(-clip, clip))

    def after(queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if growth is None:
            return queries
        times = 1 + growth.rate * torch.log1p((positions // growth.length).float())
        return queries * times.to(queries.dtype)[:, None, None]

    return HeadSteps(before, fused, after)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _plain_norm(spec: Attention, norm: Norm, products: Products, i: int) -> Before:
    """The norm of queries and keys by torch, in float32."""
    queries, keys = (count * spec.head_dim for count in (spec.heads, spec.kv_heads))
    if spec.qk_norm_over is NormOver.ALL:
        weights = [products.tensor(f"{i}.{x}_norm").float() for x in "qk"]
        both = _over_all(weights, norm, products.ops.group)
    else:
        divisions = {"q": Division.EVEN, "k": Division.KEY}
        q_norm, k_norm = (
            _over_head(*_own_weights(spec, products, f"{i}.{x}_norm", divisions[x]), norm)
            for x in "qk"
        )

        def both(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return q_norm(q), k_norm(k)

    def normed(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.tensor_split((queries, queries + keys), dim=-1)
        return torch.cat((*both(q, k), v), dim=-1)

    return normed


def _own_weights(
    spec: Attention, products: Products, name: str, division: Division
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A norm's weight and bias; where each head has its own, [heads, D] of this rank's heads."""
    weight, bias = products.tensor(name).float(), None
    if spec.qk_norm is not None and spec.qk_norm.bias:
        bias = products.tensor(f"{name}_bias").float()
    if spec.qk_norm_over is NormOver.HEADS:
        weight, group = weight.view(-1, spec.head_dim), products.ops.group
        if group is not None:
            own = Shard(group.rank, group.world).part(Axis(len(weight), division))
            weight = weight[own.start : own.stop].clone()
    return weight, bias


def _over_head(weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm) -> Before:
    head_dim, epsilon, centred = weight.shape[-1], norm.epsilon, norm.kind == "layer"

    def normed(x: torch.Tensor) -> torch.Tensor:
        wide = x.float().view(len(x), -1, head_dim)
        if centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight
        return (wide if bias is None else wide + bias).flatten(-2).to(x.dtype)

    return normed


def _over_all(weights: list[torch.Tensor], norm: Norm, group: Group | None) -> BeforeBoth:
    def normed(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = (q.float(), k.float())
        # Every rank has as many keys, if of the same heads where those are fewer than ranks.
        squares = torch.stack([x.square().mean(-1) for x in wide], dim=-1)
        if group is not None:
            group.sum(squares)
            squares /= group.world
        scales = torch.rsqrt(squares + norm.epsilon)
        q_normed, k_normed = (wide[j] * scales[:, j : j + 1] * weights[j] for j in range(2))
        return q_normed.to(q.dtype), k_normed.to(k.dtype)

    return normed
