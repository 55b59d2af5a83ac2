"""The order in which a step's tokens are drawn.

A row with drafts is sampled at several positions, and what is drawn at one decides whether the
draft behind it was right. So tokens are drawn in rounds: each row's first, then the second of each
row that samples a second one, and so on. A round draws for a row at most once, so penalties see
the tokens of the rounds before, as they do when tokens are made one at a time.

Rows that are sampled under a mask have rounds of their own, after the others': their masks come
when the step has been launched already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.core.plan import UNSAMPLED, StepPlan
from tokenpod.engine.sampling.sampler import Samples
from tokenpod.engine.steps.executor import Masks, StepResult, Words
from tokenpod.engine.steps.open_drafts import Unknown

Ints = npt.NDArray[np.integer[Any]]
T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Round:
    """The samples number `place` of m rows."""

    place: int
    #: [m] rows of the plan, rising.
    rows: Ints
    #: [m] where they are among all samples of the step, round after round.
    at: Ints
    #: [m] where each row's sample before it is.
    before: Ints
    #: [m] behind which token of the step each is drawn: behind a draft that must equal that one.
    behind: Ints

    def of(self, wanted: npt.NDArray[np.bool_]) -> Round:
        """The round of those rows of the plan that are wanted."""
        which = wanted[self.rows]
        columns = (self.rows, self.at, self.before, self.behind)
        return Round(self.place, *(column[which] for column in columns))


def rounds(plan: StepPlan) -> Iterator[Round]:
    """The rounds of a step: none, mostly one."""
    most = int(plan.r_samples.max()) if plan.drafts else min(plan.sampling, 1)
    done, last = 0, np.full(plan.rows, -1) if most > 1 else _NOTHING
    firsts = plan.r_tokens.cumsum() - plan.r_samples
    for place in range(most):
        rows = np.flatnonzero(plan.r_samples > place)
        at = np.arange(done, done + len(rows))
        yield Round(place, rows, at, last[rows] if place else at, firsts[rows] + place)
        if most > 1:
            last[rows] = at
        done += len(rows)


def unmasked_rounds(plan: StepPlan) -> list[Round]:
    """Without rows that wait for masks; some rounds may be empty."""
    if not len(plan.r_masked):
        return list(rounds(plan))
    return [turn.of(plan.r_masked == 0) for turn in rounds(plan)]


def masked_rounds(plan: StepPlan) -> list[Round]:
    """Of the rows that wait for masks; some rounds may be empty."""
    return [turn.of(plan.r_masked != 0) for turn in rounds(plan)]


def allowed(masks: Masks, turn: Round, bits: Words) -> Words:
    """[m, words] the masks of a round's samples; where there is none, nothing is allowed.

    Args:
        masks: by row of the plan.
        turn: of m rows.
        bits: where they are written.
    """
    for i, row in enumerate(turn.rows.tolist()):
        some = masks.get(row, ())
        bits[i] = some[turn.place] if turn.place < len(some) else 0
    return bits


def masks_there(plan: StepPlan, masks: Masks | None) -> dict[int, int]:
    """How many masks came for each row that has too few; only the leader knows: it has them."""
    if masks is None:
        return {}
    there = {row: len(masks.get(row, ())) for row in np.flatnonzero(plan.r_masked).tolist()}
    return {row: n for row, n in there.items() if n < plan.r_samples[row]}


def row_after_row(
    plan: StepPlan, drawn: StepResult, there: Mapping[int, int] = MappingProxyType({})
) -> StepResult:
    """A result of samples round after round -> row after row, without those that don't count.

    Args:
        plan: the step's.
        drawn: as it was drawn.
        there: how many masks came, by rows of the plan that have too few.
    """
    if not there and not plan.drafts:
        return drawn
    order, counts = _counted(plan, drawn, there)
    place = {i: n for n, (i, kept) in enumerate(zip(order, counts, strict=True)) if kept}
    return replace(
        drawn,
        tokens=_kept(drawn.tokens, order, counts, UNSAMPLED),
        logprobs=_kept(drawn.logprobs, order, counts, 0.0),
        ranks=_kept(drawn.ranks, order, counts, 0) if drawn.ranks else [],
        tops=sorted((place[i], ids, values) for i, ids, values in drawn.tops if i in place),
    )


def _counted(
    plan: StepPlan, drawn: StepResult, there: Mapping[int, int]
) -> tuple[list[int], list[bool]]:
    """[n] each, row after row: where a sample is round after round, and whether it counts."""
    samples = plan.r_samples
    places = np.arange(int(samples.max()))
    has = places < samples[:, None]
    at = has.T.cumsum().reshape(has.T.shape).T - 1
    # [rows, places] whether there is a mask, and the sample before equals the draft.
    right = np.ones_like(has)
    for row, n in there.items():
        right[row, n:] = False
    if len(places) > 1:
        firsts = (plan.r_tokens.cumsum() - samples)[:, None]
        drafts = _tokens(plan, drawn.drafts)[np.where(has, firsts + places, 0)[:, 1:]]
        right[:, 1:] &= np.array(drawn.tokens)[at[:, :-1]] == drafts
    return at[has].tolist(), np.logical_and.accumulate(right, axis=1)[has].tolist()


def _tokens(plan: StepPlan, drafts: list[int]) -> Ints:
    """[T] a step's tokens, with the drafts that its plan left open."""
    unknown = Unknown.of(plan) if drafts else None
    if unknown is None:
        return plan.t_token
    tokens = plan.t_token.copy()
    tokens[unknown.tokens] = drafts
    return tokens


def _kept(values: list[T], order: list[int], counts: list[bool], none: T) -> list[T]:
    """The values in this order, where they count."""
    return [values[i] if kept else none for i, kept in zip(order, counts, strict=True)]


class Drawing(ABC):
    """The samples of a step, being drawn."""

    def __init__(self, plan: StepPlan, logits: torch.Tensor, drawn: Samples) -> None:
        self.plan = plan
        self.logits = logits
        #: All samples of the step, round after round; token -1 where nothing has been drawn.
        self.drawn = drawn

    @abstractmethod
    def draw(self, turns: Sequence[Round], masks: Masks | None = None) -> None:
        """Draw these rounds into `drawn`: nothing behind a wrong draft, or where `masks` forbid."""

    def draw_masked(self, masks: Masks) -> None:
        """Draw for the rows that wait for masks."""
        self.draw(masked_rounds(self.plan), masks)

    def _put(self, samples: Samples, at: torch.Tensor | slice) -> None:
        """Enter what was drawn as samples `at`, [m] int64 or a stretch of m."""
        tops = samples.top_ids.shape[1]
        self.drawn.tokens[at] = samples.tokens
        self.drawn.logprobs[at] = samples.logprobs
        if samples.ranks is not None and self.drawn.ranks is not None:
            self.drawn.ranks[at] = samples.ranks
        self.drawn.top_ids[at, :tops] = samples.top_ids
        self.drawn.top_logprobs[at, :tops] = samples.top_logprobs


def mask_words(vocab_size: int) -> int:
    """Words of one mask."""
    return -(-vocab_size // 32)


_NOTHING: Ints = np.empty(0, np.int64)
