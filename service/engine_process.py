"""The engine as a child process: it has one end of a socket pair, and ends when ours closes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tokenpod.engine.types import EngineOptions, Loading, Ready
from tokenpod.service.client import EngineClient, EngineLost

#: What runs the engine; the numbers of its ends of the links are added. -P: nothing is imported
#: from the working directory.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "tokenpod.engine.process")

#: Seconds that an engine gets to leave after its link is closed.
_LEAVE_SECONDS = 5.0


class EngineProcess:
    """One engine and the link to it. Make it with `start`.

    `spare_links` are the ends of further links, for front ends to come: sockets to be handed on.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        client: EngineClient,
        spare_links: Sequence[socket.socket],
    ) -> None:
        self.client = client
        self.spare_links = spare_links
        self._process = process

    @classmethod
    async def start(
        cls,
        options: EngineOptions,
        on_loading: Callable[[Loading], None],
        command: Sequence[str] = ENGINE_COMMAND,
        *,
        links: int = 1,
    ) -> EngineProcess:
        """Start the process and connect; the model is not loaded yet (await `ready`)."""
        pairs = [socket.socketpair() for _ in range(links)]
        theirs = [pair[1].fileno() for pair in pairs]
        # Popen, not asyncio's own: the child's death signal hangs on the thread that forks.
        process = subprocess.Popen(  # noqa: ASYNC220
            [*command, *map(str, theirs)], pass_fds=theirs, stdin=subprocess.DEVNULL
        )
        for _, end in pairs:
            end.close()
        ours, *spare = [pair[0] for pair in pairs]
        client = await EngineClient.connect(ours, options, on_loading, count=links)
        return cls(process, client, spare)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    async def ready(self) -> Ready:
        """Wait until the model is warm. Raises EngineLost with one line that says why not."""
        ready, lost = self.client.ready, self.client.lost
        futures: set[asyncio.Future[Any]] = {ready, lost}
        await asyncio.wait(futures, return_when="FIRST_COMPLETED")
        if lost.done():
            raise lost.result()
        return ready.result()

    async def stop(self) -> None:
        """Hang up and wait; kill what does not leave."""
        self.client.close()
        try:
            await asyncio.to_thread(self._process.wait, _LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


__all__ = ["EngineLost", "EngineProcess"]
