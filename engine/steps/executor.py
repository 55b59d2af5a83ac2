"""What runs step plans: one rank's model, KV pool and sampler.

An executor owns tensors and decides nothing: plans say what runs. What a step needs of earlier ones
(the last sampled token of each row, penalties' token histories) stays with it, so that a step can
be launched before anybody has seen the tokens of the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.core.plan import StepPlan
from tokenpod.engine.sampling.prompt_scores import PromptScores
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.models.pooling.head import PoolingHead


class Model(Protocol):
    """What an executor asks of a model."""

    #: What makes vectors of its states; None: it generates.
    pooling: PoolingHead | None

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        ...

    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """[T, hidden]: hidden states after the last norm."""
        ...

    def logits(self, hidden: torch.Tensor, step: ForwardBatch) -> torch.Tensor:
        """[n, vocab] in the model's dtype, of hidden [T, hidden] at `step.logit_index`."""
        ...


class CapturableModel(Model, Protocol):
    """What more a model must know so that mixed steps can be captured."""

    #: Tokens of the largest that are; 0: none.
    captures: int

    def first_layers(self) -> AbstractContextManager[None]:
        """In which steps run as many of the first layers as launch all kernels."""
        ...

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps of up to so many rows describe rows with several tokens."""
        ...


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Vectors of texts that have been read, row after row."""

    #: Rows of the plan, rising, and how many vectors each has.
    rows: list[int]
    counts: list[int]
    #: [sum of counts, width] float32.
    numbers: torch.Tensor
    #: They are weights of tokens.
    weights: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, on the host: an entry for each sample of each row, row after row."""

    #: -1 where the logits held NaN or Inf; `plan.UNSAMPLED`.
    tokens: list[int]
    logprobs: list[float]
    #: (index into `tokens`, ids, logprobs) where top tokens were asked for.
    tops: list[tuple[int, list[int], list[float]]]
    #: By row of the plan: scores of the tokens that follow, on the host.
    scored: dict[int, PromptScores] = field(default_factory=dict)
    #: Vectors of texts, and vectors of tokens, on the host.
    pooled: list[PooledRows] = field(default_factory=list)
    #: From the begin to the logits; of that, what finding drafts took.
    forward_ns: int = 0
    drafting_ns: int = 0
    sample_ns: int = 0
    #: As many as tokens, from 1, 0 where nobody asked; or none.
    ranks: list[int] = field(default_factory=list)
    #: What the executor found where the plan left drafts open, row after row.
    drafts: list[int] = field(default_factory=list)
    #: The last step whose copies from the host's memory are there; None: all are.
    arrived: int | None = None


#: Tokens that may be drawn, 32 to a word: bit t % 32 of word t // 32 is token t's.
Words = npt.NDArray[np.int32]

#: By row of the plan: [masks, words], of its first samples; the others are not drawn.
Masks = Mapping[int, Words]


class Launched(Protocol):
    """A step under way."""

    def sample(self, masks: Masks) -> None:
        """Sample the rows that wait for masks; a row without one is not sampled in this step.

        Once, and before the next step is launched or this one waited for, which does it without
        masks otherwise. What is reported of such rows is of scores that the mask has changed.
        """
        ...

    def wait(self) -> StepResult:
        """The result, once the device has it."""
        ...


class CapturesLater(Protocol):
    """What can be captured after serving has begun."""

    def capture_next(self) -> bool:
        """Capture one more size of step, while none is under way; False: all are captured."""
        ...


class Launcher(Protocol):
    """Takes steps: one rank's executor, or a whole group by its leader."""

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; those launched before may still be under way."""
        ...


class Executor(Launcher, Protocol):
    """One rank's part of every step."""

    def release(self, rows: Sequence[int]) -> None:
        """Forget these rows, as a plan's `freed` does."""
        ...
