"""What becomes of a preempted sequence's keys and values: forgotten, or kept in the host's memory.

Who gives way is the admission policy's to say. Whatever does not fit into the host's memory is
forgotten, and computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tokenpod.scheduler.sequences.sequence import Sequence


class Preemption(Protocol):
    """Decides what is swapped to the host's memory, and when it comes back."""

    @property
    def swapped_first(self) -> bool:
        """Whether no waiting request joins while anything is swapped."""

    def swaps(self, sequence: Sequence) -> bool:
        """Whether a sequence that gives way is swapped, if there is room; else computed again.

        It has its slots yet.
        """


@dataclass(frozen=True, slots=True)
class Always:
    """`swap`, or `recompute`: whatever the sequence is."""

    swap: bool
    swapped_first: bool = False

    def swaps(self, sequence: Sequence) -> bool:
        """As `swap` says."""
        del sequence
        return self.swap


@dataclass(frozen=True, slots=True)
class ByLength:
    """`auto`: what would take longer to compute than to copy both ways.

    Args:
        least: tokens from which on that is so on this machine.
    """

    least: int
    swapped_first: bool = False

    def swaps(self, sequence: Sequence) -> bool:
        """Whether it is long enough."""
        return sequence.computed >= self.least


@dataclass(frozen=True, slots=True)
class Vllm:
    """`vllm`: the rule of vLLM 0.5, which swaps what several samples may still run of.

    While anything is swapped, no waiting request joins.
    """

    swapped_first: bool = True

    def swaps(self, sequence: Sequence) -> bool:
        """Whether other samples of its request still run."""
        return sequence.alive > 1


#: --preemption: by name, from the least length that is worth copying.
PREEMPTIONS: dict[str, Callable[[int], Preemption]] = {
    "auto": ByLength,
    "vllm": lambda least: Vllm(),
    "recompute": lambda least: Always(swap=False),
    "swap": lambda least: Always(swap=True),
}
