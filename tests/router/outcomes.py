"""What became of the requests of a story, and whether it may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from router.records import FinishReason
from router.streams import Prompt, Result

#: A prompt's text, were it alone with the shard; None where nobody knows.
Reference = Callable[[Prompt], str | None]


class Ending(Enum):
    FINISHED = "finished"
    #: The shard can't do what the request asks for, and said so to its client only.
    ENDED_ALONE = "ended alone"
    FAILED = "failed"
    HUNG_UP = "hung up"
    #: By the router itself, before any shard heard of it.
    REFUSED = "refused"
    #: The router does not know of it any more, or never answers.
    LOST = "LOST"


class Event(Enum):
    """What befalls a pod or its router while requests are open."""

    #: The router is killed and another one starts.
    RESTART = "router restart"
    DRAIN = "drain"
    KILL = "kill"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One request's end."""

    prompt: Prompt
    ending: Ending
    text: str = ""
    reason: FinishReason | None = None
    error: str = ""
    #: Tokens that its client has read.
    tokens: int = 0
    #: What happened while it was open.
    befell: frozenset[Event] = frozenset()

    def fault(self, expected: str | None) -> str | None:
        """Why this must not be, or None. `expected` is the text that it has alone."""
        asked, befell = self.prompt, self.befell
        said = f"{asked.text[:20]!r} ({self.tokens} tokens read) {self.ending.value}"
        if self.ending is Ending.LOST and Event.KILL not in befell:
            return f"{said}: {self.error}"
        if self.ending is Ending.FAILED:
            waited = Event.DRAIN in befell and self.tokens == 0
            if not waited and not befell & {Event.RESTART, Event.KILL}:
                return f"{said}: {self.error}"
        if self.ending is Ending.ENDED_ALONE and not asked.grammar:
            return f"{said}, though it asks for nothing special"
        if self.ending is Ending.FINISHED:
            if asked.grammar:
                return f"{said}, though its grammar can not be served"
            if expected is not None and self.text != expected:
                return f"{said} with {self.text!r}; alone it has {expected!r}"
        return None


def ended_alone(result: Result) -> bool:
    """Whether a result has the form that only requests have which a shard can't serve."""
    first = result.tokens[0]
    return (
        len(result.tokens) == result.generated_tokens == 1
        and (first.text, first.logprob, first.is_special) == ("", 0.0, True)
        and (result.text, result.finish_reason) == ("", FinishReason.EOS_TOKEN)
    )


@dataclass
class Report:
    """A story's ledger."""

    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    #: What killed routers, less what a kill of the pod explains.
    panics: list[str] = field(default_factory=list)
    #: Panics of routers whose pod was killed under a FilterBatch or ClearCache: no pod can help.
    excused_panics: list[str] = field(default_factory=list)
    #: Whatever else must not be: failed probes, blocks that no request gave back.
    complaints: list[str] = field(default_factory=list)

    def faults(self, reference: Reference) -> list[str]:
        """Everything that breaks the property: no request lost, no panic, each text as alone."""
        requests = (each.fault(reference(each.prompt)) for each in self.outcomes)
        return [
            *(f"the router died: {each}" for each in self.panics),
            *self.complaints,
            *(fault for fault in requests if fault is not None),
        ]

    def counts(self) -> Counter[str]:
        """How many requests ended in which way."""
        return Counter(each.ending.value for each in self.outcomes)

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {name}" for name, count in sorted(self.counts().items()))
        return f"story {self.seed}: {counted}; {len(self.panics)} panics"
