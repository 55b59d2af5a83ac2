"""Letters between the front ends of a group's pods: a follower asks, the leader answers.

They go by way of the ranks, whose streams are there anyway, are mutually authenticated, and end
when the group does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from tokenpod.engine.types import Letter
from tokenpod.protos.tokenpod.shard.v1 import letter_pb2 as pb
from tokenpod.service.errors import Internal, ServiceError, Unavailable
from tokenpod.service.rank_line import RankLine

log = logging.getLogger("tokenpod")

Answering = Callable[[pb.Question], Awaitable[pb.Answer]]

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class Refused(ServiceError):
    """What the leader's front end answered with: a failure of its own call.

    `number` is the step that failed; 0: none did.
    """

    reason = "LEADER_REFUSED"

    def __init__(self, refusal: pb.Refusal) -> None:
        retry = refusal.retry_after if refusal.HasField("retry_after") else None
        super().__init__(refusal.message, retry_after=retry)
        self.code = _CODES.get(refusal.code, grpc.StatusCode.UNKNOWN)
        self.number = refusal.number


def refusal_of(error: ServiceError, number: int = 0) -> pb.Answer:
    """A failure as an answer."""
    refusal = pb.Refusal(code=error.code.value[0], message=error.message, number=number)
    if error.retry_after is not None:
        refusal.retry_after = error.retry_after
    return pb.Answer(refusal=refusal)


class Letters:
    """One life's letters, of either side. Make it before the ranks, and `open` it with the line.

    Args:
        leads: this pod answers; else it asks.
    """

    def __init__(self, *, leads: bool) -> None:
        #: What the leader does with a question, once it serves.
        self.answering: Answering = _not_yet
        self._leads = leads
        self._line: RankLine | None = None
        self._asked: dict[int, asyncio.Future[pb.Answer]] = {}
        self._next_id = 1
        self._answers: set[asyncio.Task[None]] = set()

    def open(self, line: RankLine | None) -> None:
        """Write by way of this rank."""
        self._line = line

    def close(self) -> None:
        """The ranks are gone: nothing will be answered any more."""
        self._line = None
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(Unavailable("the group is forming again", retry_after=1.0))
        for task in self._answers:
            task.cancel()

    async def ask(self, question: pb.Question) -> pb.Answer:
        """The leader's answer. Raises Refused, and Unavailable if the group ends before it."""
        if self._line is None:
            raise Unavailable("the group has not formed yet", retry_after=1.0)
        letter_id, self._next_id = self._next_id, self._next_id + 1
        asked: asyncio.Future[pb.Answer] = asyncio.get_running_loop().create_future()
        self._asked[letter_id] = asked
        try:
            self._line.send(Letter(0, letter_id, question.SerializeToString()))
            answer = await asked
        finally:
            del self._asked[letter_id]
        if answer.HasField("refusal"):
            raise Refused(answer.refusal)
        return answer

    def deliver(self, letter: Letter) -> None:
        """A letter has come."""
        if not self._leads:
            asked = self._asked.get(letter.id)
            if asked is not None and not asked.done():
                asked.set_result(pb.Answer.FromString(letter.body))
            return
        task = asyncio.create_task(self._answer(letter))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, letter: Letter) -> None:
        try:
            answer = await self.answering(pb.Question.FromString(letter.body))
        except ServiceError as error:
            answer = refusal_of(error)
        except Exception:
            internal = Internal()
            log.exception("a letter was not answered", extra={"error_id": internal.error_id})
            answer = refusal_of(internal)
        if self._line is not None:
            self._line.send(Letter(letter.rank, letter.id, answer.SerializeToString()))


async def _not_yet(question: pb.Question) -> pb.Answer:
    raise Unavailable("the leader does not serve yet", retry_after=1.0)
