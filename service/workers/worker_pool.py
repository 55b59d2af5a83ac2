"""A front end's processes for one kind of job, each of which can be killed.

    run(job) -> a free worker, or a place in the queue -> answer
                  | time is over, or the caller has left -> SIGKILL, a new worker takes its place
                  | memory is over -> its allocation fails -> answer, or its end, and a new worker

A call's job ends with the call, at the latest. A worker that ends is replaced, whatever it was
doing; if the job is not to blame, another worker does it: it changes nothing. Workers die with the
front end (core/own_process.py).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from tokenpod.service.calls.errors import (
    RETRY_SECONDS,
    Internal,
    InvalidArgument,
    ServiceError,
    Unavailable,
)
from tokenpod.service.workers.worker import Loaded, Refusal, Refused
from tokenpod.service.workers.worker_process import WorkerEnded, WorkerProcess

#: Seconds that an abandoned job gets to end by itself: a new worker costs more CPU than that.
_ABANDONED_SECONDS = 0.25
#: Seconds that a worker may take to start and load, and between attempts where it fails.
_START_SECONDS = 60.0
_RESTART_SECONDS = 1.0
#: Every so many picks the oldest job is next, not the smallest: long ones wait, but not for ever.
_OLDEST_EVERY = 4
#: How a worker ends when an allocation fails, and when its stack overflows.
_OUT_OF_MEMORY = frozenset({-signal.SIGABRT})
_FAULTS = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL})

Job = TypeVar("Job", bound=msgspec.Struct)
First = TypeVar("First", bound=Loaded)
Result = TypeVar("Result", bound=msgspec.Struct)


class CantStart(Exception):
    """A worker ends, or takes too long, before it takes jobs. The text is for the operator."""


class _WorkerLost(Unavailable):
    """A worker has ended, and its job is not to blame."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a job may take, and where the operator says so.

    Args:
        workers: processes.
        seconds: until a job's worker is killed, by the setting `seconds_flag`.
        memory_bytes: besides what a worker has once it is loaded, by `memory_flag`.
    """

    workers: int
    seconds: float
    seconds_flag: str
    memory_bytes: int
    memory_flag: str


@dataclass(slots=True, eq=False)
class _Waiting(Generic[First, Result]):
    """A job in the queue. Its worker is set when it leaves the queue."""

    size: int
    worker: asyncio.Future[WorkerProcess[First, Result]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WorkerPool(ABC, Generic[Job, First, Result]):
    """Workers for jobs of one kind. A subclass says how one is started, and what jobs are called.

    Call `open` before the first job, and `close` at the end.

    Args:
        limits: how many workers, and what a job may take.
        kind: of worker, for the log, such as "text".
        log: of workers' starts and ends.
    """

    def __init__(self, limits: PoolLimits, kind: str, log: logging.Logger) -> None:
        self._limits = limits
        self._kind, self._log = kind, log
        self._workers: set[WorkerProcess[First, Result]] = set()
        self._idle: list[WorkerProcess[First, Result]] = []
        self._queue: list[_Waiting[First, Result]] = []
        self._picks = 0
        #: Starting, replacing and reaping; held so that they are not collected.
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    # -- what a subclass says --------------------------------------------------------------------

    @abstractmethod
    async def _start_worker(self) -> WorkerProcess[First, Result]:
        """A new process, which may not be loaded yet."""

    @abstractmethod
    def _work(self, job: Job) -> str:
        """What does a job, for its caller: "the model's tokenizer"."""

    def _taken(self, worker: WorkerProcess[First, Result], answer: Result) -> Result:
        """An answer, once all has been taken that the worker holds until its next job."""
        del worker
        return answer

    def _at_fault(self, job: Job, field: str, refused: Refused) -> InvalidArgument:
        """The error for the caller of a job that is at fault."""
        del job
        field = f"{field}.{refused.field}" if refused.field else field
        return InvalidArgument(field, refused.message)

    # -- jobs ------------------------------------------------------------------------------------

    async def open(self) -> list[First]:
        """Start all workers; what each said once it was loaded. Raises CantStart if one can't."""
        try:
            return await asyncio.gather(*(self._add() for _ in range(self._limits.workers)))
        except BaseException:
            await self.close()
            raise

    async def run(self, job: Job, *, field: str, size: int) -> Result:
        """Have `job` done.

        Args:
            field: that the error names, if there is one.
            size: small jobs go first.

        InvalidArgument: the job is at fault, a library fails, or time or memory is over.
        Unavailable: two workers were lost by no fault of the job's.
        """
        try:
            return await self._once(job, field, size)
        except _WorkerLost:
            return await self._once(job, field, size)

    async def _once(self, job: Job, field: str, size: int) -> Result:
        """As `run`, by one worker. Raises _WorkerLost if it was lost."""
        worker = await self._take(size)
        answering = asyncio.ensure_future(worker.ask(job))
        try:
            done, _ = await asyncio.wait([answering], timeout=self._limits.seconds)
            if not done:
                worker.kill()
                await asyncio.wait([answering])
        except asyncio.CancelledError:
            self._spawn(self._abandon(worker, answering))
            raise
        try:
            answer = answering.result()
            if isinstance(answer, Refused):
                raise self._refusal(job, field, answer)
            return self._taken(worker, answer)
        except WorkerEnded as ended:
            raise self._failure(job, field, ended.status if done else None) from ended
        finally:
            self._give(worker)

    async def close(self) -> None:
        """Kill all workers, whatever they do, and wait until they are gone. Also twice."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.kill()
        for waiting in self._queue:
            if not waiting.worker.done():
                waiting.worker.set_exception(_stopping())
        self._queue.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.ended() for worker in self._workers))

    # -- jobs and workers ------------------------------------------------------------------------

    async def _take(self, size: int) -> WorkerProcess[First, Result]:
        """A worker without a job."""
        if self._closed:
            raise _stopping()
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended:
                return worker
        waiting = _Waiting[First, Result](size)
        self._queue.append(waiting)
        try:
            return await waiting.worker
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif not waiting.worker.cancelled() and waiting.worker.exception() is None:
                # It came at the same moment as the caller left.
                self._give(waiting.worker.result())
            raise

    def _give(self, worker: WorkerProcess[First, Result]) -> None:
        """A worker is free; nothing if it has ended."""
        if worker.has_ended:
            return
        # A job whose caller has left stays in the queue until its task has run.
        queue = [waiting for waiting in self._queue if not waiting.worker.done()]
        if not queue:
            self._idle.append(worker)
            return
        self._picks += 1
        oldest = self._picks % _OLDEST_EVERY == 0
        chosen = queue[0] if oldest else min(queue, key=lambda waiting: waiting.size)
        self._queue.remove(chosen)
        chosen.worker.set_result(worker)

    # -- the life of a worker --------------------------------------------------------------------

    async def _add(self) -> First:
        """Start one more worker, and give it away once it is loaded. Raises CantStart."""
        worker = await self._start_worker()
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_SECONDS):
                first = await worker.loaded()
        except (TimeoutError, WorkerEnded) as error:
            worker.kill()
            await self._forget(worker)
            problem = "takes too long to load" if isinstance(error, TimeoutError) else str(error)
            raise CantStart(problem) from error
        self._spawn(self._replace(worker))
        self._give(worker)
        return first

    async def _replace(self, worker: WorkerProcess[First, Result]) -> None:
        """Wait until a worker ends, and start another."""
        await worker.hung_up()
        idle, status = worker in self._idle, await self._forget(worker)
        if idle:
            self._log.warning(f"an idle {self._kind} worker has ended", extra={"status": status})
        while True:
            try:
                await self._add()
                return
            except (CantStart, OSError) as error:
                extra = {"reason": str(error)}
                self._log.error(f"no {self._kind} worker can be started", extra=extra)
                await asyncio.sleep(_RESTART_SECONDS)

    async def _forget(self, worker: WorkerProcess[First, Result]) -> int:
        """Take a worker that ends out of the pool; its exit status."""
        if worker in self._idle:
            self._idle.remove(worker)
        status = await worker.ended()
        self._workers.discard(worker)
        return status

    async def _abandon(
        self,
        worker: WorkerProcess[First, Result],
        answering: asyncio.Future[Result | Refused],
    ) -> None:
        """The caller has left. What it asked for ends, by itself or not."""
        # Marks the outcome as retrieved, also if the end of the pool cancels this task.
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait([answering], timeout=_ABANDONED_SECONDS)
        if not done:
            worker.kill()
            await asyncio.wait([answering])
        self._give(worker)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- errors for callers ----------------------------------------------------------------------

    def _failure(self, job: Job, field: str, status: int | None) -> ServiceError:
        """Why a worker has ended: its exit status; None: its time was over."""
        if self._closed:
            return _stopping()
        if status is None:
            limit = f"{self._limits.seconds:g} s ({self._limits.seconds_flag})"
            return InvalidArgument(field, f"takes {self._work(job)} more than {limit}")
        if status in _OUT_OF_MEMORY:
            return self._too_much_memory(job, field)
        if status in _FAULTS:
            return InvalidArgument(field, f"makes {self._work(job)} fail")
        self._log.error(f"a {self._kind} worker has ended", extra={"status": status})
        problem = f"a process that the call needs ({self._kind} worker) was lost; retry"
        return _WorkerLost(problem, retry_after=RETRY_SECONDS)

    def _refusal(self, job: Job, field: str, refused: Refused) -> ServiceError:
        if refused.reason is Refusal.MEMORY:
            return self._too_much_memory(job, field)
        if refused.reason is Refusal.FAULT:
            fault = Internal()
            extra = {"error_id": fault.error_id, "reason": refused.message}
            self._log.error(f"internal error in a {self._kind} worker", extra=extra)
            return fault
        if refused.reason is Refusal.LIBRARY:
            self._log.error(f"{self._work(job)} has failed", extra={"reason": refused.message})
            return InvalidArgument(field, f"makes {self._work(job)} fail")
        return self._at_fault(job, field, refused)

    def _too_much_memory(self, job: Job, field: str) -> ServiceError:
        limits = self._limits
        problem = (
            f"takes {self._work(job)} more than {limits.memory_bytes} bytes of memory "
            f"({limits.memory_flag})"
        )
        return InvalidArgument(field, problem)


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping or starting anew", retry_after=RETRY_SECONDS)
