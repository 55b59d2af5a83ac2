"""What each operation on single tokens promises: embeddings, norms, activations."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

import torch


class Activation(Enum):
    """The non-linearity of a feed-forward block."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    #: relu(x)²
    RELU_SQUARED = "relu_squared"
    #: gate · sigmoid(1.702 · gate) · (up + 1), gate at most 7, up within ±7 (gpt-oss). Gated only.
    SWIGLU_CLAMPED = "swiglu_clamped"


class RowNorm(NamedTuple):
    """RMS norm of each token's hidden state."""

    #: [hidden]; float32 where it is more exact than the hidden state.
    weight: torch.Tensor
    epsilon: float


class HeadNorm(NamedTuple):
    """RMS norm over each head of queries and keys, before rotation, and perhaps of values."""

    #: [D]
    query_weight: torch.Tensor
    #: [D]
    key_weight: torch.Tensor
    epsilon: float
    #: Values are normed too, without a weight.
    values: bool = False


#: x [T, hidden], changed in place, and rows of a table, [T] int64; it may not have some of them.
AddToRows = Callable[[torch.Tensor, torch.Tensor], None]


class Embed(Protocol):
    """Rows of a table."""

    def __call__(
        self,
        table: torch.Tensor,
        t_token: torch.Tensor,
        add: AddToRows | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Table [V, hidden], t_token [T] int64 -> a new tensor [T, hidden] of `dtype`.

        None: of the table's, which another `dtype` holds without loss.
        To the rows `add` adds what it has; of ranks that divide a table, each to those of its own.
        """
        ...


class RmsNorm(Protocol):
    """Root mean square norm (Zhang and Sennrich 2019), the mean taken in float32."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """X [..., n], weight [n] -> x / sqrt(mean(x²) + epsilon) · weight, in x's dtype.

        Rounded to x's dtype before the weight is applied, unless the weight is float32.
        """
        ...


class AddLayerNorm(Protocol):
    """A sum and its layer norm in one pass over memory."""

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        epsilon: float,
    ) -> None:
        """Change x [T, n] to what `LayerNorm` makes of x + y, which is rounded before."""
        ...


class LayerNorm(Protocol):
    """Layer norm (Ba et al. 2016), its mean and variance taken in float32."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        epsilon: float,
    ) -> torch.Tensor:
        """X [T, n], weight and bias [n] or None -> (x - mean) / sqrt(var + epsilon), as large.

        Then times the weight, which may be float32, plus the bias.
        """
        ...


class Activate(Protocol):
    """A non-linearity by itself, for blocks without gates."""

    def __call__(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """X [T, n] -> activation(x), the same shape. May change `x`."""
        ...


class ActMul(Protocol):
    """The gated unit of the feed-forward block."""

    def __call__(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """gate_up [T, 2n], gates first -> activation(gate) · up [T, n]. May change `gate_up`."""
        ...
