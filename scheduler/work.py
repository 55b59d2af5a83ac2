"""What the scheduler is given, and what it tells of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenpod.core.messages import Failure, FinishCode, Started


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


@dataclass(slots=True)
class Settled:
    """What a step brought, or what happened without one. The first three lists are parallel."""

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finishes: list[FinishCode] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    advanced: list[Advanced] = field(default_factory=list)
