"""What plans the rows of steps: the batcher, the routers' steps, and probes.

queue --admitted--> RouterSteps (a router's), Batcher (callers')    Probes, which never wait
                          \\____________|_____________________________/
                                       step
"""

from __future__ import annotations

from typing import Protocol

from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.drafts.forced import Forced
from tokenpod.scheduler.policies.ledger import Ledger
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.sequences.table import Ints
from tokenpod.scheduler.steps.step import Step, StepBuilder


class StepPlanner(Protocol):
    """A `Planner` as the scheduler and the queue see it: it plans steps, and says what it needs."""

    def add_to(self, ledger: Ledger) -> None:
        """Add what its admitted sequences need."""

    def next_rows(self, step: StepBuilder, prompt_tokens: int, slots: int) -> None:
        """Add the next tokens and pieces of prompts of its sequences to a step.

        Args:
            step: may have rows of other planners already, and counts what a step has room for.
            prompt_tokens: that it may add.
            slots: that it may take.
        """

    def settle(self, step: Step | None) -> None:
        """A step's tokens have been taken, and what has ended is free; None: copies have come."""


def add_decoding(
    step: StepBuilder,
    sequences: list[Sequence],
    places: Ints,
    forced: Forced,
    drafting: Drafting | None,
) -> int:
    """Add the next tokens of one planner's sequences, and what may follow; the slots taken.

    Args:
        step: is added to.
        sequences: could decode.
        places: [n] int64, theirs.
        forced: which tokens are forced.
        drafting: decides who has drafts; None: nobody.
    """
    sequences, places, taken = forced.add_to(step, sequences, places)
    if drafting is not None:
        sequences, places, drafted = drafting.add_to(step, sequences, places)
        taken += drafted
    if sequences:
        step.decode(sequences, places)
    return taken + len(sequences)
