"""The text workers of a front end: processes that tokenise long texts and render chats.

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
import os
import signal
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field

import msgspec

from tokenpod.service.calls.errors import (
    RETRY_SECONDS,
    Internal,
    InvalidArgument,
    ServiceError,
    Unavailable,
)
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.text.tokenizers.tokenizer import TextModel, TokenizerError
from tokenpod.service.text.workers.text_messages import (
    EncodeChat,
    Encoded,
    Job,
    Refusal,
    Refused,
    WorkerOptions,
)
from tokenpod.service.text.workers.text_process import TextProcess, WorkerEnded

log = logging.getLogger("tokenpod.text")

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


@dataclass(slots=True, eq=False)
class _Waiting:
    """A job in the queue. Its worker is set when it leaves the queue."""

    size: int
    worker: asyncio.Future[TextProcess] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _WorkerLost(Unavailable):
    """A worker has ended, and its job is not to blame."""


class TextWorkers:
    """A pool of workers. Make it with `start`, and `close` it.

    Args:
        model: a file that holds a `TextModel`; closed with the pool.
        settings: how many workers, and what a job may take.
    """

    def __init__(self, model: int, settings: ServerSettings) -> None:
        self._settings = settings
        self._model = model
        self._workers: set[TextProcess] = set()
        self._idle: list[TextProcess] = []
        self._queue: list[_Waiting] = []
        self._picks = 0
        #: Starting, replacing and reaping; held so that they are not collected.
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def start(cls, model: TextModel, settings: ServerSettings) -> TextWorkers:
        """All workers, loaded. Raises TokenizerError if one can't be."""
        pool = cls(await asyncio.to_thread(_written, model), settings)
        try:
            await asyncio.gather(*(pool._add() for _ in range(settings.text_workers)))
        except BaseException:
            await pool.close()
            raise
        return pool

    def model(self) -> TextModel:
        """What the workers tokenise and render with."""
        return TextModel.read(self._model)

    async def run(self, job: Job, *, field: str, size: int) -> Encoded:
        """Have `job` done.

        Args:
            field: what the caller is told is wrong, if it is.
            size: small jobs go first.

        InvalidArgument: the template refuses, the library fails, or time or memory is over.
        Unavailable: two workers were lost by no fault of the job's.
        """
        try:
            return await self._once(job, field, size)
        except _WorkerLost:
            return await self._once(job, field, size)

    async def _once(self, job: Job, field: str, size: int) -> Encoded:
        """As `run`, by one worker. Raises _WorkerLost if it was lost."""
        worker = await self._take(size)
        answering = asyncio.ensure_future(worker.ask(job))
        try:
            done, _ = await asyncio.wait([answering], timeout=self._settings.text_timeout)
            if not done:
                worker.kill()
                await asyncio.wait([answering])
        except asyncio.CancelledError:
            self._spawn(self._abandon(worker, answering))
            raise
        self._give(worker)
        try:
            answer = answering.result()
        except WorkerEnded as ended:
            raise self._failure(job, field, ended.status if done else None) from ended
        if isinstance(answer, Refused):
            raise self._refusal(job, field, answer)
        return answer

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
        os.close(self._model)

    # -- jobs and workers ------------------------------------------------------------------------

    async def _take(self, size: int) -> TextProcess:
        """A worker without a job."""
        if self._closed:
            raise _stopping()
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended:
                return worker
        waiting = _Waiting(size)
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

    def _give(self, worker: TextProcess) -> None:
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

    async def _add(self) -> None:
        """Start one more worker, and give it away once it is loaded. Raises TokenizerError."""
        worker = await TextProcess.start(
            WorkerOptions(self._model, self._settings.text_memory_bytes)
        )
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await worker.loaded()
        except (TimeoutError, WorkerEnded) as error:
            worker.kill()
            await self._forget(worker)
            problem = "takes too long to load" if isinstance(error, TimeoutError) else str(error)
            raise TokenizerError(f"the tokenizer can't be used in a worker: {problem}") from error
        self._spawn(self._replace(worker))
        self._give(worker)

    async def _replace(self, worker: TextProcess) -> None:
        """Wait until a worker ends, and start another."""
        await worker.hung_up()
        idle, status = worker in self._idle, await self._forget(worker)
        if idle:
            log.warning("an idle text worker has ended", extra={"status": status})
        while True:
            try:
                await self._add()
                return
            except (TokenizerError, OSError) as error:
                log.error("a text worker can't be started", extra={"reason": str(error)})
                await asyncio.sleep(_RESTART_SECONDS)

    async def _forget(self, worker: TextProcess) -> int:
        """Take a worker that ends out of the pool; its exit status."""
        if worker in self._idle:
            self._idle.remove(worker)
        status = await worker.ended()
        self._workers.discard(worker)
        return status

    async def _abandon(
        self, worker: TextProcess, answering: asyncio.Future[Encoded | Refused]
    ) -> None:
        """The caller has left. What it asked for ends, by itself or not."""
        # Marks the outcome as retrieved, also if the end of the pool cancels this task.
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait([answering], timeout=_ABANDONED_SECONDS)
        if not done:
            worker.kill()
            await asyncio.wait([answering])
        self._give(worker)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what callers are told -------------------------------------------------------------------

    def _failure(self, job: Job, field: str, status: int | None) -> ServiceError:
        """Why a worker has ended: its exit status; None: its time was over."""
        if self._closed:
            return _stopping()
        if status is None:
            problem = (
                f"takes {_work(job)} more than {self._settings.text_timeout:g} s (--text-timeout)"
            )
            return InvalidArgument(field, problem)
        if status in _OUT_OF_MEMORY:
            return self._too_much_memory(job, field)
        if status in _FAULTS:
            return InvalidArgument(field, f"makes {_work(job)} fail")
        log.error("a text worker has ended", extra={"status": status})
        return _WorkerLost("the process that tokenises was lost; retry", retry_after=RETRY_SECONDS)

    def _refusal(self, job: Job, field: str, refused: Refused) -> ServiceError:
        if refused.reason is Refusal.MEMORY:
            return self._too_much_memory(job, field)
        if refused.reason is Refusal.FAULT:
            fault = Internal()
            extra = {"error_id": fault.error_id, "reason": refused.message}
            log.error("internal error in a text worker", extra=extra)
            return fault
        if refused.reason is Refusal.TOKENIZER:
            log.error("the tokenizer has panicked", extra={"reason": refused.message})
            return InvalidArgument(field, "makes the model's tokenizer fail")
        if refused.field:
            return InvalidArgument(f"{field}.{refused.field}", refused.message)
        return InvalidArgument(field, f"can't be rendered: {refused.message}")

    def _too_much_memory(self, job: Job, field: str) -> ServiceError:
        most = self._settings.text_memory_bytes
        problem = f"takes {_work(job)} more than {most} bytes of memory (--text-memory-bytes)"
        return InvalidArgument(field, problem)


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping or starting anew", retry_after=RETRY_SECONDS)


def _work(job: Job) -> str:
    return "the model's chat template" if isinstance(job, EncodeChat) else "the model's tokenizer"


def _written(model: TextModel) -> int:
    """A file without a name that holds `model`."""
    data = msgspec.msgpack.encode(model)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tokenpod-text")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor
