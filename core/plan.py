"""What the leader tells every executor about one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenpod.core.messages import SamplingParams

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that a sequence takes: what its sampler needs, and where its cached prefix lies."""

    row: int
    #: Slots of the prompt tokens found in the cache, by position.
    prefix_slots: Ints
    prompt: Sequence[int]
    sampling: SamplingParams
    #: Which of the seed's random streams.
    stream: int
    min_new_tokens: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    logprobs: bool
    top_n_tokens: int


@dataclass(frozen=True, slots=True)
class RowWork:
    """Tokens of one row in this step."""

    row: int
    #: Position of the first token.
    start: int
    #: [n] where their keys and values go.
    slots: Ints
    #: The n prompt tokens, or None: the one token that this row sampled last.
    tokens: Sequence[int] | None
    #: Sample a token after the last one; it is the row's output number `output_index`.
    samples: bool
    output_index: int
    #: Report the log probability of each following prompt token; these are known too.
    next_tokens: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Rows with a single token come first in `works`."""

    step: int
    freed: Sequence[int]
    fresh: Sequence[NewRow]
    works: Sequence[RowWork]
