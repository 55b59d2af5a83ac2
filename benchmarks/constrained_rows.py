"""What `gpu_constraints.py` puts around an engine: a library with slow masks, and a client."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tokenpod.core.constraints import Choice, Constraint
from tokenpod.core.outputs import Load, StepOutputs
from tokenpod.engine.constraints.guidance import Guidance, GuidanceMatcher

_SLOW_SECONDS = 0.05


class SlowMatcher(GuidanceMatcher):
    """Takes 50 ms for each mask."""

    def copy(self) -> SlowMatcher:
        return SlowMatcher(self._matcher.deep_copy(), self._vocab)

    def take(self, token: int) -> None:
        time.sleep(_SLOW_SECONDS)
        super().take(token)


class Library(Guidance):
    """Choices are slow."""

    def compile(self, constraint: Constraint, prepared: str = "") -> GuidanceMatcher:
        made = super().compile(constraint, prepared)
        if isinstance(constraint, Choice):
            return SlowMatcher(made._matcher, made._vocab)
        return made


@dataclass
class Client:
    """The other end of the engine's link: hands requests in, times what comes out."""

    inbox: list[Any] = field(default_factory=list)
    #: When each sequence's tokens came.
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    left: set[int] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    load: Load | None = None
    steps: int = 0

    def receive(self, seconds: float | None) -> list[Any]:
        if seconds and not self.inbox:
            time.sleep(min(seconds, 0.001))
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: object) -> None:
        assert isinstance(message, StepOutputs)
        now, self.load, self.steps = time.perf_counter(), message.load, message.step
        for sequence, finish in zip(message.sequence_ids, message.finishes, strict=True):
            self.times[sequence].append(now)
            if finish:
                self.left.discard(sequence)
        for failure in message.failures:
            self.refused.append(failure.message)
            self.left.discard(failure.sequence_id)
