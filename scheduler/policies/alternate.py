"""`alternate` batching: steps of whole prompts, and steps that decode, as TGI's router has them.

TGI's loop (router 3.3.7 without chunking), where `waiting` counts from 1 at each join:

    nothing runs:                    all that fit join, up to the budget of prompt tokens
    waiting >= max_waiting_tokens:   the same
    otherwise:                       the same, if they are floor(running * ratio) or more
    some joined:                     a step of their prompts, while the others pause; waiting = 1
    none joined:                     a step that decodes; waiting = waiting + 1

Whether requests fit into memory is the admission policy's to say; the first one that does not ends
the search, as does the first one that is beyond the budget of prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenpod.scheduler.policies.batching import Joining, Portion
from tokenpod.scheduler.sequences.work import Limits


class Alternate:
    """Decides in turns: prompts by themselves, or a token of every decoding sequence.

    Args:
        limits: the engine's resources.
        ratio: waiting requests interrupt running ones if they are at least so many times as many.
        max_waiting_tokens: decode steps, the joining one's count included, after which any number
            of requests may interrupt.
    """

    def __init__(self, limits: Limits, ratio: float, max_waiting_tokens: int) -> None:
        self._budget = limits.prefill_tokens
        self._most = limits.max_rows
        self._ratio = ratio
        self._max_waiting = max_waiting_tokens
        #: TGI's `waiting_tokens`.
        self._waiting = 1
        #: While routers have prompts too, each side has half of the step's budget.
        self.quantum = max(limits.prefill_tokens // 2, 1)

    def joining(self, running: int, waiting: Iterable[int]) -> Joining:
        """All that fit into the budget, once enough wait or have waited long enough."""
        patient = running and self._waiting < self._max_waiting
        least = int(running * self._ratio) if patient else 1
        most, left, room = 0, self._budget, self._most - running
        for tokens in waiting:
            # One that was preempted may have become longer than the budget: it joins alone.
            if most >= room or (tokens > left and most):
                break
            most += 1
            left -= tokens
        return Joining(max(least, 1), most if most >= least else 0)

    def portion(self, *, prompts: bool, prompt_tokens: int) -> Portion:
        """Prompts or decoding rows: running streams wait while prompts are computed."""
        if prompts:
            self._waiting = 1
            return Portion(decode=False, prompt_tokens=max(prompt_tokens, self.quantum))
        return Portion(decode=True, prompt_tokens=0)

    def decoded(self) -> None:
        """TGI counts steps that decode, not turns."""
        self._waiting += 1
