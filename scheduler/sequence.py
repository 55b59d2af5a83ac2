"""One sample of a request: how far it has come."""

from __future__ import annotations

from enum import Enum, auto
from operator import attrgetter

import numpy as np

from tokenpod.core.messages import FinishCode, Request
from tokenpod.scheduler.radix import Node, Tokens
from tokenpod.scheduler.slots import Extent
from tokenpod.scheduler.table import Table


class Owner(Enum):
    """Who decides when a sequence is stepped."""

    #: The batcher: a token in every step.
    BATCHER = auto()
    #: A router, by `Advance`.
    ROUTER = auto()
    #: Nobody has to: a liveness probe runs at once, in a row that is kept for it.
    PROBE = auto()


class Counted:
    """A sequence's number in one of the table's columns."""

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self._column = attrgetter(name)

    def __get__(self, sequence: Sequence, owner: type) -> int:
        return int(self._column(sequence.table)[sequence.place])

    def __set__(self, sequence: Sequence, value: int) -> None:
        self._column(sequence.table)[sequence.place] = value


class Sequence:
    """One sample's tokens, and the keys and values it holds.

    Its positions are prompt, then outputs. `computed` of them have their keys and values written or
    under way; `launched` outputs have been sampled or are being sampled.

    Args:
        table: holds what is counted, at `place`, until `leave`.
    """

    __slots__ = (
        "arrival",
        "began_at",
        "cached",
        "dead",
        "extents",
        "finish",
        "id",
        "keep",
        "node",
        "outputs",
        "owner",
        "place",
        "prompt",
        "request",
        "stream",
        "table",
    )

    def __init__(
        self,
        request: Request,
        stream: int,
        prompt: Tokens,
        table: Table,
        owner: Owner = Owner.BATCHER,
    ) -> None:
        self.id = request.sequence_ids[stream]
        self.request = request
        self.owner = owner
        self.stream = stream
        self.prompt = prompt
        self.table = table
        self.place = table.take()
        table.prompt[self.place] = len(prompt)
        table.most[self.place] = request.stopping.max_new_tokens
        table.adapted += request.adapter > 0
        #: Its place in the queue within its priority.
        self.arrival = 0
        self.outputs: list[int] = []
        #: Prompt tokens that were found in the tree.
        self.cached = 0
        self.began_at = 0
        self.finish = FinishCode.RUNNING
        #: Ended, aborted or failed: nothing more is planned, and what comes back is dropped.
        self.dead = False
        #: Whether what it computed is fit for the tree.
        self.keep = True
        #: The locked tree node that ends its shared prefix, of `shared` tokens.
        self.node: Node | None = None
        #: Private slots, by position.
        self.extents: list[Extent] = []

    def leave(self) -> None:
        """Give the place in the table back: nobody has this sequence any more."""
        self.table.give_back(self.place)
        self.table.adapted -= self.request.adapter > 0
        self.place = 0

    row = Counted("The executor's row; -1: none.")
    computed = Counted("Positions whose keys and values are written, or under way.")
    shared = Counted("Of these, the first ones that are in the tree.")
    launched = Counted("Outputs that have been sampled or are being sampled.")
    in_flight = Counted("Steps launched and not settled.")

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def length(self) -> int:
        """Tokens known to exist: prompt and settled outputs."""
        return len(self.prompt) + len(self.outputs)

    @property
    def bound(self) -> int:
        """Slots that it may come to need: the last token's keys and values are never written."""
        return len(self.prompt) + self.request.stopping.max_new_tokens - 1

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt has yet to be launched."""
        return self.computed < len(self.prompt)

    @property
    def exhausted(self) -> bool:
        """Whether its last allowed token has been launched."""
        return self.launched >= self.request.stopping.max_new_tokens

    @property
    def held(self) -> int:
        """Private slots."""
        return self.computed - self.shared

    def all_tokens(self, n: int) -> Tokens:
        """The first `n` tokens of prompt and outputs."""
        outputs = np.asarray(self.outputs, dtype=np.int32)
        return np.concatenate((self.prompt, outputs))[:n]

    def append(self, token: int, now: int) -> FinishCode:
        """Note a sampled token; whether it ends the sequence, and why."""
        self.outputs.append(token)
        self.finish = self._finish(token, now)
        return self.finish

    def _finish(self, token: int, now: int) -> FinishCode:
        stopping = self.request.stopping
        count = len(self.outputs)
        last = count >= stopping.max_new_tokens
        if last and stopping.length_first:
            return FinishCode.LENGTH
        if count > stopping.min_new_tokens or last:
            if token in stopping.eos_token_ids:
                return FinishCode.EOS
            if token in stopping.stop_token_ids:
                return FinishCode.STOP_TOKEN
        if last:
            return FinishCode.LENGTH
        if stopping.time_limit_at is not None and now >= stopping.time_limit_at:
            return FinishCode.TIME_LIMIT
        return FinishCode.RUNNING
