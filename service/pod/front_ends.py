"""The further front ends of a pod: child processes of the first one, on the same port.

One Python process streams some 12,000 messages a second, about as many tokens as one GPU makes;
beyond, tokens share messages and readers get them later. Further processes share the port (the
kernel gives each new connection to one of them) and serve what streams tokens; other calls they
pass on to the first (`relay.py`), which is the one that decides for the pod.

    first        health, a router's batches, drain, the engine's life      + Generate, Tokens
    further      the relay                                                 + Generate, Tokens

A further front end ends when the first hangs up, whatever becomes of the first. If one ends
unasked, its streams are lost and the engine drops their sequences; the pod drains and ends, to be
started anew whole.

One that hangs would go on getting its part of the new connections, for a stopped process keeps its
place at the port. So each shows four times a second that its event loop turns. After five seconds
without, it is killed and another takes its place, with a new link to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenpod.core.silence import BEAT_SECONDS, Silence
from tokenpod.service.config import ServerSettings
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.pod.counters import PodCounters

log = logging.getLogger("tokenpod")

#: -P: nothing is imported from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "tokenpod.service.pod.front_end")
_POLL_SECONDS = 0.1
#: Seconds without a heartbeat after which a front end counts as hung: while it serves, and while
#: one that replaces another starts.
_PATIENCE_SECONDS = 5.0
_START_SECONDS = 60.0
#: Seconds that a front end gets to end its calls and send its telemetry.
_LEAVE_SECONDS = 6.0


class FrontEndLost(Exception):
    """A front end ended unasked; the text is for the operator."""


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """How the pod is reached, and the first front end by the others.

    `address` is the public one, with the port that was bound.
    """

    address: str
    relay_address: str
    relay_secret: str


@dataclass(frozen=True, slots=True)
class PodProgress:
    """The engine's progress for the whole pod: the first front end receives every step."""

    client: EngineClient
    counters: PodCounters

    @property
    def pending(self) -> bool:
        """Whether the engine owes anybody a step."""
        return self.client.pending or self.counters.pending

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


class FrontEndConfig(msgspec.Struct, frozen=True):
    """The configuration of a new front end, written to its standard input as a line of JSON."""

    index: int
    count: int
    settings: dict[str, Any]
    model_folder: str
    address: str
    relay_address: str
    relay_secret: str
    #: Descriptors that it inherits: its link to the engine, and the pod's counters.
    link: int
    counters: int
    #: How many processes have had this index before.
    life: int = 0


@dataclass(slots=True)
class _Child:
    """The process that is front end `index` now."""

    index: int
    process: subprocess.Popen[bytes]
    life: int = 0
    #: The last count of its heartbeats; None: it does not serve yet.
    beats: int | None = None


class FrontEnds:
    """The further front ends. Make them with `start`.

    Args:
        processes: one per link of the engine but the first, in order.
        counters: where they show what they do.
        again: starts a process in the place of front end `index`, the `life`-th one.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        counters: PodCounters,
        again: Callable[[int, int], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        #: Done, with FrontEndLost as its result, once one has ended unasked.
        self.lost: asyncio.Future[FrontEndLost] = asyncio.get_running_loop().create_future()
        self._children = [_Child(index, process) for index, process in enumerate(processes, 1)]
        self._counters = counters
        self._again = again
        self._silence, self._starting = Silence[int](), Silence[int]()
        self._watcher = asyncio.create_task(self._watch()) if processes else None

    @classmethod
    def start(
        cls,
        settings: ServerSettings,
        model_folder: Path,
        links: Sequence[socket.socket],
        counters: PodCounters,
        relay: RelayAddress,
        new_link: Callable[[int], socket.socket],
    ) -> FrontEnds:
        """One process per link; they do not serve yet (await `serving`).

        Args:
            settings: the operator's.
            model_folder: where the model lies.
            links: to the engine.
            counters: where they show what they do.
            relay: how clients reach the pod, and further front ends the first one.
            new_link: makes one in the place of that of front end `index`; raises OSError.
        """

        def start(index: int, life: int, link: socket.socket) -> subprocess.Popen[bytes]:
            return _start(settings, model_folder, link, counters, relay, index=index, life=life)

        return cls(
            [start(index, 0, link) for index, link in enumerate(links, start=1)],
            counters,
            lambda index, life: start(index, life, new_link(index)),
        )

    async def serving(self) -> None:
        """Wait until all serve. Raises FrontEndLost with one line that says why not."""
        while not self._counters.all_serving:
            if self.lost.done():
                raise self.lost.result()
            await asyncio.sleep(_POLL_SECONDS / 4)

    async def stop(self, patience: float | None = None) -> None:
        """Hang up and wait `patience` seconds (None: the usual); kill what has not ended.

        Also twice.
        """
        if self._watcher is not None:
            self._watcher.cancel()
        processes = [child.process for child in self._children]
        for process in processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        await asyncio.gather(*(asyncio.to_thread(_end, process, patience) for process in processes))

    async def _watch(self) -> None:
        """Until one is lost. Time is counted in our own turns: see `Silence`."""
        while not self.lost.done():
            for child in self._children:
                if (status := child.process.poll()) is not None:
                    self._lose(child, f"ended with status {status}")
                self._listen(child)
            for index in self._silence.tick(_PATIENCE_SECONDS):
                await self._replace(self._children[index - 1])
            for index in self._starting.tick(_START_SECONDS):
                self._lose(self._children[index - 1], f"has not started in {_START_SECONDS:g} s")
            await asyncio.sleep(BEAT_SECONDS)

    def _listen(self, child: _Child) -> None:
        """Note a heartbeat; the first one is that it serves."""
        if child.beats is None and not self._counters.serves(child.index):
            return
        if child.beats is None:
            self._starting.forget(child.index)
            self._silence.watch(child.index)
            if child.life:
                log.info("a front end serves again", extra={"front_end": child.index})
        if (beats := self._counters.beats(child.index)) != child.beats:
            child.beats = beats
            self._silence.heard(child.index)

    async def _replace(self, child: _Child) -> None:
        """End a process that hangs, and start another in its place."""
        log.error(
            "a front end hangs: it is killed and started anew",
            extra={"front_end": child.index, "pid": child.process.pid},
        )
        self._silence.forget(child.index)
        child.process.kill()
        await asyncio.to_thread(child.process.wait)
        assert child.process.stdin is not None
        assert self._again is not None
        with contextlib.suppress(OSError):
            child.process.stdin.close()
        self._counters.forget(child.index)
        child.life += 1
        child.beats = None
        try:
            child.process = self._again(child.index, child.life)
        except OSError as error:
            # The engine is gone, which others say; or there are no more descriptors or processes.
            self._lose(child, f"cannot be started anew: {error.strerror}")
            return
        self._starting.watch(child.index)

    def _lose(self, child: _Child, what: str) -> None:
        self._counters.forget(child.index)
        if not self.lost.done():
            self.lost.set_result(FrontEndLost(f"front end {child.index} {what}"))


def _start(
    settings: ServerSettings,
    model_folder: Path,
    link: socket.socket,
    counters: PodCounters,
    relay: RelayAddress,
    *,
    index: int,
    life: int,
) -> subprocess.Popen[bytes]:
    assert counters.descriptor is not None
    config = FrontEndConfig(
        index=index,
        count=counters.count,
        settings=settings.model_dump(mode="json"),
        model_folder=str(model_folder),
        address=relay.address,
        relay_address=relay.relay_address,
        relay_secret=relay.relay_secret,
        link=link.fileno(),
        counters=counters.descriptor,
        life=life,
    )
    with link:
        # From this thread: the child's death signal hangs on the thread that forks.
        process = subprocess.Popen(
            _COMMAND, pass_fds=[config.link, config.counters], stdin=subprocess.PIPE
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes], patience: float | None) -> None:
    try:
        process.wait(_LEAVE_SECONDS if patience is None else patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
