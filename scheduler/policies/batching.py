"""What a step holds: the protocol that every batching policy implements, and the default."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tokenpod.scheduler.sequences.work import Limits


@dataclass(frozen=True, slots=True)
class Joining:
    """How many waiting requests of the batcher may be admitted at once."""

    #: If fewer fit than this, none is admitted.
    least: int = 1
    #: None: all that fit.
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Portion:
    """What the batcher adds to a step."""

    #: The next token of every decoding sequence.
    decode: bool
    #: Prompt tokens, at most.
    prompt_tokens: int


class Batching(Protocol):
    """Decides when waiting requests join, and what a step computes of those that have."""

    @property
    def quantum(self) -> int:
        """Prompt tokens that every step with prompts is sure to compute, at least 1."""

    def joining(self, running: int, waiting: Iterable[int]) -> Joining:
        """How many requests may be admitted before the next step.

        Args:
            running: the batcher's admitted sequences.
            waiting: tokens that each waiting request of the batcher needs computed, in the order
                of the queue.
        """

    def portion(self, *, prompts: bool, prompt_tokens: int) -> Portion:
        """What the next step may hold; called once per step that is planned.

        Args:
            prompts: whether there are prompt tokens to compute.
            prompt_tokens: what routers have left of the step's budget of prompt tokens.
        """

    def decoded(self) -> None:
        """Some of the batcher's sequences have their next tokens in the step that is planned."""


class Mixed:
    """`mixed`: one token of every decoding sequence, then pieces of prompts up to the budget.

    Args:
        limits: the engine's resources.
    """

    def __init__(self, limits: Limits) -> None:
        self.quantum = limits.least_prompt_tokens

    def joining(self, running: int, waiting: Iterable[int]) -> Joining:
        """At any time, as many as fit."""
        del running, waiting
        return Joining()

    def portion(self, *, prompts: bool, prompt_tokens: int) -> Portion:
        """All that decode, then prompts up to the budget: running streams never wait for them."""
        del prompts
        return Portion(decode=True, prompt_tokens=max(prompt_tokens, self.quantum))

    def decoded(self) -> None:
        """Steps are not counted."""
