"""What a pod has for as long as it lives, however often its engines start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tokenpod.core.outputs import Load
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.listeners import Listener
from tokenpod.service.pod.client import NO_LOAD, EngineClient
from tokenpod.service.pod.processes import PodProcesses
from tokenpod.service.pod.startup import GroupStartup
from tokenpod.service.pod.stopping import Stopping
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.serving.backend import Backend
from tokenpod.service.telemetry.recorder import Telemetry


class Renewal:
    """Closes the connections of a replica that has lost a rank: clients may reach another one.

    Connections are closed once the replica has been NOT_SERVING for some time. Before that, clients
    would connect to it again.
    """

    def __init__(self) -> None:
        self._waiting: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    def begin(self, seconds: float, renew: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call `renew` in so many seconds, unless `end` comes first."""

        async def wait() -> None:
            await asyncio.sleep(seconds)
            self._renewing = asyncio.create_task(renew())

        self._waiting = asyncio.create_task(wait())

    async def end(self) -> None:
        """The replica is about to serve: wait for a renewal that has begun, or raise its error."""
        if self._waiting is not None:
            self._waiting.cancel()
        if self._renewing is not None:
            await self._renewing


@dataclass(slots=True)
class PodState:
    """State that lasts as long as the pod's process, however often its engines start."""

    counters: PodCounters
    admission: Admission
    board: HealthBoard
    backend: Backend
    listener: Listener
    stopping: Stopping
    startup: GroupStartup
    renewal: Renewal
    telemetry: Telemetry
    processes: PodProcesses
    #: The engine that serves now.
    client: EngineClient | None = None
    #: What a stop has cut off, by its name in the log; None: nobody has asked the pod to stop.
    stopped: dict[str, int] | None = None

    def load(self) -> Load:
        """Its load; without an engine, none."""
        return self.admission.whole(self.client.load if self.client else NO_LOAD)
