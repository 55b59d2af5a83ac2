"""A router that calls every pod: all answer, each generation comes from the leader alone.

    router --Prefill--> pod 0: runs the step, answers with generations and batch
           --Prefill--> pod k: asks pod 0 what that step came to, answers with the batch

A step is known by the rpc, by the batch that its call names first, and by the leader's count: a
follower that has joined step n of a batch waits for a later one. Filtering a batch twice is
filtering it once, so followers just ask for it too.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tokenpod.protos.tokenpod.shard.v1 import letter_pb2 as pb
from tokenpod.service.batches import Batches
from tokenpod.service.calls import CachedBatch, PrefillCall, ShardStep, WarmupCall
from tokenpod.service.errors import FailedPrecondition, ServiceError
from tokenpod.service.letters import Letters, Refused, refusal_of
from tokenpod.service.shard import ShardService, agreed_limits
from tokenpod.service.validate import RequestLimits

_PREFILL, _DECODE = pb.STEP_KIND_PREFILL, pb.STEP_KIND_DECODE
#: Seconds that a follower's call waits for the leader's to begin.
_BEGIN_SECONDS = 10.0
#: Batches whose last step is remembered. A router has few at once.
_MOST_BATCHES = 1024


@dataclass(eq=False)
class _Step:
    """A step of the leader; `done` gets the answer for followers."""

    number: int
    kind: int
    done: asyncio.Future[pb.Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LeaderShard:
    """A shard whose steps followers can join.

    Args:
        shard: what runs them.
        make_way: returns once no request runs any more, so that a pod may stop.
    """

    def __init__(self, shard: ShardService, make_way: Callable[[], Awaitable[None]]) -> None:
        self._make_way = make_way
        self.urls = shard.urls
        self.batches = shard.batches
        self._shard = shard
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._count = 0
        self._begun = asyncio.Condition()

    async def prefill(self, call: PrefillCall) -> ShardStep:
        """See `ShardService.prefill`."""
        return await self._run(_PREFILL, call.batch.id, self._shard.prefill(call))

    async def decode(self, batch_ids: Sequence[int]) -> ShardStep:
        """See `ShardService.decode`."""
        step = self._shard.decode(batch_ids)
        return await (self._run(_DECODE, batch_ids[0], step) if batch_ids else step)

    async def filter(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """See `ShardService.filter`."""
        return await self._shard.filter(batch_id, request_ids)

    async def clear(self, batch_id: int | None) -> None:
        """See `ShardService.clear`."""
        await self._shard.clear(batch_id)

    def warmup(self, call: WarmupCall) -> tuple[int, int, int]:
        """See `ShardService.warmup`."""
        return self._shard.warmup(call)

    async def answer(self, question: pb.Question) -> pb.Answer:
        """The answer for a follower. Raises ServiceError."""
        match question.WhichOneof("question"):
            case "join_step":
                with self.batches.call():
                    return await self._join(question.join_step)
            case "filter_batch":
                asked = question.filter_batch
                batch = await self.filter(asked.batch_id, list(asked.request_ids))
                return pb.Answer(filtered_batch=_kept_batch(batch))
            case "leave":
                await self._make_way()
                return pb.Answer(may_leave=pb.MayLeave())
        raise FailedPrecondition("the leader does not know this question")

    async def _join(self, asked: pb.JoinStep) -> pb.Answer:
        """What a step came to. Raises FailedPrecondition if it does not begin."""
        try:
            async with asyncio.timeout(_BEGIN_SECONDS), self._begun:
                await self._begun.wait_for(lambda: self._found(asked) is not None)
        except TimeoutError:
            raise FailedPrecondition(
                f"the leader was not asked for a step of batch {asked.batch_id} within"
                f" {_BEGIN_SECONDS:g} s: a router must call every shard, or the leader alone"
            ) from None
        step = self._found(asked)
        assert step is not None
        return await asyncio.shield(step.done)

    def _found(self, asked: pb.JoinStep) -> _Step | None:
        step = self._steps.get(asked.batch_id)
        if step is None or step.number <= asked.after or step.kind != asked.kind:
            return None
        return step

    async def _run(self, kind: int, batch_id: int, running: Awaitable[ShardStep]) -> ShardStep:
        self._count += 1
        step = _Step(self._count, kind)
        self._steps[batch_id] = step
        self._steps.move_to_end(batch_id)
        if len(self._steps) > _MOST_BATCHES:
            self._steps.popitem(last=False)
        task = asyncio.ensure_future(running)
        task.add_done_callback(lambda ended: _tell(step, ended))
        async with self._begun:
            self._begun.notify_all()
        return await task


class FollowerShard:
    """The shard rpcs of a pod that follows.

    Args:
        letters: to the leader's front end.
        leader_address: where that is, for those who ask for every shard.
        limits: the same as the leader's.
    """

    def __init__(self, letters: Letters, leader_address: str, limits: RequestLimits) -> None:
        self.urls = [leader_address]
        #: Empty: what routers hold is the leader's.
        self.batches = Batches()
        self._letters = letters
        self._limits = limits
        #: The last step of each batch that was joined.
        self._joined: OrderedDict[int, int] = OrderedDict()

    async def prefill(self, call: PrefillCall) -> ShardStep:
        """The batch that the leader's Prefill came to, without generations."""
        return await self._join(_PREFILL, call.batch.id)

    async def decode(self, batch_ids: Sequence[int]) -> ShardStep:
        """The batch that the leader's Decode came to, without generations."""
        if not batch_ids:
            raise FailedPrecondition("batches is empty: there is no step to join")
        return await self._join(_DECODE, batch_ids[0])

    async def filter(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        """Keep only these requests of a batch, at the leader."""
        question = pb.FilterBatch(batch_id=batch_id, request_ids=request_ids)
        answer = await self._letters.ask(pb.Question(filter_batch=question))
        return _cached_batch(answer.filtered_batch)

    async def clear(self, batch_id: int | None) -> None:
        """Nothing is kept here; the leader is told by the router."""

    def warmup(self, call: WarmupCall) -> tuple[int, int, int]:
        """See `ShardService.warmup`."""
        return agreed_limits(call, self._limits)

    async def _join(self, kind: pb.StepKind.ValueType, batch_id: int) -> ShardStep:
        asked = pb.JoinStep(kind=kind, batch_id=batch_id, after=self._joined.get(batch_id, 0))
        try:
            answer = await self._letters.ask(pb.Question(join_step=asked))
        except Refused as refused:
            self._note(batch_id, refused.number)
            raise
        step = answer.joined_step
        self._note(batch_id, step.number)
        return ShardStep(
            generations=(),
            batch=_cached_batch(step.batch) if step.HasField("batch") else None,
            forward_ns=step.forward_ns,
            decode_ns=step.decode_ns,
            total_ns=step.total_ns,
            concat_ns=step.concat_ns if step.HasField("concat_ns") else None,
        )

    def _note(self, batch_id: int, number: int) -> None:
        if number:
            self._joined[batch_id] = number
            self._joined.move_to_end(batch_id)
        if len(self._joined) > _MOST_BATCHES:
            self._joined.popitem(last=False)


def _kept_batch(batch: CachedBatch) -> pb.KeptBatch:
    """A batch as the leader tells it."""
    return pb.KeptBatch(
        id=batch.id,
        request_ids=batch.request_ids,
        max_tokens=batch.max_tokens,
        current_tokens=batch.current_tokens,
    )


def _cached_batch(batch: pb.KeptBatch) -> CachedBatch:
    return CachedBatch(batch.id, list(batch.request_ids), batch.max_tokens, batch.current_tokens)


def _tell(step: _Step, ended: asyncio.Future[ShardStep]) -> None:
    """The followers' answer, whether or not any has asked."""
    error = None if ended.cancelled() else ended.exception()
    if isinstance(error, ServiceError):
        step.done.set_result(refusal_of(error, step.number))
    elif ended.cancelled() or error is not None:
        failure = FailedPrecondition("the leader's step was given up")
        step.done.set_result(refusal_of(failure, step.number))
    else:
        result = ended.result()
        joined = pb.JoinedStep(
            number=step.number,
            batch=None if result.batch is None else _kept_batch(result.batch),
            forward_ns=result.forward_ns,
            decode_ns=result.decode_ns,
            total_ns=result.total_ns,
            concat_ns=result.concat_ns,
        )
        step.done.set_result(pb.Answer(joined_step=joined))
