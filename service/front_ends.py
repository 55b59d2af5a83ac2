"""The further front ends of a pod, as the first one sees them: child processes on the same port.

One Python process streams some 12,000 messages a second, about as many tokens as one GPU makes;
beyond, tokens share messages and readers get them later. Further processes share the port (the
kernel gives each new connection to one of them) and serve what streams tokens; all else they hand
on to the first, which is the pod (`relay.py`).

    first        health, a router's batches, drain, the engine's life      + Generate, Tokens
    further      the relay                                                 + Generate, Tokens

A further front end ends when the first hangs up, whatever becomes of the first. If one ends
unasked, its streams are lost and the engine drops their sequences; the pod drains and ends, to be
started anew whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenpod.config import ServerSettings
from tokenpod.service.client import EngineClient
from tokenpod.service.house import House

#: -P: nothing is imported from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "tokenpod.service.front_end")
_POLL_SECONDS = 0.1
#: Seconds that a front end gets to end its calls and send its telemetry.
_LEAVE_SECONDS = 6.0


class FrontEndLost(Exception):
    """A front end ended unasked; the text is for the operator."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the pod is reached, and the first front end by the others.

    `address` is the public one, with the port that was bound.
    """

    address: str
    relay_address: str
    relay_secret: str


@dataclass(frozen=True, slots=True)
class PodProgress:
    """The engine's pulse as the whole pod feels it: the first front end hears of every step."""

    client: EngineClient
    house: House

    @property
    def pending(self) -> bool:
        """Whether the engine owes anybody a step."""
        return self.client.pending or self.house.pending

    @property
    def last_step_at(self) -> int:
        """CLOCK_MONOTONIC nanoseconds."""
        return self.client.last_step_at

    @property
    def heard_at(self) -> int:
        """CLOCK_MONOTONIC nanoseconds."""
        return self.client.heard_at

    @property
    def usual_step(self) -> float:
        """Seconds."""
        return self.client.usual_step

    def ask(self) -> None:
        """Have the engine say that it is there."""
        self.client.ask()


class Order(msgspec.Struct, frozen=True):
    """What a new front end is told on its standard input, in a line of JSON."""

    index: int
    count: int
    settings: dict[str, Any]
    model_folder: str
    address: str
    relay_address: str
    relay_secret: str
    #: Descriptors that it inherits: its link to the engine, and the house.
    link: int
    house: int


class FrontEnds:
    """The further front ends. Make them with `start`."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], house: House) -> None:
        #: Done, with FrontEndLost as its result, once one has ended unasked.
        self.lost: asyncio.Future[FrontEndLost] = asyncio.get_running_loop().create_future()
        self._processes = processes
        self._house = house
        self._watcher = asyncio.create_task(self._watch()) if processes else None

    @classmethod
    def start(
        cls,
        settings: ServerSettings,
        model_folder: Path,
        links: Sequence[socket.socket],
        house: House,
        way: Way,
    ) -> FrontEnds:
        """One process a link; they do not serve yet (await `serving`)."""
        return cls(
            [
                _start(settings, model_folder, link, index, house, way)
                for index, link in enumerate(links, start=1)
            ],
            house,
        )

    async def serving(self) -> None:
        """Wait until all serve. Raises FrontEndLost with one line that says why not."""
        while not self._house.all_serving:
            if self.lost.done():
                raise self.lost.result()
            await asyncio.sleep(_POLL_SECONDS / 4)

    async def stop(self) -> None:
        """Hang up and wait; kill what does not leave. Also twice."""
        if self._watcher is not None:
            self._watcher.cancel()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        await asyncio.gather(*(asyncio.to_thread(_end, process) for process in self._processes))

    async def _watch(self) -> None:
        while True:
            for index, process in enumerate(self._processes, start=1):
                if (status := process.poll()) is not None:
                    self._house.forget(index)
                    why = f"front end {index} ended with status {status}"
                    self.lost.set_result(FrontEndLost(why))
                    return
            await asyncio.sleep(_POLL_SECONDS)


def _start(
    settings: ServerSettings,
    model_folder: Path,
    link: socket.socket,
    index: int,
    house: House,
    way: Way,
) -> subprocess.Popen[bytes]:
    assert house.descriptor is not None
    order = Order(
        index=index,
        count=house.count,
        settings=settings.model_dump(mode="json"),
        model_folder=str(model_folder),
        address=way.address,
        relay_address=way.relay_address,
        relay_secret=way.relay_secret,
        link=link.fileno(),
        house=house.descriptor,
    )
    with link:
        # From this thread: the child's death signal hangs on the thread that forks.
        process = subprocess.Popen(
            _COMMAND, pass_fds=[order.link, order.house], stdin=subprocess.PIPE
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
