"""The engine processes of a pod: one, or this pod's ranks of a group.

A group ends as a whole. If one of this pod's ranks is lost, or reports that another is, the others
are stopped too; the server decides what follows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenpod.core.group_messages import Drain, Over
from tokenpod.core.messages import EngineOptions, Loading, Ready
from tokenpod.core.silence import (
    BEAT_SECONDS,
    LOADING_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    Silence,
)
from tokenpod.service.pod.client import EngineClient, EngineLost
from tokenpod.service.pod.engine_process import EngineProcess
from tokenpod.service.pod.engine_start import StartedEngine
from tokenpod.service.pod.processes import PodProcesses

#: Seconds in which a process that has closed one socket gives the reason on the other.
_REASON_SECONDS = 0.1
#: Seconds in which such a process is gone.
_END_SECONDS = 0.5
#: Seconds that an engine gets to end after we hang up: a rank of a group that serves takes leave of
#: the others; what is alone or loads has nothing to save, and may be in the middle of a long step.
_LEAVE_GROUP_SECONDS = 5.0
_LEAVE_SECONDS = 0.5
#: Seconds that ranks get to report to those of other pods why the group ends.
_REPORT_SECONDS = 0.7


class Ranks:
    """One life of a pod's engines. Make it with `start`."""

    def __init__(self, engines: Sequence[EngineProcess]) -> None:
        #: Done, with EngineLost as its result, once one of them is lost.
        self.lost: asyncio.Future[EngineLost] = asyncio.get_running_loop().create_future()
        self._engines = engines
        self._serving = False
        self._watchers = [asyncio.create_task(self._await_end(engine)) for engine in engines]
        if any(engine.control is not None for engine in engines):
            self._watchers.append(asyncio.create_task(self._listen()))

    @classmethod
    async def start(
        cls,
        started: Sequence[StartedEngine],
        options: Sequence[EngineOptions],
        on_loading: Callable[[Loading], None],
        *,
        on_waiting: Callable[[str], None],
        on_drain: Callable[[Drain], None],
        processes: PodProcesses | None = None,
    ) -> Ranks:
        """Give each process its options, in order."""
        engines = [
            await EngineProcess.start(
                engine,
                option,
                # Progress is shown once, that of the first.
                (lambda loading: None) if at else on_loading,
                on_waiting=on_waiting,
                on_drain=on_drain,
                processes=processes,
            )
            for at, (engine, option) in enumerate(zip(started, options, strict=True))
        ]
        return cls(engines)

    @property
    def first(self) -> EngineProcess:
        """The first of them, which on pod 0 leads."""
        return self._engines[0]

    @property
    def client(self) -> EngineClient:
        """The link to the first."""
        return self.first.client

    @property
    def leader_address(self) -> str:
        """Where the pod that generates is; "": it is this one."""
        return self.first.control.leader_address if self.first.control else ""

    async def ready(self) -> Ready:
        """Wait until all can generate. Raises EngineLost with one line that says why not."""
        try:
            answers = [await engine.ready() for engine in self._engines]
        except EngineLost:
            # The first loss may not be the cause: `lost` has the best known reason.
            raise await self.lost from None
        self._serving = True
        return answers[0]

    def give_up(self, why: str) -> None:
        """The group is over, though its ranks don't know; the text is for the operator."""
        self._lose(EngineLost(why))

    async def stop(self) -> None:
        """Hang up and wait; kill processes that have not ended. Also after a loss."""
        for watcher in self._watchers:
            watcher.cancel()
        if self.lost.done():
            # A lost engine may be stopped, or stuck in a collective.
            await asyncio.gather(*(engine.end(_REPORT_SECONDS) for engine in self._engines))
        group = self._serving and self.first.control is not None
        seconds = _LEAVE_GROUP_SECONDS if group else _LEAVE_SECONDS
        await asyncio.gather(*(engine.stop(seconds) for engine in self._engines))

    async def _await_end(self, engine: EngineProcess) -> None:
        """Until an engine is lost, by its own word or without any."""
        control, ended = engine.control, engine.client.lost
        words: set[asyncio.Future[Any]] = {ended, control.broken} if control else {ended}
        await asyncio.wait(words, return_when="FIRST_COMPLETED")
        if control is not None:
            await asyncio.wait({control.broken}, timeout=_REASON_SECONDS)
            if control.broken.done():
                broken = control.broken.result()
                killed = await self._killed() if broken.peer else None
                self._lose(killed or EngineLost(broken.message, fault=not broken.peer))
                return
        # A rank that never got as far as to have a line has said why on its link.
        lost = ended.result()
        if lost.silent:
            lost = EngineLost(await engine.how_it_ended(_END_SECONDS))
        self._lose(lost)

    async def _killed(self) -> EngineLost | None:
        """A rank of this pod that the kernel has killed: others only say that it is lost."""
        end = time.monotonic() + _REASON_SECONDS
        while time.monotonic() < end:
            for engine in self._engines:
                if engine.was_killed:
                    return EngineLost(await engine.how_it_ended(_END_SECONDS))
            # Its streams end some milliseconds before it does.
            await asyncio.sleep(0.01)
        return None

    async def _listen(self) -> None:
        """Until a rank is silent; an engine that is alone sends no beats."""
        silence, heard = Silence[int](), [0] * len(self._engines)
        for at, engine in enumerate(self._engines):
            if engine.control is not None:
                silence.watch(at)
        patience = LOADING_PATIENCE_SECONDS
        while not self.lost.done():
            if self._serving and patience != PATIENCE_SECONDS:
                patience = PATIENCE_SECONDS
                silence.forgive()
            await asyncio.sleep(BEAT_SECONDS)
            for at, engine in enumerate(self._engines):
                pulses = engine.control.pulses if engine.control else 0
                if pulses != heard[at]:
                    silence.heard(at)
                    heard[at] = pulses
            for at in silence.tick(patience):
                name = self._engines[at].name
                self._lose(EngineLost(f"{name} has not been heard for {patience:g} s"))

    def _lose(self, error: EngineLost) -> None:
        if self.lost.done():
            return
        self.lost.set_result(error)
        for engine in self._engines:
            if engine.control is not None:
                engine.control.send(Over(str(error)))
            engine.client.give_up(str(error))
