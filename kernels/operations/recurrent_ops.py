"""What the operations promise that mix tokens by a state instead of keys and values.

A row's states are inputs of a convolution, of which the last few are kept, and of some kinds a
memory of each head.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from tokenpod.kernels.operations.batch import ForwardBatch, MixerPlan
from tokenpod.kernels.operations.pointwise_ops import RowNorm


class RecurrentPlan(MixerPlan):
    """What `Operations.plan_recurrent` found out about a step's rows."""

    __slots__ = ()


class MemoryShape(NamedTuple):
    """Of the heads of one layer; each key head serves value_heads // key_heads value heads.

    Of a state space (Dao and Gu 2024) keys are B, queries are C, and key heads are its groups.
    """

    key_heads: int
    value_heads: int
    #: Numbers of a query and of a key, and of a value.
    key_dim: int
    value_dim: int
    #: Inputs that each output of the convolution before it sees, its own included.
    width: int

    @property
    def channels(self) -> int:
        """Numbers of a token's queries, keys and values, in this order."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of a token's values."""
        return self.value_heads * self.value_dim


class RecurrentStates(NamedTuple):
    """Of one layer, by row of the batch."""

    #: [rows, channels, ring]: the last inputs of the convolution, that of position p at p % ring,
    #: where ring is its width. Where drafts may be wrong it is as much longer as there may be of
    #: them, and behind the channels are as many numbers more as the memory needs of a token.
    inputs: torch.Tensor
    #: [rows, H, key_dim, value_dim] float32; of a convolution alone, no numbers.
    memory: torch.Tensor
    #: [rows, H] int32: how many positions the memory has been through.
    seen: torch.Tensor

    @property
    def ring(self) -> int:
        """Positions that there are inputs of."""
        return self.inputs.shape[2]

    def takes_back(self, width: int) -> bool:
        """Whether there may be drafts, where a convolution is of this width."""
        return self.ring > width

    def known(self, state: int, first: int, width: int) -> int:
        """Through how many positions a row's memory has been, of which the next step is at `first`.

        It is never further behind than a step with drafts has tokens; but trials of steps begin
        anywhere.
        """
        return max(int(self.seen[state, 0]), first - (self.ring - width + 1))


class PlanRecurrent(Protocol):
    """What all layers of a step share."""

    def __call__(self, batch: ForwardBatch) -> RecurrentPlan:
        """Of the step's rows."""
        ...


class DeltaInputs(NamedTuple):
    """What the layer's first products say of T tokens; numbers of one token lie together.

    Queries, keys and values before their convolution, the gate of what heads find, and of each head
    the logits of how much is written and of the decay.
    """

    #: [T, channels]
    mixed: torch.Tensor
    #: [T, H · value_dim]
    gate: torch.Tensor
    #: [T, H], a part of the tensor that `mixed` is a part of.
    write: torch.Tensor
    #: [T, H], or [T, H · key_dim] where each number of a key decays by itself.
    decay: torch.Tensor


class DeltaWeights(NamedTuple):
    """Of one layer."""

    #: [channels, width]: of each channel's own convolution, the last for the token itself.
    conv: torch.Tensor
    #: [H] float32: a token's decay is exp(-exp(log_rate) · softplus(a + shift)).
    log_rate: torch.Tensor
    #: As many as a token has decays, float32.
    shift: torch.Tensor
    #: Of what each head finds: weight [value_dim].
    norm: RowNorm
    #: Gates open by sigmoid(gate) instead of silu(gate).
    sigmoid_gate: bool = False

    @property
    def decays(self) -> int:
        """Of each head: one, or as many as a key has numbers."""
        return len(self.shift) // len(self.log_rate)


class GatedDelta(Protocol):
    """A convolution, a memory that each token reads, decays and corrects, and a gated norm."""

    def __call__(
        self,
        inputs: DeltaInputs,
        weights: DeltaWeights,
        shape: MemoryShape,
        states: RecurrentStates,
        plan: RecurrentPlan,
    ) -> torch.Tensor:
        """Inputs of T tokens -> [T, H · value_dim], in their dtype.

        Rows b of the batch go on from the states of row `b_row[b]`, which are changed in place. Of
        silu(convolution) come queries, keys and values; queries and keys are divided by their
        lengths, queries by the root of theirs. S = S · decay, of all a head's keys or of each of
        their numbers; S += key ⊗ (value - key · S) · sigmoid(write); a head finds query · S, which
        is normed as `RmsNorm` does, times silu(gate) or sigmoid(gate). A token at a position that
        its memory has been through finds the same again and changes nothing: a row's first may be
        one. A row's results depend on no other row. Yang, Kautz and Hatamizadeh 2024; with decays
        of a key's numbers: Kimi Team, "Kimi Linear", 2025.

        The memory of a row with drafts goes through none of the step's tokens: their inputs are
        kept, `write` and `decay` behind the convolution's. What a memory has not been through of
        the positions before a row's first token it goes through before anything else, by the
        inputs that are kept; those were right.
        """
        ...


class SpaceInputs(NamedTuple):
    """What the layer's first product says of T tokens; parts of one tensor, whose rows they share.

    Queries (C), keys (B) and values (x) before their convolution, the gate of what heads find, and
    of each head how long its step is, before softplus.
    """

    #: [T, channels]
    mixed: torch.Tensor
    #: [T, H · value_dim]
    gate: torch.Tensor
    #: [T, H]
    step: torch.Tensor


class SpaceWeights(NamedTuple):
    """Of one layer."""

    #: [channels, width]: of each channel's own convolution, the last for the token itself.
    conv: torch.Tensor
    #: [channels], added to what it says; None: nothing is.
    conv_bias: torch.Tensor | None
    #: [H] float32: a token's step is softplus(step + shift), its decay exp(-exp(log_rate) · step).
    log_rate: torch.Tensor
    shift: torch.Tensor
    #: [H] float32: how much of a value its head finds besides.
    skip: torch.Tensor
    #: [H · value_dim], of what is found and gated, over each of `norm_groups` equal parts; None:
    #: it is not normed.
    norm: RowNorm | None
    norm_groups: int = 1
    #: What is found is normed, then gated.
    norm_first: bool = False


class StateSpace(Protocol):
    """A convolution, a memory that decays and is written by each token, and a gated norm."""

    def __call__(
        self,
        inputs: SpaceInputs,
        weights: SpaceWeights,
        shape: MemoryShape,
        states: RecurrentStates,
        plan: RecurrentPlan,
    ) -> torch.Tensor:
        """Inputs of T tokens -> [T, H · value_dim], in their dtype.

        Rows b of the batch go on from the states of row `b_row[b]`, which are changed in place. Of
        silu(convolution + bias) come queries, keys and values. S = S · decay; S += key ⊗ value ·
        step; a head finds query · S + skip · value, which is rounded, multiplied by silu(gate) and
        normed. A token at a position that its memory has been through finds the same again and
        changes nothing: a row's first may be one. A row's results depend on no other row. Dao and
        Gu, "Transformers are SSMs", 2024.

        Of rows with drafts and of memories that are behind it promises what `GatedDelta` does;
        behind the convolution's inputs `step` is kept.
        """
        ...


class ShortConvolution(Protocol):
    """A convolution over a few tokens, between two gates (LFM2)."""

    def __call__(
        self,
        mixed: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: RecurrentStates,
        plan: RecurrentPlan,
    ) -> torch.Tensor:
        """Of T tokens [T, 3 · channels] -> [T, channels], in their dtype.

        A token says what it lets in, what it lets out, and its values, each [channels]. Values
        times what is let in are rounded and are the inputs of each channel's convolution, of
        weight [channels, width], the last for the token itself, and bias [channels]; what it says
        is rounded and multiplied by what is let out. Rows b of the batch go on from the inputs of
        row `b_row[b]`, which are changed in place. A position that is computed again says the same
        again. A row's results depend on no other row.
        """
        ...
