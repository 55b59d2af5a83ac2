"""What a mixture of experts is, and what its operation promises (Shazeer et al. 2017)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

import torch

from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.operations.weight import StackedWeight


class Shared(NamedTuple):
    """What a block that works for every token made of the same input: it ends in the same sum."""

    #: [T, hidden], rows contiguous.
    result: torch.Tensor
    #: [T, 1]: the sigmoid of it multiplies the result; None: nothing does.
    gate: torch.Tensor | None = None

    def gated(self) -> torch.Tensor:
        """[T, hidden] float32, or float64 where the result is."""
        wide = self.result.to(torch.promote_types(self.result.dtype, torch.float32))
        return wide if self.gate is None else wide * self.gate.to(wide.dtype).sigmoid()


class AddExperts(Protocol):
    """A sparse feed-forward block: reads the residual stream, norms it, adds its result."""

    def __call__(
        self,
        residual: torch.Tensor,
        into: torch.Tensor | None = None,
        shared: Shared | None = None,
        inputs: torch.Tensor | None = None,
    ) -> None:
        """Residual [T, hidden]; the result is added in place to it, or to `into` instead.

        A block that was made without a norm reads what is normed already. What is `shared` is
        added to the result first: all is rounded together, once. Where experts are of another
        width than the stream, the router alone reads that: they read `inputs` [T, in], and their
        result is `into`'s, as wide.
        """
        ...


class Score(Enum):
    """What an expert's logit becomes before experts are chosen and weighed."""

    #: Over all experts. With `Routing.normalised` it is the softmax of the chosen logits alone.
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    #: Two experts, each by the softmax of those that come near it (Liu et al. 2024; PhiMoE).
    SPARSEMIXER = "sparsemixer"


class Routing(NamedTuple):
    """How a token chooses experts and weighs them, by scores that follow from a router's logits.

    Logits and what follows from them are float32 whatever the weights are, so that rounding does
    not choose.
    """

    #: Those of the highest scores; at most all.
    per_token: int
    #: Their weights are divided by their sum.
    normalised: bool
    score: Score = Score.SOFTMAX
    #: Experts form so many groups of equal size, in order ...
    groups: int = 1
    #: ... of which a token looks at so many, those of the highest ...
    chosen_groups: int = 1
    #: ... sum of so many best scores: 1 or 2.
    group_best: int = 1
    #: Multiplies all weights.
    scale: float = 1.0
    #: What the weights are divided by is at least this.
    least_sum: float = 0.0
    #: Of `Score.SPARSEMIXER`: experts further from the best, relative to its logit, have no share.
    tolerance: float = 0.02


#: All experts' weights [E, out, in]: numbers as they are, or in a format of fewer bits.
Stack = torch.Tensor | StackedWeight


class ExpertWeights(NamedTuple):
    """A mixture of E experts, each a feed-forward block of n features."""

    #: [E, hidden]
    router: torch.Tensor
    #: [E, 2n, in], each expert's gates first; [E, n, in] without gates. `in` is mostly hidden.
    gate_up: Stack
    #: [E, in, n]
    down: Stack
    #: [E] float32, added to logits.
    router_bias: torch.Tensor | None = None
    #: [E] float32, added to scores when experts are chosen, not when they are weighed.
    correction: torch.Tensor | None = None
    #: Of as many rows as each expert's weight has.
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def gated(self) -> bool:
        """Whether experts have gates."""
        return self.gate_up.shape[1] == 2 * self.down.shape[2]


class PrepareExperts(Protocol):
    """Choose, once, how a sparse feed-forward block is computed (Shazeer et al. 2017)."""

    def __call__(
        self,
        weights: ExpertWeights,
        norm: RowNorm | None,
        activation: Activation,
        routing: Routing,
    ) -> AddExperts:
        """A function computing residual += Σ p_e · down_e · (activation(gate_e · x) · (up_e · x)).

        Or down_e · activation(up_e · x) without gates, plus the biases that there are. x is
        norm(residual), the sum is over the experts that a token chose, p are their weights. A
        token's result depends on no other token, and a token that holds NaN gets NaN. A format that
        rounds inputs rounds x, and what goes through down.
        """
        ...
