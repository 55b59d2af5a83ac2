"""TGI's shard protocol: what a router asks, answered by the engine's `Advance` and `Abort`.

A router numbers batches; the engine knows sequences only. The batches live here: which sequences a
batch holds, what text each has so far, which have stopped. A batch that an rpc is working on is out
of the table (batches.py), so a second rpc with its id does not find it, as in TGI's own shards.

    Prefill   new sequences (+ one step of a cached batch) -> batch in the table, unless all stopped
    Decode    batches out of the table -> one step -> one batch, under the first one's id
    Filter    drops sequences from a batch; ClearCache drops batches

An error of Prefill or Decode fails every request that the router has under way, and one of
FilterBatch or ClearCache stops it for ever. So what one request asks for never becomes an error of
an rpc: such a request ends alone. And what does not fit now waits, named in its batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence, Set
from typing import Any

from tokenpod.service.admission.admission import DRAINING, Admission
from tokenpod.service.calls.call import (
    CachedBatch,
    ShardBatch,
    ShardGeneration,
    ShardRequest,
    ShardStep,
)
from tokenpod.service.calls.errors import (
    RETRY_SECONDS,
    InvalidArgument,
    NotFound,
    ServiceError,
    Unavailable,
    engine_failure,
)
from tokenpod.service.serving.batches import Batches
from tokenpod.service.serving.routed import RoutedSequence, StepSink
from tokenpod.service.serving.serving import Serving
from tokenpod.service.serving.shard_checks import check_warmup
from tokenpod.service.serving.shard_requests import Opened, ShardRequests, is_probe

log = logging.getLogger("tokenpod.shard")

#: `current_tokens` of a batch that nothing may join: above every prefill budget.
_NO_ROOM = 2**32 - 1
#: A step that begins nothing new.
_NOTHING = Opened()
#: Seconds for which a router that has a batch is expected to call once more at the very end.
_LAST_CALL_SECONDS = 1.0
#: Seconds for which a router that was refused is answered still: it clears what it had at once.
_CLEARING_SECONDS = 0.25


class ShardService:
    """The batches that routers own, for any protocol that has them; made when the model is ready.

    Args:
        serving: engine, tokenizer and limits.
        admission: refuses new batches while the pod drains.
        lease: seconds after which a batch that no call names is released.
    """

    def __init__(
        self,
        serving: Serving,
        admission: Admission,
        *,
        lease: float,
    ) -> None:
        self.batches = Batches(lease, self._release)
        self._serving = serving
        self._admission = admission
        self._requests = ShardRequests(serving)
        self._working: set[asyncio.Task[ShardStep]] = set()
        self._probing = asyncio.Lock()
        #: Done once nothing is stepped any more.
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- rpcs ----------------------------------------------------------------------------------

    async def prefill(self, new: ShardBatch, cached: int | None = None) -> ShardStep:
        """Process new prompts, and one step of the batch `cached` that they join.

        If it fails, its batches are gone: routers give up all of their requests and never name them
        again. So while the pod drains, Unavailable is for those that join no batch.
        """
        if is_probe(new):
            return await self._probe(new.requests[0])
        named = [new.id] if cached is None else [cached, new.id]
        with self._released_on_failure(named):
            if cached is None or cached not in self.batches:
                self._admission.check_open()
            return await self._run(self._prefill(new, cached), prefill=True)

    async def decode(self, batch_ids: Sequence[int]) -> ShardStep:
        """One step for one or several batches, which become one.

        It waits until one of their sequences can be stepped. If it fails, the batches are gone.
        """
        with self._released_on_failure(batch_ids):
            if not batch_ids:
                raise InvalidArgument("batches", "is empty: Must provide at least one batch")
            if len(set(batch_ids)) < len(batch_ids):
                raise InvalidArgument("batches", "names the same batch twice")
            return await self._run(self._decode(batch_ids))

    async def filter(self, batch_id: int, keep: Set[int]) -> CachedBatch | None:
        """Keep only these requests of a batch; None: there are none of them, or no such batch."""
        with self.batches.call():
            batch = self.batches.discard(batch_id)
            self._drop(sequence for sequence in batch if sequence.request_id not in keep)
            kept = [sequence for sequence in batch if sequence.request_id in keep]
            return self._put(batch_id, kept, stopped_too=True)

    async def clear(self, batch_id: int | None) -> None:
        """Forget a batch, or all of them, those that an rpc is working on included."""
        if batch_id is not None:
            self._drop(self.batches.discard(batch_id))
            return
        self._drop(self.batches.discard_all())
        for task in self._working:
            task.cancel()

    def warmup(
        self, max_input_tokens: int | None, max_total_tokens: int | None
    ) -> tuple[int, int, int]:
        """(tokens that fit in all, max_input_tokens, max_total_tokens): what both sides keep to.

        The model is warm already. A router with limits of its own insists on hearing them again.
        """
        limits = self._serving.limits
        return limits.slots, *check_warmup(max_input_tokens, max_total_tokens, limits)

    # -- the end -------------------------------------------------------------------------------

    def awaited(self, since: float) -> bool:
        """Whether a router's call runs, or is to be expected by a pod that waits since then."""
        return self.batches.awaited(since)

    async def end(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> int:
        """Refuse Prefill and Decode from now on, the open ones too; how many batches were cut.

        Between the answer to a Prefill or Decode and the next one a router may call FilterBatch,
        which must not fail. So it is left a moment to come back with its next step, and is refused
        that.

        Args:
            sleep: may return early, if it has become urgent.
        """
        if not self._over.done():
            self._over.set_result(None)
        # A step that is done has put its batch back.
        cut = len(self.batches) + sum(not task.done() for task in self._working)
        emptied = asyncio.create_task(self.batches.emptied())
        late = asyncio.ensure_future(sleep(_LAST_CALL_SECONDS))
        await asyncio.wait({emptied, late}, return_when="FIRST_COMPLETED")
        emptied.cancel()
        late.cancel()
        if cut:
            await sleep(_CLEARING_SECONDS)
        return cut

    def close(self) -> None:
        """The engine is gone, and its sequences with it."""
        self.batches.close()

    # -- batches -------------------------------------------------------------------------------

    def _put(
        self, batch_id: int, batch: list[RoutedSequence], *, stopped_too: bool = False
    ) -> CachedBatch | None:
        """Keep a batch unless all of it has stopped; what the router learns of it.

        While any of it waits, or the pod drains, the answer says that there is no room for more:
        later requests wait in the router's own queue.
        """
        live = [sequence for sequence in batch if not sequence.stopped]
        if not live and not (stopped_too and batch):
            return None
        self._drop(self.batches.discard(batch_id))
        self.batches.put(batch_id, batch)
        full = bool(self._admission.closed) or any(sequence.waits for sequence in live)
        max_tokens = sum(sequence.bound for sequence in live)
        return CachedBatch(
            id=batch_id,
            request_ids=[sequence.request_id for sequence in batch],
            max_tokens=max(max_tokens, self._serving.limits.slots) if full else max_tokens,
            current_tokens=_NO_ROOM if full else sum(sequence.next_tokens for sequence in live),
        )

    def _drop(self, sequences: Iterable[RoutedSequence]) -> None:
        ids = [sequence.sequence_id for sequence in sequences if not sequence.stopped]
        self._serving.client.abort(ids)

    def _release(self, batch_id: int, batch: list[RoutedSequence]) -> None:
        """A batch's lease has ended."""
        extra = {"batch": batch_id, "requests": len(batch)}
        log.warning(
            "no router has called for a batch: it is released (--router-lease)", extra=extra
        )
        self._drop(batch)

    @contextlib.contextmanager
    def _released_on_failure(self, batch_ids: Sequence[int]) -> Iterator[None]:
        """A router gives up what it named in a call that fails."""
        try:
            if self._over.done():
                raise Unavailable(DRAINING, retry_after=RETRY_SECONDS)
            yield
        except ServiceError:
            for batch_id in batch_ids:
                self._drop(self.batches.discard(batch_id))
            raise

    # -- steps ---------------------------------------------------------------------------------

    async def _probe(self, asked: ShardRequest) -> ShardStep:
        """A router's liveness probe: a token at once, and no batch. Probes take turns."""
        request, sequence = await self._requests.open_probe(asked)
        sink = StepSink([sequence])
        async with self._probing:
            self._serving.client.submit(request, sink)
            try:
                await sink.over()
            finally:
                self._serving.client.abort(request.sequence_ids)
        if sink.failure is not None:
            raise sink.failure
        return _unstepped(sink.generations)

    async def _prefill(self, new: ShardBatch, cached: int | None) -> ShardStep:
        batch = self.batches.take(cached) if cached is not None else []
        with self._dropped_on_failure(batch):
            opened = Opened()
            with contextlib.closing(opened):
                await self._requests.open(new, opened)
                self._drop(self.batches.discard(new.id))
                if not batch and not opened.sequences:
                    return _unstepped(opened.refused)
                joined_id = new.id if cached is None else cached
                concat_ns = 0 if opened.sequences and batch else None
                step = await self._step(joined_id, batch, opened, concat_ns=concat_ns)
            step.generations.extend(opened.refused)
            return step

    async def _decode(self, batch_ids: Sequence[int]) -> ShardStep:
        began = time.monotonic_ns()
        batch = list[RoutedSequence]()
        with self._dropped_on_failure(batch):
            for batch_id in batch_ids:
                batch += self.batches.take(batch_id)
            concat_ns = time.monotonic_ns() - began if len(batch_ids) > 1 else None
            return await self._step(batch_ids[0], batch, concat_ns=concat_ns, waits=True)

    async def _step(
        self,
        batch_id: int,
        resumed: list[RoutedSequence],
        opened: Opened = _NOTHING,
        *,
        concat_ns: int | None,
        waits: bool = False,
    ) -> ShardStep:
        batch = [*resumed, *opened.sequences]
        with self._dropped_on_failure(batch):
            sink = StepSink(batch)
            advanced = await self._serving.client.advance(
                start=opened.requests,
                start_chunks=[sequence.chunk for sequence in opened.sequences],
                resume=[sequence.sequence_id for sequence in resumed if not sequence.stopped],
                waits=waits,
                sink=sink,
            )
            failure = engine_failure(advanced.failure) if advanced.failure else sink.failure
            if failure is not None:
                raise failure
        waiting = set(advanced.waiting)
        for sequence in batch:
            sequence.behind = advanced.behind.get(sequence.sequence_id, 0)
            sequence.waits = sequence.sequence_id in waiting
        # The engine does not see stop sequences: it is asked to end these.
        ended = [s.sequence_id for s in batch if s.stopped_by_text]
        self._serving.client.abort(ended, stopped=True)
        return ShardStep(
            generations=sink.generations,
            batch=self._put(batch_id, batch),
            forward_ns=advanced.forward_ns,
            decode_ns=advanced.decode_ns,
            total_ns=advanced.total_ns,
            concat_ns=concat_ns,
        )

    @contextlib.contextmanager
    def _dropped_on_failure(self, batch: list[RoutedSequence]) -> Iterator[None]:
        """Drop the sequences of `batch`, which may grow meanwhile, if the step fails."""
        try:
            yield
        except BaseException:
            self._drop(batch)
            raise

    async def _run(
        self, work: Coroutine[object, object, ShardStep], *, prefill: bool = False
    ) -> ShardStep:
        """Run a step to its end even if the router hangs up: its batch must not get lost.

        Raises Unavailable at once when the pod ends.
        """
        with self.batches.call(prefill=prefill):
            task = asyncio.create_task(work)
            self._working.add(task)
            task.add_done_callback(self._worked)
            either: set[asyncio.Future[Any]] = {task, self._over}
            await asyncio.wait(either, return_when="FIRST_COMPLETED")
            if not task.done():
                task.cancel()
                raise Unavailable(DRAINING, retry_after=RETRY_SECONDS)
            if task.cancelled():
                # ClearCache took the batch away under this very call.
                raise NotFound("batch", "", "the batch was cleared while it was in use")
            return task.result()

    def _worked(self, task: asyncio.Task[ShardStep]) -> None:
        self._working.discard(task)
        if not task.cancelled():
            # Marks it as retrieved: the router may have hung up.
            task.exception()


def _unstepped(generations: list[ShardGeneration]) -> ShardStep:
    """The answer where no batch was stepped, and none is left."""
    return ShardStep(generations, batch=None, forward_ns=0, decode_ns=0, total_ns=0)
