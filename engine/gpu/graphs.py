"""Captured steps: from a step's integers to logits in one launch.

A graph replays the same kernels on the same memory, so there is one for each of a ladder of sizes;
a step takes the next larger one and pads. What changes from step to step (tokens, positions, slots,
contexts, tiles) the kernels read from the graph's own copy of the step's integers. Where kernels
are interpreted there are no graphs: "replaying" runs the same padded step again.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from tokenpod.engine.steps.integers import Counts, Integers, views
from tokenpod.kernels.operations.batch import RaggedRows, Run

#: Smaller mixed steps are filled up to this.
LEAST_MIXED = 16

T = TypeVar("T")

#: From a step's integers on the device to [n, vocab] logits, or to [T, hidden] states of texts.
Forward = Callable[[Counts, Integers], torch.Tensor]


def ladder(most: int) -> list[int]:
    """Sizes to capture up to `most`: 1, 2, 4, 8 and so on; padding costs an eighth at most."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << size.bit_length() - 4)
    sizes.append(most)
    return sizes


@dataclass(frozen=True, slots=True)
class Captured:
    """One size of step."""

    counts: Counts
    #: What the graph reads, and its fields.
    words: torch.Tensor
    integers: Integers
    #: Runs it: [counts.samples, vocab] logits, or [counts.tokens, hidden] states of texts,
    #: overwritten by the next run.
    run: Callable[[], torch.Tensor]
    #: What is left to be run behind it, before any other step; None: nothing is.
    run_behind: Callable[[], object] | None = None
    #: What may be run on its logits, before any other step; None: nothing is there for it.
    run_on: Callable[[torch.Tensor], object] | None = None

    def replay(
        self, words: torch.Tensor, enter: Callable[[Integers], None] | None = None
    ) -> torch.Tensor:
        """Run the step whose integers are in `words`; what it makes, until the next replay.

        Args:
            words: pinned, laid out for `counts`.
            enter: changes the integers on the device before it runs.
        """
        self.words.copy_(words, non_blocking=True)
        if enter is not None:
            enter(self.integers)
        return self.run()


class Replay(Generic[T]):
    """A graph, and what it makes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, made: T) -> None:
        self._graph, self._made = graph, made

    def __call__(self) -> T:
        """Run it."""
        self._graph.replay()
        return self._made

    def let_go(self) -> None:
        """Let later graphs have the memory of what it makes: it is overwritten when they run."""
        self._made = tree_map_only(torch.Tensor, _unowned, self._made)


class _Bytes:
    """Device memory that nobody owns, for `torch.as_tensor`."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _unowned(made: torch.Tensor) -> Any:
    """The same numbers, whose memory is free to others once `made` is gone."""
    last = sum((n - 1) * step for n, step in zip(made.shape, made.stride(), strict=True))
    there = _Bytes(made.data_ptr(), (last + 1) * made.element_size())
    numbers = torch.as_tensor(there, device=made.device).view(made.dtype)
    return numbers.as_strided(made.shape, made.stride())


@functools.cache
def _capturing() -> torch.cuda.Stream:
    """The stream on which all graphs are captured: they share memory."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def record(step: Callable[[], T], memory: Any) -> tuple[Replay[T], Any]:
    """Capture what a step launches, which has run before, without running it.

    `memory`: of graphs captured before, to be shared, or None; returned for the next.
    """
    graph = torch.cuda.CUDAGraph()
    # Not `torch.cuda.graph`: it gives all memory back that torch keeps for steps, and waits for
    # what has been queued, which may be computed meanwhile.
    with torch.cuda.stream(_capturing()):
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            made = step()
        finally:
            graph.capture_end()
    return Replay(graph, made), memory or graph.pool()


#: Steps of up to so many tokens read the weights for as long as those of fewer do.
_FEW_TOKENS = 64


def _coarse(size: int, most: int) -> bool:
    """Whether a size is the largest, or a power of two or one and a half of it.

    Of few tokens only powers of four are.
    """
    top = 1 << size.bit_length() - 1
    if size <= _FEW_TOKENS:
        return size == most or (size == top and size.bit_length() % 2 == 1)
    return size == most or size in (top, top * 3 // 2)


class Graphs:
    """Captured steps of one kind, one for each of a ladder of sizes.

    Args:
        forward: run and then captured for each size, the largest first: they share one memory.
        counts: of each size, rising.
        padded: integers of a step that is nothing but padding: what captures run on.
        memory: of graphs captured before, to be shared; only one graph runs at a time.
        behind: captured apart, of the same integers: what nobody waits for.
        on: captured apart, of the logits too: what some steps need.
        kept: whether logits stay when another step has run; else all sizes have them in one place.
        some: capture a few sizes alone, larger ones stand in for the others; `capture_next`
            captures these.
        powers: all powers of two are among the few: kernels of adapters are compiled for each.
        brief: in which runs launch all kernels that `forward` has, and not each for all layers.
    """

    def __init__(
        self,
        forward: Forward,
        counts: dict[int, Counts],
        padded: Callable[[Counts], torch.Tensor],
        memory: Any = None,
        behind: Callable[[Counts, Integers], T] | None = None,
        on: Callable[[Counts, Integers, torch.Tensor], object] | None = None,
        *,
        kept: bool = True,
        some: bool = False,
        powers: bool = False,
        brief: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._brief = brief
        self._forward, self._behind, self._on = forward, behind, on
        self._counts, self._padded, self._kept = counts, padded, kept
        self._captured: dict[int, Captured] = {}
        self.memory = memory
        #: Rising: those that are captured, and the others.
        self._sizes: list[int] = []
        most = max(counts, default=0)
        few = {n for n in counts if _coarse(n, most) or (powers and n.bit_count() == 1)}
        self._later = sorted(counts.keys() - few) if some else []
        for size in sorted(counts.keys() - self._later, reverse=True):
            self._capture_size(size)

    def capture_next(self) -> bool:
        """Capture the largest size that is not captured yet; False: all are."""
        if not self._later:
            return False
        self._capture_size(self._later.pop())
        return True

    def _capture_size(self, size: int) -> None:
        counts = self._counts[size]
        words = self._padded(counts)
        integers = views(words, counts)
        given = counts, integers
        run = self._captured_of(functools.partial(self._forward, *given), words)
        after = self._behind and self._captured_of(functools.partial(self._behind, *given), words)
        made = self._on and self._on_logits(functools.partial(self._on, *given), run, words)
        if not self._kept and isinstance(run, Replay):
            run.let_go()
        self._captured[size] = Captured(counts, words, integers, run, after, made)
        bisect.insort(self._sizes, size)

    def _captured_of(self, step: Callable[[], T], words: torch.Tensor) -> Callable[[], T]:
        # What capturing must not compile or load. Interpreted, all sizes are one program: the
        # largest shows that padding can be run.
        if not self._captured:
            step()
        elif words.device.type != "cpu":
            with self._brief():
                step()
        if not words.is_cuda:
            return step
        replay, self.memory = record(step, self.memory)
        return replay

    def _on_logits(
        self,
        step: Callable[[torch.Tensor], object],
        forward: Callable[[], torch.Tensor],
        words: torch.Tensor,
    ) -> Callable[[torch.Tensor], object]:
        # In the same memory each time, where it is captured. A graph's first run sets it up, too.
        logits = forward()
        run = self._captured_of(functools.partial(step, logits), words)
        return (lambda logits: run()) if words.is_cuda else step

    def fitting(self, size: int) -> Captured | None:
        """The smallest captured step of at least `size`; None if there is none."""
        at = bisect.bisect_left(self._sizes, size)
        return self._captured[self._sizes[at]] if at < len(self._sizes) else None


def decode_counts(rows: int) -> dict[int, Counts]:
    """Steps in which up to `rows` rows decode."""
    return {size: Counts.decode(size) for size in ladder(rows)}


def flat_counts(rows: int, tokens: int, drafts: int) -> dict[int, Counts]:
    """Steps of up to `tokens` tokens of `rows` rows with drafts, in which each token is a row."""
    return {
        size: Counts(size, size, min(size, rows), drafts=min(drafts, size), flat=True)
        for size in ladder(tokens)
        if size > 1
    }


def mixed_counts(rows: int, tokens: int, numbers_of: Callable[[int], int]) -> dict[int, Counts]:
    """Steps of up to `tokens` tokens, some of them prompts'.

    Args:
        rows: sequences that can be live at once.
        tokens: most tokens.
        numbers_of: how many numbers describe the tiles of a step of so many tokens.
    """
    return {
        size: Counts(size, min(size, rows), min(size, rows), numbers_of(size))
        for size in ladder(tokens)
        if size >= min(LEAST_MIXED, tokens)
    }


def text_counts(rows: int, tokens: int, numbers_of: Callable[[int], int]) -> dict[int, Counts]:
    """Steps of up to `tokens` tokens of texts, of which nothing is sampled; see `mixed_counts`."""
    sizes = mixed_counts(rows, tokens, numbers_of)
    return {size: replace(counts, samples=0) for size, counts in sizes.items()}


def with_columns(ladder: dict[int, Counts], *, adapters: bool, windows: bool) -> dict[int, Counts]:
    """The same with these columns, or without."""
    columns = {"adapters": adapters, "windows": windows}
    return {size: replace(counts, **columns) for size, counts in ladder.items()}


def single_rows(counts: Counts) -> RaggedRows:
    """Rows of one token each; what else is known of rows a captured step reads on the device."""
    n = counts.rows
    return RaggedRows(list(range(n + 1)), *_unknown(n), n)


def mixed_rows(counts: Counts) -> RaggedRows:
    """Rows of one token each, and one of all other tokens."""
    n = counts.rows
    return RaggedRows([*range(n + 1), counts.tokens], *_unknown(n + 1), n)


def text_rows(counts: Counts) -> RaggedRows:
    """One row of all tokens: of which there are more, tiles say."""
    return RaggedRows([0, counts.tokens], *_unknown(1), 0)


def _unknown(rows: int) -> tuple[list[int], list[list[Run]], list[int]]:
    """Placeholders for contexts, runs and rows."""
    return [0] * rows, [[]] * rows, [0] * rows
