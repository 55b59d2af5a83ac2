"""What the operation of a gated delta net promises (Yang, Kautz and Hatamizadeh 2024)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.pointwise_ops import RowNorm

#: What `PlanDelta` makes; each implementation has its own.
DeltaPlan = Any


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

    @property
    def beside(self) -> int:
        """Numbers of a token's `write` and `decay`."""
        return 2 * self.value_heads


class DeltaInputs(NamedTuple):
    """What the layer's first product says of T tokens; parts of one tensor, whose rows they share.

    Queries, keys and values before their convolution, the gate of what heads find, and of each head
    the logits of how much is written and of the decay.
    """

    #: [T, channels]
    mixed: torch.Tensor
    #: [T, H · value_dim]
    gate: torch.Tensor
    #: [T, H] each
    write: torch.Tensor
    decay: torch.Tensor


class DeltaWeights(NamedTuple):
    """Of one layer."""

    #: [channels, width]: of each channel's own convolution, the last for the token itself.
    conv: torch.Tensor
    #: [H] float32: a token's decay is exp(-exp(log_rate) · softplus(a + shift)).
    log_rate: torch.Tensor
    shift: torch.Tensor
    #: Of what each head finds: weight [value_dim].
    norm: RowNorm


class DeltaStates(NamedTuple):
    """Of one layer, by row of the batch."""

    #: [rows, channels, ring]: the last inputs of the convolution, that of position p at p % ring,
    #: where ring is its width. Where drafts may be wrong it is as much longer as there may be of
    #: them, and behind the channels are `write` and `decay`, of each head: [rows, channels + 2 · H,
    #: width + drafts].
    inputs: torch.Tensor
    #: [rows, H, key_dim, value_dim] float32
    memory: torch.Tensor
    #: [rows, H] int32: how many positions the memory has been through.
    seen: torch.Tensor

    @property
    def ring(self) -> int:
        """Positions that there are inputs of."""
        return self.inputs.shape[2]

    def takes_back(self, shape: DeltaShape) -> bool:
        """Whether there may be drafts."""
        return self.ring > shape.width

    def known(self, state: int, first: int, shape: DeltaShape) -> int:
        """Through how many positions a row's memory has been, of which the next step is at `first`.

        It is never further behind than a step with drafts has tokens; but trials of steps begin
        anywhere.
        """
        return max(int(self.seen[state, 0]), first - (self.ring - shape.width + 1))


class PlanDelta(Protocol):
    """What all layers of a step share."""

    def __call__(self, batch: ForwardBatch) -> DeltaPlan:
        """Of the step's rows."""
        ...


class GatedDelta(Protocol):
    """A convolution, a memory that each token reads, decays and corrects, and a gated norm."""

    def __call__(
        self,
        inputs: DeltaInputs,
        weights: DeltaWeights,
        shape: DeltaShape,
        states: DeltaStates,
        plan: DeltaPlan,
    ) -> torch.Tensor:
        """Inputs of T tokens -> [T, H · value_dim], in their dtype.

        Rows b of the batch go on from the states of row `b_row[b]`, which are changed in place. Of
        silu(convolution) come queries, keys and values; queries and keys are divided by their
        lengths, queries by the root of theirs. S = S · decay; S += key ⊗ (value - key · S) ·
        sigmoid(write); a head finds query · S, which is normed as `RmsNorm` does, times silu(gate).
        A token at a position that its memory has been through finds the same again and changes
        nothing: a row's first may be one. A row's results depend on no other row.

        The memory of a row with drafts goes through none of the step's tokens: their inputs are
        kept. What a memory has not been through of the positions before a row's first token it goes
        through before anything else, by the inputs that are kept; those were right.
        """
        ...
