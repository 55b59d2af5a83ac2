"""What a step is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenpod.core.messages import Failure, FinishCode, Started
from tokenpod.scheduler.radix import Slots
from tokenpod.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine has."""

    #: KV slots, without those that are kept for liveness probes.
    slots: int
    #: Sequences that can hold a row of the executor at once, without a probe's.
    max_rows: int
    #: Longest sequence, prompt and output.
    max_positions: int
    #: Prompt tokens that one step takes.
    prefill_tokens: int
    #: Keep keys and values of prompts for later ones that begin alike.
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Advanced:
    """A router's step is complete."""

    id: int
    #: Prompt tokens that its sequences have yet to be given, by sequence id.
    behind: dict[int, int]
    #: Sequences that were not given what was asked for: no row, or not enough of the budget.
    waiting: list[int]


class Work:
    """Tokens of one sequence in one step."""

    __slots__ = ("n_tokens", "needs_logits", "sequence", "slots", "start")

    def __init__(
        self, sequence: Sequence, start: int, n_tokens: int, slots: Slots, needs_logits: bool
    ) -> None:
        self.sequence = sequence
        #: Position of the first token.
        self.start = start
        self.n_tokens = n_tokens
        #: [n_tokens] where their keys and values go.
        self.slots = slots
        #: A token is sampled after the last one.
        self.needs_logits = needs_logits

    @property
    def decodes(self) -> bool:
        """Whether its token is one that was sampled."""
        return self.start >= len(self.sequence.prompt)


@dataclass(frozen=True, slots=True)
class Step:
    """One step."""

    #: Those with a single token first, the longest sequences' before others'.
    works: list[Work]
    #: Sequences that got a row since the last step, and rows that were given back.
    fresh: list[Sequence]
    freed: list[int]
    #: When, in nanoseconds.
    planned_at: int

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens in it."""
        return sum(work.n_tokens for work in self.works if not work.decodes)


@dataclass(slots=True)
class Settled:
    """What a step brought, or what happened without one. The first three lists are parallel."""

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finishes: list[FinishCode] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    advanced: list[Advanced] = field(default_factory=list)
