"""What the operation of a gated delta net promises (Yang, Kautz and Hatamizadeh 2024)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from tokenpod.kernels.operations.batch import ForwardBatch


class DeltaShape(NamedTuple):
    """Of the heads of one layer; each key head serves value_heads // key_heads value heads."""

    key_heads: int
    value_heads: int
    #: Numbers of a query and of a key, and of a value.
    key_dim: int
    value_dim: int
    #: Inputs that each output of the convolution before it sees, its own included.
    width: int

    @property
    def channels(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class DeltaWeights(NamedTuple):
    """Of one layer."""

    #: [channels, width]: of each channel's own convolution, the last for the token itself.
    conv: torch.Tensor
    #: [H] float32: a token's decay is exp(-exp(log_rate) · softplus(a + shift)).
    log_rate: torch.Tensor
    shift: torch.Tensor


class DeltaStates(NamedTuple):
    """Of one layer, by row of the batch."""

    #: [rows, channels, width - 1]: inputs of the convolution before the next token.
    inputs: torch.Tensor
    #: [rows, H, key_dim, value_dim] float32
    memory: torch.Tensor


class GatedDelta(Protocol):
    """A convolution, then a memory that each token reads, decays and corrects."""

    def __call__(
        self,
        mixed: torch.Tensor,
        decay: torch.Tensor,
        write: torch.Tensor,
        weights: DeltaWeights,
        shape: DeltaShape,
        states: DeltaStates,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Mixed [T, channels], decay and write [T, H] -> [T, H, value_dim], in mixed's dtype.

        Rows b of the batch go on from the states of row `b_row[b]`, which are changed in place. Of
        silu(convolution) come queries, keys and values; queries and keys are divided by their
        lengths, queries by the root of theirs. S = S · decay; S += key ⊗ (value - key · S) ·
        sigmoid(write); the result is query · S. A row's results depend on no other row.
        """
        ...
