"""How clients hear of the end of a sequence."""

from __future__ import annotations

from tokenpod.core.outputs import Failure, FailureCode, FinishCode
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.work import Settled


def reported(sequence: Sequence) -> list[int]:
    """The ids by which clients hear of a sequence."""
    return [sequence.id] if sequence.group is None else sequence.request.reported


def failures(sequence: Sequence, code: FailureCode, problem: str) -> list[Failure]:
    """A failure for each of these ids."""
    return [Failure(each, code, problem) for each in reported(sequence)]


def finish(events: Settled, sequence_id: int, code: FinishCode) -> None:
    """Note an end without a token."""
    # It may be told with a step's tokens: see `Settled.samples`.
    events.samples.append(-1)
    events.logprobs[len(events.sequence_ids)] = 0.0
    events.sequence_ids.append(sequence_id)
    events.token_ids.append(-1)
    events.finishes.append(code)
