"""What a scheduler has counted since it began."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tokenpod.core.outputs import Ended
from tokenpod.scheduler.sequence import EndState


@dataclass(slots=True)
class Counts:
    """Of requests and tokens; the prompt of several samples counts once."""

    prompt_tokens: int = 0
    #: Those that were found in the prefix tree.
    cached_tokens: int = 0
    #: Requests by how their last sample ended, as clients get it.
    ended: Ended = field(default_factory=Ended)
    #: Drafted and accepted tokens, by how far behind the last known one they stood.
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def end(self, state: EndState) -> None:
        """A request has ended."""
        name = state.name.lower()
        self.ended = msgspec.structs.replace(self.ended, **{name: getattr(self.ended, name) + 1})

    def drafts(self, drafted: int, accepted: int) -> None:
        """A row had so many drafts, of which the first ones were accepted."""
        for counts in (self.drafted, self.accepted):
            counts += [0] * (drafted - len(counts))
        for at in range(drafted):
            self.drafted[at] += 1
            self.accepted[at] += at < accepted
