"""One text worker, as the front end sees it: a child process and the link to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from typing import Any

from tokenpod.core.async_link import AsyncLink
from tokenpod.service.text.workers.text_messages import (
    Encoded,
    FromWorker,
    Job,
    Loaded,
    Refused,
    WorkerOptions,
)

#: -P: nothing is imported from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "tokenpod.service.text.workers.text_worker")


class WorkerEnded(Exception):
    """The worker is gone. `status` is what `subprocess` calls its return code."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it ended with status {status}")
        self.status = status


class TextProcess(AsyncLink[FromWorker]):
    """One worker. Make it with `start`; it has one job at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(FromWorker)  # type: ignore[arg-type]
        self._process = process
        loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = loop.create_future()
        self._hung_up: asyncio.Future[None] = loop.create_future()
        self._answer: asyncio.Future[Encoded | Refused] | None = None

    @classmethod
    async def start(cls, options: WorkerOptions) -> TextProcess:
        """Start the process; it is not loaded yet (await `loaded`)."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Popen, not asyncio's own: the child's death signal hangs on the thread that forks.
            process = subprocess.Popen(  # noqa: ASYNC220
                [*_COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), options.model],
                stdin=subprocess.DEVNULL,
            )
        worker = await cls(process).open(ours)
        worker.send(options)
        return worker

    @property
    def has_ended(self) -> bool:
        """Whether it has hung up."""
        return self._hung_up.done()

    async def hung_up(self) -> None:
        """Wait until it ends."""
        await asyncio.wait([self._hung_up])

    async def loaded(self) -> None:
        """Wait until it takes jobs. Raises WorkerEnded."""
        await asyncio.wait([self._loaded, self._hung_up], return_when="FIRST_COMPLETED")
        if not self._loaded.done():
            raise WorkerEnded(await self.ended())

    async def ask(self, job: Job) -> Encoded | Refused:
        """Have `job` done. Raises WorkerEnded."""
        self._answer = asyncio.get_running_loop().create_future()
        self.send(job)
        either: list[asyncio.Future[Any]] = [self._answer, self._hung_up]
        await asyncio.wait(either, return_when="FIRST_COMPLETED")
        if not self._answer.done():
            raise WorkerEnded(await self.ended())
        return self._answer.result()

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()

    async def ended(self) -> int:
        """Wait until the process is gone; its status."""
        return await asyncio.to_thread(self._process.wait)

    def receive(self, message: FromWorker) -> None:
        """Take one message of the worker."""
        if isinstance(message, Loaded):
            self._loaded.set_result(None)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio."""
        # It closes its end only by ending: what is left of it can go.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._hung_up.set_result(None)
