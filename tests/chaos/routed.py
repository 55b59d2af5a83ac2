"""A TGI router among the bystanders, in a process of its own: grpc.aio wants one loop a process."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path

from chaos.waiting import wait_for
from router.client import ShardError
from router.double import Router
from router.faults import BrokenPromise, RequestLost, RouterPanic, StartupError
from router.startup import RouterSettings
from router.streams import GenerationError, Prompt, RouterStopped

SETTINGS = RouterSettings(max_input_tokens=100, max_total_tokens=200, max_batch_prefill_tokens=512)
PROMPT = Prompt(
    text="def fibonacci(n):\n", input_length=20, max_new_tokens=24, ignore_eos_token=True
)
#: Requests that the router has under way.
_AT_ONCE = 2
_SERVED, _CUT, _WRONG, _IDLE = range(4)
#: What a router may meet when what it runs is taken away from under it. It is started anew then, as
#: kubelet would do.
_LOSSES = (GenerationError, ShardError, StartupError, RouterPanic, BrokenPromise, RequestLost)


@dataclass(frozen=True)
class RoutedSeen:
    """Texts since the last look: as before the first attack, cut off, and others."""

    served: int
    cut: int
    wrong: int


class RoutedBystander:
    """Drives the pod through its unix socket, all the time.

    Args:
        path: of the socket, the same after a restart.
    """

    def __init__(self, path: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._counts = spawn.Array("q", 4)
        self._before = [0, 0, 0]
        self._over, self._paused = spawn.Event(), spawn.Event()
        given = (path, self._counts, self._over, self._paused)
        self._process = spawn.Process(target=_drive, args=given, daemon=True)
        self._process.start()

    def served(self) -> int:
        """Texts since the last look."""
        return self._counts[_SERVED] - self._before[_SERVED]

    def look(self) -> RoutedSeen:
        """What has happened since the last look."""
        now = self._counts[:3]
        seen = RoutedSeen(*(new - old for new, old in zip(now, self._before, strict=True)))
        self._before = now
        return seen

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stop the router, and start another one afterwards."""
        self._paused.set()
        wait_for(lambda: bool(self._counts[_IDLE]), "the router does not stop")
        try:
            yield
        finally:
            self._paused.clear()

    def close(self) -> None:
        """End it."""
        self._over.set()
        self._process.join(60)
        self._process.kill()


def _drive(path: Path, counts: SynchronizedArray[int], over: Event, paused: Event) -> None:
    asyncio.run(_Driving(path, counts, over, paused).run())


class _Driving:
    """What runs in the process."""

    def __init__(
        self, path: Path, counts: SynchronizedArray[int], over: Event, paused: Event
    ) -> None:
        self._path = path
        self._counts = counts
        self._over = over
        self._paused = paused
        self._expected: str | None = None

    async def run(self) -> None:
        """One router after the other."""
        while not self._over.is_set():
            self._counts[_IDLE] = self._paused.is_set()
            if self._paused.is_set() or not self._path.exists():
                await asyncio.sleep(0.05)
                continue
            try:
                await self._life()
            except _LOSSES:
                self._counts[_CUT] += 1
                await asyncio.sleep(0.2)

    async def _life(self) -> None:
        router = await Router.start(str(self._path), settings=SETTINGS)
        try:
            await asyncio.gather(*(self._user(router) for _ in range(_AT_ONCE)))
        finally:
            await router.stop()

    async def _user(self, router: Router) -> None:
        while not (self._over.is_set() or self._paused.is_set()):
            try:
                text = (await router.submit(PROMPT).result()).text
            except RouterStopped:
                # The other user has met a loss.
                return
            self._expected = self._expected or text
            self._counts[_SERVED] += 1
            self._counts[_WRONG] += text != self._expected
