"""Both ends of an engine's link, in the test's process: the service's, and a quiet engine's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from tokenpod.core.images import ImagesEncoded
from tokenpod.core.messages import ToEngine
from tokenpod.core.outputs import FailureCode, FinishCode, StepOutputs
from tokenpod.core.requests import Request


class Client:
    """Requests, and what became of each of their sequences.

    What is in `inbox` is received next.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.inbox: list[ToEngine] = [*requests]
        #: Sequences that have not ended.
        self.left = {i for request in self.inbox for i in request.sequence_ids}
        # By sequence.
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.tops: dict[int, list[list[int]]] = defaultdict(list)
        self.scored: dict[int, list[float]] = defaultdict(list)
        self.cached: dict[int, int] = {}
        #: Tokens drafted for all, and those of them that were accepted.
        self.tried = self.accepted = 0
        self.finishes: dict[int, FinishCode] = {}
        self.failures: dict[int, str] = {}
        self.codes: dict[int, FailureCode] = {}
        #: [count, width] of each.
        self.vectors: dict[int, np.ndarray] = {}
        #: By op.
        self.encoded: dict[int, ImagesEncoded] = {}

    @property
    def finished(self) -> set[int]:
        """Sequences that have ended well."""
        return {*self.finishes}

    def receive(self, seconds: float | None) -> list[ToEngine]:
        """What the engine reads."""
        del seconds
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: object) -> None:
        """What the engine says."""
        if isinstance(message, ImagesEncoded):
            self.encoded[message.op] = message
            return
        assert isinstance(message, StepOutputs)
        for i, sequence in enumerate(message.sequence_ids):
            assert sequence not in self.finishes, "a token after the end"
            self.tokens[sequence].append(message.token_ids[i])
            if message.logprobs:
                self.logprobs[sequence].append(message.logprobs[i])
            if message.finishes[i]:
                self.finishes[sequence] = FinishCode(message.finishes[i])
        for top in message.tops:
            self.tops[message.sequence_ids[top.at]].append(top.token_ids)
        for found in message.vectors:
            numbers = np.frombuffer(found.numbers, "<f4")
            self.vectors[found.sequence_id] = numbers.reshape(found.count, found.width)
        for started in message.started:
            self.cached[started.sequence_id] = started.cached_tokens
            if started.prompt_logprobs:
                self.scored[started.sequence_id] = started.prompt_logprobs
        for draft in message.drafted:
            self.tried += draft.drafted
            self.accepted += draft.accepted
        for failure in message.failures:
            self.failures[failure.sequence_id] = failure.message
            self.codes[failure.sequence_id] = failure.code
        self.left -= self.finishes.keys() | self.failures.keys()


class QuietEngine:
    """Notes which sequences are to end; all its steps settle at once."""

    step_at = 1

    def __init__(self) -> None:
        self.aborted: list[int] = []

    def abort(self, sequence_ids: list[int], *, stopped: bool = False) -> None:
        self.aborted += sequence_ids

    def begun(self) -> None:
        """Nobody waits in a queue here."""

    def keeps(self, size: int) -> None:
        """Nobody counts memory here."""
