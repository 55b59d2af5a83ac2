"""Captured decode steps: from a step's integers to logits in one launch.

A graph replays the same kernels on the same memory, so there is one for each of a ladder of batch
sizes; a step takes the next larger one and pads. What changes from step to step (tokens, positions,
slots, contexts) the kernels read from the graph's own copy of the step's integers.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenpod.engine.integers import Counts, Integers, views

#: From a step's integers on the device to [n, vocab] float32 logits.
Forward = Callable[[Counts, Integers], torch.Tensor]


def ladder(most: int) -> list[int]:
    """Batch sizes to capture for steps of up to `most` rows: padding costs an eighth at most."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << size.bit_length() - 4)
    sizes.append(most)
    return sizes


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    #: What the graph reads.
    words: torch.Tensor
    integers: Integers
    #: [size, vocab] float32, overwritten by each replay.
    logits: torch.Tensor


class DecodeGraphs:
    """A captured step for each batch size in `sizes`.

    Args:
        forward: run and then captured for each size, the largest first: they share one memory.
        sizes: rising.
        padded: a step's integers, all padding, of so many rows: what captures run on.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: Sequence[int],
        padded: Callable[[int], torch.Tensor],
    ) -> None:
        self._sizes = list(sizes)
        self._captured: dict[int, _Captured] = {}
        memory = None
        for size in reversed(self._sizes):
            counts, words = Counts.decode(size), padded(size)
            integers = views(words, counts)
            forward(counts, integers)  # compiles and loads what capturing must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                logits = forward(counts, integers)
            memory = memory or graph.pool()
            self._captured[size] = _Captured(graph, words, integers, logits)

    def size_for(self, rows: int) -> int | None:
        """The smallest captured size for `rows`; None if there is none."""
        at = bisect.bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else None

    def replay(self, size: int, words: torch.Tensor) -> tuple[torch.Tensor, Integers]:
        """Run the step whose integers are in `words`.

        Returns [size, vocab] logits, and the integers on the device: both until the next replay.

        Args:
            size: a captured size.
            words: pinned, laid out for `Counts.decode(size)`.
        """
        captured = self._captured[size]
        captured.words.copy_(words, non_blocking=True)
        captured.graph.replay()
        return captured.logits, captured.integers
