"""One worker, as the front end sees it: a child process and the link to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

import msgspec

from tokenpod.core.async_link import AsyncLink
from tokenpod.service.workers.worker import Loaded, Refused

#: What a worker's first message is, once it is loaded, and what its jobs have as results.
First = TypeVar("First", bound=Loaded)
Result = TypeVar("Result", bound=msgspec.Struct)


class WorkerEnded(Exception):
    """The worker is gone. `status` is what `subprocess` calls its return code."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it ended with status {status}")
        self.status = status


class WorkerProcess(AsyncLink[Any], Generic[First, Result]):
    """One worker. Make it with `start`; it has one job at a time."""

    def __init__(self, process: subprocess.Popen[bytes], answers: Any) -> None:
        super().__init__(answers)
        self._process = process
        loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[First] = loop.create_future()
        self._hung_up: asyncio.Future[None] = loop.create_future()
        self._answer: asyncio.Future[Result | Refused] | None = None

    @classmethod
    async def start(
        cls, module: str, options: msgspec.Struct, answers: Any, *, inherited: Sequence[int] = ()
    ) -> Self:
        """Start the process; it is not loaded yet (await `loaded`).

        Args:
            module: what it runs, with the descriptor of its end of the link as its argument.
            options: the first message to it.
            answers: the union of the messages that come from it.
            inherited: more descriptors that it gets.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: nothing is imported from the working directory.
            # Popen, not asyncio's own: the child's death signal hangs on the thread that forks.
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *inherited],
                stdin=subprocess.DEVNULL,
            )
        worker = await cls(process, answers).open(ours)
        worker.send(options)
        return worker

    @property
    def pid(self) -> int:
        """The process's, which nobody else has before `ended`."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has hung up."""
        return self._hung_up.done()

    async def hung_up(self) -> None:
        """Wait until it ends."""
        await asyncio.wait([self._hung_up])

    async def loaded(self) -> First:
        """Wait until it takes jobs; its first message. Raises WorkerEnded."""
        either: list[asyncio.Future[Any]] = [self._loaded, self._hung_up]
        await asyncio.wait(either, return_when="FIRST_COMPLETED")
        if not self._loaded.done():
            raise WorkerEnded(await self.ended())
        return self._loaded.result()

    async def ask(self, job: msgspec.Struct) -> Result | Refused:
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

    def receive(self, message: Any) -> None:
        """Take one message of the worker."""
        if isinstance(message, Loaded):
            self._loaded.set_result(message)  # type: ignore[arg-type]
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio."""
        # It closes its end only by ending: what is left of it can go.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._hung_up.set_result(None)
