"""What one step holds at most: buffers are made by these numbers, and steps are held to them."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of one step.

        tokens    one for each row that decodes, prompts' tokens, and drafts
        samples   one for each row, and one behind each draft

    A token that its mask forces is a draft that is sure to be right: it takes a draft's place. Each
    sample has one mask at most.
    """

    #: Rows, with a liveness probe's.
    rows: int
    #: Tokens of prompts, with a liveness probe's.
    prompt: int
    #: Tokens of all rows behind their next ones.
    drafts: int

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows + self.prompt + self.drafts

    @property
    def samples(self) -> int:
        """Positions that are sampled."""
        return self.rows + self.drafts

    def check(self, plan: StepPlan) -> None:
        """Raise AssertionError, which names the limit, for a step that a buffer can't hold."""
        held = plan.rows, plan.tokens, plan.drafts
        most = self.rows, self.tokens, self.drafts
        if held[0] > most[0] or held[1] > most[1] or held[2] > most[2]:
            for number, name, room in zip(held, ("rows", "tokens", "drafts"), most, strict=True):
                if number > room:
                    raise AssertionError(
                        f"a step of {number} {name}; executors have room for {room}"
                    )
