"""The engine as a child process: it has one end of a socket pair, and ends when ours closes."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokenpod.core.group_messages import Drain
from tokenpod.core.link import give_link
from tokenpod.core.messages import EngineOptions, Loading, Ready
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.pod.control_stream import ControlStream
from tokenpod.service.pod.engine_start import StartedEngine
from tokenpod.service.pod.processes import PodProcesses


class EngineProcess:
    """One engine and the link to it. Make it with `start`.

    `spare_links` are the ends of further links: sockets that further front ends inherit.
    `control` is the control stream of a rank of a group. `joins` brings the engine new links,
    where it has several.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        client: EngineClient,
        control: ControlStream | None,
        spare_links: Sequence[socket.socket],
        joins: socket.socket | None,
    ) -> None:
        #: For the operator.
        self.name = name
        self.client = client
        self.control = control
        self.spare_links = spare_links
        self._process = process
        self._joins = joins

    @classmethod
    async def start(
        cls,
        started: StartedEngine,
        options: EngineOptions,
        on_loading: Callable[[Loading], None],
        *,
        on_waiting: Callable[[str], None] = lambda reason: None,
        on_drain: Callable[[Drain], None] = lambda drain: None,
        processes: PodProcesses | None = None,
    ) -> EngineProcess:
        """Connect to the process; the model is not loaded yet (await `ready`).

        Args:
            started: the process; of a group, if the options have a placement.
            options: the engine's.
            on_loading: called with the progress while weights are read.
            on_waiting: called with what the start-up of the group waits for.
            on_drain: called with another pod's request to drain, or its answer.
            processes: hears of the process, to look into it.
        """
        process = started.process
        options = msgspec.structs.replace(options, questions_fd=started.questions_fd)
        if options.placement is not None:
            placement = msgspec.structs.replace(options.placement, control_fd=started.control_fd)
            options = msgspec.structs.replace(options, placement=placement)
        ours, *spare = started.links
        client = await EngineClient(on_loading=on_loading, count=len(started.links)).open(ours)
        client.send(options)
        control = None
        if started.control is not None:
            control = await ControlStream(on_waiting, on_drain).open(started.control)
        name = f"rank {options.placement.rank}" if options.placement else "the engine"
        if processes is not None:
            short = name.removeprefix("the ").replace(" ", "-")
            processes.add(short, process.pid, started.questions)
        return cls(name, process, client, control, spare, started.joins)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def new_link(self, index: int) -> socket.socket:
        """A link in the place of that of front end `index`. Raises OSError if the engine is gone.

        The engine drops the sequences of the one before.
        """
        assert self._joins is not None, "an engine with one link gets no others"
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                give_link(self._joins, index, theirs)
            except OSError:
                ours.close()
                raise
        return ours

    async def ready(self) -> Ready:
        """Wait until the model is warm. Raises EngineLost with one line that says why not."""
        ready, lost = self.client.ready, self.client.lost
        futures: set[asyncio.Future[Any]] = {ready, lost}
        await asyncio.wait(futures, return_when="FIRST_COMPLETED")
        if lost.done():
            raise lost.result()
        return ready.result()

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended the process."""
        return (self._process.poll() or 0) < 0

    async def how_it_ended(self, seconds: float) -> str:
        """For the operator, of a process that has hung up; it gets so long to end."""
        try:
            status = await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            return f"{self.name} hung up"
        if status >= 0:
            return f"{self.name} ended with status {status}"
        # Before it is given up here, only the kernel kills it.
        memory = ", out of memory?" if status == -signal.SIGKILL else ""
        return f"{self.name} was killed by {signal.Signals(-status).name}{memory}"

    async def stop(self, seconds: float) -> None:
        """Hang up and wait so many seconds; kill the process if it has not ended."""
        self.client.close()
        if self.control is not None:
            self.control.close()
        for link in self.spare_links:
            link.close()
        if self._joins is not None:
            self._joins.close()
        await self.end(seconds)

    async def end(self, seconds: float) -> None:
        """Wait so long for the process to end; kill it if it does not."""
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
