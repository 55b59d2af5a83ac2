"""What a scheduler has counted since it began."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tokenpod.core.outputs import Ended
from tokenpod.scheduler.sequence import EndState


@dataclass(slots=True)
class Counts:
    """Of requests and tokens; the prompt of several samples counts once."""

    prompt_tokens: int = 0
    #: Those that were found in the prefix tree.
    cached_tokens: int = 0
    #: Requests by how their last sample ended.
    ends: Counter[EndState] = field(default_factory=Counter)
    #: Drafted and accepted tokens, by how far behind the last known one they stood.
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def ended(self) -> Ended:
        """As clients get it."""
        return Ended(
            stopped=self.ends[EndState.STOPPED],
            length=self.ends[EndState.LENGTH],
            aborted=self.ends[EndState.ABORTED],
            ignored=self.ends[EndState.IGNORED],
        )

    def drafts(self, drafted: int, accepted: int) -> None:
        """A row had so many drafts, of which the first ones were accepted."""
        for counts, n in ((self.drafted, drafted), (self.accepted, accepted)):
            counts += [0] * (drafted - len(counts))
            for at in range(n):
                counts[at] += 1
