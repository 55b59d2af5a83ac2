"""The engine as a child process: it has one end of a socket pair, and ends when ours closes."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokenpod.core.group_messages import Drain
from tokenpod.core.link import give_link
from tokenpod.core.messages import EngineOptions, Loading, Ready
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.pod.control_stream import ControlStream
from tokenpod.service.pod.processes import PodProcesses

#: What runs the engine; the numbers of its ends of the links are added. -P: nothing is imported
#: from the working directory.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "tokenpod.engine.process")


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
        options: EngineOptions,
        on_loading: Callable[[Loading], None],
        command: Sequence[str] = ENGINE_COMMAND,
        *,
        links: int = 1,
        on_waiting: Callable[[str], None] = lambda reason: None,
        on_drain: Callable[[Drain], None] = lambda drain: None,
        processes: PodProcesses | None = None,
    ) -> EngineProcess:
        """Start the process and connect; the model is not loaded yet (await `ready`).

        Args:
            options: with a placement, the engine is a rank and has a control stream.
            on_loading: called with the progress while weights are read.
            command: what runs it.
            links: one per front end.
            on_waiting: called with what the start-up of the group waits for.
            on_drain: called with another pod's request to drain, or its answer.
            processes: hears of the process, to look into it.
        """
        pairs = [socket.socketpair() for _ in range(links)]
        theirs = [pair[1].fileno() for pair in pairs]
        ends, control_end = [pair[1] for pair in pairs], None
        joins: socket.socket | None = None
        if links > 1:
            joins, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends.append(their_end)
            theirs.append(their_end.fileno())
        if options.placement is not None:
            control_end, their_end = socket.socketpair()
            ends.append(their_end)
            placement = msgspec.structs.replace(options.placement, control_fd=their_end.fileno())
            options = msgspec.structs.replace(options, placement=placement)
        asking: socket.socket | None = None
        if processes is not None:
            asking, their_end = socket.socketpair()
            ends.append(their_end)
            options = msgspec.structs.replace(options, questions_fd=their_end.fileno())
        # Popen, not asyncio's own: the child's death signal hangs on the thread that forks.
        process = subprocess.Popen(  # noqa: ASYNC220
            [*command, *map(str, theirs)],
            pass_fds=[end.fileno() for end in ends],
            stdin=subprocess.DEVNULL,
        )
        for end in ends:
            end.close()
        ours, *spare = [pair[0] for pair in pairs]
        client = await EngineClient(on_loading=on_loading, count=links).open(ours)
        client.send(options)
        control = None
        if control_end is not None:
            control = await ControlStream(on_waiting, on_drain).open(control_end)
        name = f"rank {options.placement.rank}" if options.placement else "the engine"
        if processes is not None and asking is not None:
            processes.add(name.removeprefix("the ").replace(" ", "-"), process.pid, asking)
        return cls(name, process, client, control, spare, joins)

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
