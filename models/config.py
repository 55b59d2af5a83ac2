"""What the native decoder needs to know about a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.kernels.ops import Activation, Routing
from tokenpod.models.rope import Rope


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward blocks that are mixtures of experts."""

    #: Experts of a block.
    count: int
    #: Width of one expert.
    intermediate_size: int
    routing: Routing
    #: Layers that have them; the others' blocks are dense.
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A pre-norm decoder with rotary positions and gated feed-forward blocks."""

    architecture: str
    vocab_size: int
    hidden_size: int
    #: Width of a dense feed-forward block.
    intermediate_size: int
    layers: int
    #: Query heads.
    heads: int
    #: Key/value heads; each serves heads // kv_heads query heads.
    kv_heads: int
    head_dim: int
    #: Positions the model can address.
    max_positions: int
    norm_epsilon: float
    activation: Activation
    rope: Rope
    #: Per layer: how many positions back a token sees, itself included; None: all.
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    #: Queries and keys are normed head by head.
    qk_norm: bool
    #: The head's weight is the embedding.
    tied_head: bool
    #: What the checkpoint says its weights are; None if it does not.
    dtype: torch.dtype | None
    #: Tokens that end a text.
    eos_token_ids: frozenset[int]
    #: None if every block is dense.
    experts: Experts | None = None

    @property
    def sliding_window(self) -> int | None:
        """The furthest that any layer looks back; None if one sees everything."""
        reach = [window for window in self.windows if window is not None]
        return max(reach) if len(reach) == self.layers else None

    @property
    def query_width(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim
