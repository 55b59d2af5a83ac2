"""Which steps are captured: sizes and kinds of them, and the one that a plan fits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from tokenpod.core.plan import StepPlan
from tokenpod.engine.gpu.graphs import (
    Captured,
    Graphs,
    decode_counts,
    flat_counts,
    mixed_counts,
    mixed_rows,
    single_rows,
    text_counts,
    text_rows,
    with_columns,
)
from tokenpod.engine.steps.integers import Counts, Integers
from tokenpod.kernels.operations.batch import RaggedRows

#: Of the captured steps with drafts: as many tokens as drafts, and rows that have them.
_MOST_DRAFTED_TOKENS = 384
#: In those of fewer tokens each is a row of its own, whose context many programs share: a row of a
#: few tokens would walk along its context alone. More would read contexts too often.
_MOST_FLAT_TOKENS = 32


class CapturableSteps(Protocol):
    """What an executor has captured, and what it runs by itself where nothing is."""

    def computed(
        self, integers: Integers, rows: RaggedRows, *, decode: bool, follow: bool
    ) -> torch.Tensor:
        """[n, vocabulary] logits of a padded step, or [T, hidden] states where texts are read.

        Args:
            integers: of the step.
            rows: its rows, as far as they are the same in each of its size.
            decode: whether each row has one token, which is sampled.
            follow: whether a draft model follows the step here.
        """
        ...

    def follow(self, integers: Integers, rows: RaggedRows) -> object:
        """Let the draft model follow a step that has been computed without."""
        ...

    def draw_masked(self, counts: Counts, integers: Integers, logits: torch.Tensor) -> object:
        """Draw for all rows of a step, some of which wait for masks."""
        ...

    def first_layers(self) -> AbstractContextManager[None]:
        """In which `computed` launches all its kernels, but not for all layers."""
        ...

    def padding(self, counts: Counts) -> torch.Tensor:
        """The integers of a step that is nothing but padding."""
        ...


class _Kinds(NamedTuple):
    """Mixed steps or texts, those that decode alone, and those with drafts, few and many."""

    mixed: Graphs
    decode: Graphs | None
    few: Graphs | None
    many: Graphs | None


class CapturedSteps:
    """Captured steps of an executor: none before `capture`.

    Args:
        rows: sequences that can be live at once.
        max_tokens: most tokens of a step.
        captured: most tokens of a captured one.
        tiles: how many numbers describe the tiles of a step of so many tokens.
        drafts: most samples of a step besides each row's first; steps with any have graphs of
            their own, since others would make their logits too.
        adapted: whether steps in which rows have adapters are captured too.
        behind: whether a draft model follows steps with drafts in a graph of its own, behind which
            nobody waits.
        windowed: whether tokens may have window slots.
        flat: whether tokens of one row may be rows of their own, as few tokens with drafts are.
        texts: whether texts are read for their vectors, and nothing is sampled.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_tokens: int,
        captured: int,
        tiles: Callable[[int], int],
        drafts: int,
        adapted: bool,
        behind: bool,
        windowed: bool,
        flat: bool,
        texts: bool,
    ) -> None:
        self._windowed, self._texts = windowed, texts
        #: Tokens of the largest step in which each is a row of its own.
        self._most_flat = _MOST_FLAT_TOKENS if flat else 0
        self._rows, self._max_tokens, self._tiles = rows, max_tokens, tiles
        self._most = min(max_tokens, captured)
        self._drafts, self._adapted, self._behind = drafts, adapted, behind
        #: By whether some row has an adapter.
        self._kinds: dict[bool, _Kinds] = {}

    def __bool__(self) -> bool:
        """Whether anything is captured."""
        return bool(self._kinds)

    @property
    def words(self) -> int:
        """int64 words that hold the integers of any step, captured or not."""
        tiles = self._tiles(self._most)
        columns = {"adapters": True, "windows": self._windowed}
        most = Counts(self._max_tokens, self._rows, self._rows, tiles, self._drafts, **columns)
        flat = flat_counts(self._rows, self._most_flat, self._drafts) if self._drafts else {}
        return max(each.words for each in (most, *with_columns(flat, **columns).values()))

    def capture(
        self, steps: CapturableSteps, *, windows: bool = False, some: bool = False
    ) -> object:
        """Capture steps of the sizes that there are to be; returns the memory that graphs share.

        Args:
            steps: runs them.
            windows: whether tokens have window slots.
            some: capture a few sizes alone; the others with `capture_next`.
        """
        kept, most = self._drafts > 0, self._most
        memory = None
        # Steps in which no row has an adapter do without the launches for them.
        for adapted in (False, True)[: 1 + self._adapted]:
            columns = {"adapters": adapted, "windows": windows}
            if self._texts:
                texts = with_columns(text_counts(self._rows, most, self._tiles), **columns)
                with torch.inference_mode():
                    graphs = _graphs(steps, texts, memory, text_rows, kept=False, some=some)
                memory = graphs.memory
                self._kinds[adapted] = _Kinds(graphs, None, None, None)
                continue
            mixed = with_columns(mixed_counts(self._rows, most, self._tiles), **columns)
            decode = with_columns(decode_counts(self._rows), **columns)
            # Each draft is a token of the step.
            drafted = {
                size: replace(counts, drafts=min(self._drafts, size))
                for size, counts in mixed.items()
                if self._most_flat < size <= _MOST_DRAFTED_TOKENS
            }
            flat = flat_counts(self._rows, min(most, self._most_flat), self._drafts)
            flat = with_columns(flat, **columns)
            with torch.inference_mode():
                usual = partial(_graphs, steps, masked=True, kept=kept, some=some)
                first = usual(mixed, memory, mixed_rows)
                memory = first.memory
                second = usual(decode, memory, single_rows, decode=True)
                third = fourth = None
                if self._drafts:
                    third = _graphs(steps, flat, memory, single_rows, behind=self._behind)
                    fourth = _graphs(steps, drafted, memory, mixed_rows, behind=self._behind)
            self._kinds[adapted] = _Kinds(first, second, third, fourth)
        return memory

    def capture_next(self) -> bool:
        """Capture one size of steps that has not been captured; False: all have been."""
        kinds = [(kinds.decode, kinds.mixed) for kinds in self._kinds.values()]
        with torch.inference_mode():
            return any(graphs.capture_next() for graphs in chain(*kinds) if graphs)

    def fitting(self, plan: StepPlan) -> Captured | None:
        """The captured step that a plan fits; None: there is none."""
        kinds = self._kinds.get(len(plan.r_adapter) > 0)
        if kinds is None or len(plan.scored_token) or plan.embeds or len(plan.own_token):
            return None
        if len(plan.r_mutual):
            return None
        if kinds.decode and plan.rows == plan.tokens == plan.sampling:
            return kinds.decode.fitting(plan.rows)
        if not plan.drafts:
            return kinds.mixed.fitting(plan.tokens)
        captured = kinds.few.fitting(plan.tokens) if kinds.few else None
        return captured or (kinds.many.fitting(plan.tokens) if kinds.many else None)


def _graphs(
    steps: CapturableSteps,
    counts: dict[int, Counts],
    memory: object,
    rows_of: Callable[[Counts], RaggedRows],
    *,
    decode: bool = False,
    behind: bool = False,
    masked: bool = False,
    kept: bool = True,
    some: bool = False,
) -> Graphs:
    """Steps of one kind; see `Graphs`.

    `behind`: the draft model follows in graphs of its own; `masked`: rows may wait for masks.
    """

    def forward(counts: Counts, integers: Integers) -> torch.Tensor:
        return steps.computed(integers, rows_of(counts), decode=decode, follow=not behind)

    def follow(counts: Counts, integers: Integers) -> object:
        return steps.follow(integers, rows_of(counts))

    on = steps.draw_masked if masked else None
    after = follow if behind else None
    return Graphs(
        forward,
        counts,
        steps.padding,
        memory,
        after,
        on,
        kept=kept,
        some=some,
        powers=any(each.adapters for each in counts.values()),
        brief=steps.first_layers,
    )
