"""What has happened to sequences since it was last told, and counts of it since the start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenpod.core.outputs import Drafted, Ended, Failure, FailureCode, FinishCode, Started
from tokenpod.scheduler.sequences.sequence import EndState, Sequence
from tokenpod.scheduler.sequences.work import Settled


class Events:
    """The next message's events.

    Whoever ends a sequence notes it here, once, before it is freed.
    """

    def __init__(self) -> None:
        #: Since the last `take`. Tokens are added to it as they come.
        self.settled = Settled()
        #: Since the start: prompt tokens (of several samples they count once), those of them that
        #: were found in the prefix tree, requests by how their last sample ended, and drafted and
        #: accepted tokens by how far behind the last known one they stood.
        self._prompt_tokens = self._cached_tokens = 0
        self._ended = dict.fromkeys(EndState, 0)
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def take(self) -> Settled:
        """All events since the last call."""
        taken, self.settled = self.settled, Settled()
        return taken

    @property
    def counts(self) -> dict[str, Any]:
        """The fields of `Load` that are counted here."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "ended": Ended(**{state.name.lower(): n for state, n in self._ended.items()}),
            "drafted_at": [*self._drafted],
            "accepted_at": [*self._accepted],
        }

    def started(self, sequence: Sequence) -> None:
        """The first token of a sequence has come."""
        # Virtual tokens are not the client's.
        cached = max(sequence.cached - sequence.request.virtual_tokens, 0)
        self.settled.started.append(Started(sequence.id, cached, sequence.began_at))
        if not sequence.stream:
            # Samples share their prompt: it counts once.
            self._prompt_tokens += len(sequence.request.prompt)
            self._cached_tokens += cached

    def drafted(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Of a row's drafts so many, from the first on, are outputs now."""
        for counts in (self._drafted, self._accepted):
            counts += [0] * (drafted - len(counts))
        for at in range(drafted):
            self._drafted[at] += 1
            self._accepted[at] += at < accepted
        self.settled.drafted.append(Drafted(sequence.id, drafted, accepted))

    def failed(self, sequence_ids: Iterable[int], code: FailureCode, problem: str) -> None:
        """These sequences fail."""
        self.settled.failures += [Failure(each, code, problem) for each in sequence_ids]

    def finished(self, sequence_ids: Iterable[int], code: FinishCode) -> None:
        """These sequences end without a token."""
        settled = self.settled
        for sequence_id in sequence_ids:
            # It may be told with a step's tokens, of which it is none.
            settled.logprobs[len(settled.sequence_ids)] = 0.0
            settled.sequence_ids.append(sequence_id)
            settled.token_ids.append(-1)
            settled.finishes.append(code)
            settled.samples.append(-1)

    def ended(self, state: EndState) -> None:
        """The last sample of a request has ended."""
        self._ended[state] += 1
