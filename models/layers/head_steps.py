"""What happens to queries, keys and values between their product and the attention.

The norm of each head with one weight for all is part of the operation that stores keys and values.
Everything else that families do here is plain operations, which every device has.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from tokenpod.kernels.operations.group import Group
from tokenpod.kernels.operations.pointwise_ops import HeadNorm


class NormOver(Enum):
    """What a norm of queries and keys takes as one row."""

    #: Each head, all with the same weight.
    HEAD = "head"
    #: Each head, each with a weight of its own.
    HEADS = "heads"
    #: All heads of queries together, and all of keys.
    ALL = "all"


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + rate · ln(1 + p // length) (Llama 4)."""

    rate: float
    length: int


class NormBoth(Protocol):
    """A norm of queries and keys by torch, in float32."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H · D] and keys [T, K · D] -> the same, normed."""
        ...


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """What one layer does before keys are stored, while they are, and to queries afterwards."""

    #: Numbers of a token's queries, and of its keys.
    queries: int
    keys: int
    #: Part of the operation that stores keys.
    norm: HeadNorm | None
    #: Before it.
    plain_norm: NormBoth | None
    #: Queries, keys and values are kept within ±clip.
    clip: float | None
    growth: QueryGrowth | None

    def before(self, qkv: torch.Tensor) -> torch.Tensor:
        """The product [T, (H + K) · D + K · V] -> the same, changed; may change its argument."""
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        if self.plain_norm is None:
            return qkv
        q, k, v = qkv.tensor_split((self.queries, self.queries + self.keys), dim=-1)
        return torch.cat((*self.plain_norm(q, k), v), dim=-1)

    def after(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, D] at positions [T] -> queries."""
        growth = self.growth
        if growth is None:
            return queries
        times = 1 + growth.rate * torch.log1p((positions // growth.length).float())
        return queries * times.to(queries.dtype)[:, None, None]


@dataclass(frozen=True, slots=True)
class EachHead:
    """The norm of each head."""

    #: [D], or [heads, D] where each has its own.
    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float
    #: Whether the mean is taken away first.
    centred: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads · D] -> the same, normed."""
        wide = x.float().view(len(x), -1, self.weight.shape[-1])
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon) * self.weight
        return (wide if self.bias is None else wide + self.bias).flatten(-2).to(x.dtype)


@dataclass(frozen=True, slots=True)
class OverHeads:
    """Norms of each head of queries, and of keys."""

    of_queries: EachHead
    of_keys: EachHead

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each head of both, normed by itself."""
        return self.of_queries(q), self.of_keys(k)


@dataclass(frozen=True, slots=True)
class OverAll:
    """Norms of all heads of queries together, and of all of keys, whichever rank has them."""

    #: [H · D] and [K · D] float32: this rank's.
    query_weight: torch.Tensor
    key_weight: torch.Tensor
    epsilon: float
    group: Group | None

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, each token's heads normed together."""
        wide_q, wide_k = q.float(), k.float()
        # Every rank has as many keys, if of the same heads where those are fewer than ranks.
        squares = torch.stack([x.square().mean(-1) for x in (wide_q, wide_k)], dim=-1)
        if self.group is not None:
            self.group.sum(squares)
            squares /= self.group.world
        scales = torch.rsqrt(squares + self.epsilon)
        return (
            (wide_q * scales[:, :1] * self.query_weight).to(q.dtype),
            (wide_k * scales[:, 1:] * self.key_weight).to(k.dtype),
        )
