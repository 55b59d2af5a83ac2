"""The further front ends of a pod: child processes of the first one, on the same port.

One Python process streams some 12,000 messages a second, about as many tokens as one GPU makes;
beyond, tokens share messages and readers get them later. Further processes share the port (the
kernel gives each new connection to one of them) and serve what streams tokens; other calls they
pass on to the first (`relay.py`), which is the one that decides for the pod.

    first        health, a router's batches, drain, the engine's life      + Generate, Tokens
    further      the relay                                                 + Generate, Tokens

A further front end ends when the first one closes its standard input, or dies. If one ends by
itself, its streams are lost and the engine drops their sequences; the pod drains, and ends to be
restarted.

One that hangs would go on getting new connections, because a stopped process still listens on the
port. So each sends four heartbeats per second while its event loop turns. After five seconds
without one it is killed and replaced, with a new link to the engine.
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
from typing import Any

import msgspec

from tokenpod.core.silence import BEAT_SECONDS, Silence
from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.pod.processes import FRONT_END, PodProcesses

log = logging.getLogger("tokenpod")

#: -P: nothing is imported from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "tokenpod.service.front_end")
_POLL_SECONDS = 0.1
#: Seconds without a heartbeat after which a front end counts as hung: while it serves, and while
#: one that replaces another starts.
_PATIENCE_SECONDS = 5.0
_START_SECONDS = 60.0
#: Seconds that a front end gets to end its calls and send its telemetry.
_LEAVE_SECONDS = 6.0


class FrontEndLost(Exception):
    """A front end ended unasked; the text is for the operator."""


class FrontEndConfig(msgspec.Struct, frozen=True):
    """The configuration of a new front end, written to its standard input as a line of JSON."""

    count: int
    settings: dict[str, Any]
    model_folder: str
    #: Where clients reach the pod, with the port that was bound.
    address: str
    #: How the first front end is reached by the others.
    relay_address: str
    relay_secret: str
    #: Descriptor of the pod's counters.
    counters: int
    #: The process's own: its number, descriptor of its link to the engine, how many processes have
    #: had this number before, and the descriptors on which it answers scrapes (-1: there are none),
    #: and questions about itself.
    index: int = 0
    link: int = -1
    life: int = 0
    scrapes: int = -1
    questions: int = -1


@dataclass(slots=True)
class _Child:
    """The process that is front end `index` now."""

    index: int
    process: subprocess.Popen[bytes]
    life: int = 0
    #: The last count of its heartbeats; None: it does not serve yet.
    beats: int | None = None


class FrontEnds:
    """The further front ends: started at once, one per link; await `serving`.

    Args:
        counters: where they show what they do.
        config: what they have in common; None: there are none.
        links: to the engine.
        new_link: makes one in the place of that of front end `index`; raises OSError.
        new_scrapes: makes the socket on which a front end answers scrapes, if there are any.
        processes: hears of each process, to look into it.
    """

    def __init__(
        self,
        counters: PodCounters,
        config: FrontEndConfig | None = None,
        links: Sequence[socket.socket] = (),
        new_link: Callable[[int], socket.socket] | None = None,
        new_scrapes: Callable[[], socket.socket | None] = lambda: None,
        processes: PodProcesses | None = None,
    ) -> None:
        #: Done, with FrontEndLost as its result, once one has ended unasked.
        self.lost: asyncio.Future[FrontEndLost] = asyncio.get_running_loop().create_future()
        self._counters = counters
        self._config = config
        self._new_link = new_link
        self._new_scrapes = new_scrapes
        self._processes = processes
        self._children = [
            _Child(index, self._start(index, 0, link)) for index, link in enumerate(links, 1)
        ]
        self._silence, self._starting = Silence[int](), Silence[int]()
        self._watcher = asyncio.create_task(self._watch()) if links else None

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
        assert self._new_link is not None
        with contextlib.suppress(OSError):
            child.process.stdin.close()
        self._counters.forget(child.index)
        child.life += 1
        child.beats = None
        try:
            link = self._new_link(child.index)
            child.process = self._start(child.index, child.life, link)
        except OSError as error:
            # The engine is gone, which others say; or there are no more descriptors or processes.
            self._lose(child, f"cannot be started anew: {error.strerror}")
            return
        self._starting.watch(child.index)

    def _start(self, index: int, life: int, link: socket.socket) -> subprocess.Popen[bytes]:
        assert self._config is not None
        scrapes = self._new_scrapes()
        asking, questions = socket.socketpair()
        config = msgspec.structs.replace(
            self._config,
            index=index,
            link=link.fileno(),
            life=life,
            scrapes=-1 if scrapes is None else scrapes.fileno(),
            questions=questions.fileno(),
        )
        inherited = [config.link, config.counters, config.questions]
        with link, questions, scrapes or contextlib.nullcontext():
            # From this thread: the child's death signal hangs on the thread that forks.
            process = subprocess.Popen(
                _COMMAND,
                pass_fds=inherited if scrapes is None else [*inherited, config.scrapes],
                stdin=subprocess.PIPE,
            )
        if self._processes is None:
            asking.close()
        else:
            self._processes.add(f"{FRONT_END}{index}", process.pid, asking)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
        return process

    def _lose(self, child: _Child, what: str) -> None:
        self._counters.forget(child.index)
        if not self.lost.done():
            self.lost.set_result(FrontEndLost(f"front end {child.index} {what}"))


def _end(process: subprocess.Popen[bytes], patience: float | None) -> None:
    try:
        process.wait(_LEAVE_SECONDS if patience is None else patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
