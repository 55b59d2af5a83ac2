"""`grpc.health.v1` for every service, and for the three kubelet probes.

    ""  readiness  TextGenerationService...   can a request be served now?
    startup                                   is the model loaded?
    liveness                                  would a restart help?

A probe must tell "busy" from "stuck". Readiness goes when work is pending and no step has settled
for max(5 s, 20 times the usual step), and comes back with the next step; meanwhile new calls are
refused. Liveness goes only after max(--stall-timeout, 200 times the usual step) in which the engine
said nothing: a full queue, a drain, or rows that a router keeps never restart a good pod. The pod
then ends by itself, or forms its group again.

Work that clients have given up is no sign of life: until the engine has been heard of again, it
counts as pending.

A pod that follows is `startup` and `readiness` as soon as it listens: nobody sends it requests, and
a rolling update that waited for it to serve would wait for the pods that it has yet to replace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_POLL_SECONDS = 0.25


class Progress(Protocol):
    """What the board watches: the engine's pulse."""

    @property
    def pending(self) -> bool:
        """Whether work is waiting for a step."""
        ...

    @property
    def last_step_at(self) -> int:
        """CLOCK_MONOTONIC nanoseconds of the last step, or of the work that began a wait."""
        ...

    @property
    def heard_at(self) -> int:
        """When the engine was last heard of, by the same clock: it may have nobody to step."""
        ...

    @property
    def usual_step(self) -> float:
        """Seconds that a step usually takes."""
        ...

    def ask(self) -> None:
        """Have the engine say that it is there."""
        ...


class HealthBoard:
    """What probes and load balancers are told.

    Args:
        follows: this pod has no part in serving but to follow the leader.
        stall_timeout: seconds without a sign of the engine after which it never moves again.
        on_stall: hears whether work waits in vain for a step.
    """

    service_name = "grpc.health.v1.Health"

    def __init__(
        self,
        *,
        follows: bool = False,
        stall_timeout: float = 40.0,
        on_stall: Callable[[bool], None] = lambda stalled: None,
    ) -> None:
        self._servicer = health.aio.HealthServicer()
        self._follows = follows
        self._stall_timeout = stall_timeout
        self._on_stall = on_stall
        self._ready_names = {""} if follows else {"", "readiness"}
        self._added = False
        self._unready_at = 0.0
        self._serving = False
        self._draining = False
        self._moving = True
        self._watcher: asyncio.Task[None] | None = None
        self._stuck: asyncio.Future[None] | None = None

    async def add_to(self, server: grpc.aio.Server, services: Sequence[str]) -> None:
        """Answer on `server`, also for `services` by name."""
        self._ready_names |= set(services)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        if not self._added:
            self._added = True
            await self._servicer.set("liveness", _SERVING)
            await self._servicer.set("startup", _SERVING if self._follows else _NOT_SERVING)
        await self._tell()

    def is_serving(self) -> bool:
        """Whether the engine moves; draining does not count."""
        return self._serving and self._moving

    async def set_serving(self, serving: bool) -> None:
        """The model can generate; or it cannot any more."""
        if self._serving and not serving:
            self._unready_at = time.monotonic()
        self._serving = serving
        if serving:
            await self._servicer.set("startup", _SERVING)
        await self._tell()

    @property
    def unready_seconds(self) -> float:
        """How long ago `set_serving` said that the model can't generate any more."""
        return time.monotonic() - self._unready_at

    async def drain(self) -> None:
        """No new work, please. `liveness` stays."""
        self._draining = True
        await self._tell()

    @property
    def stuck(self) -> asyncio.Future[None]:
        """Done once the engine that is watched has stood still for so long that it never moves."""
        if self._stuck is None:
            self._stuck = asyncio.get_running_loop().create_future()
        return self._stuck

    def watch(self, progress: Progress) -> None:
        """Take the engine's pulse from now on, and no other one's."""
        self.close()
        self._stuck = None
        self._move(True)
        self._watcher = asyncio.create_task(self._watch(progress))

    async def unwatch(self) -> None:
        """The engine is gone, and known to be; there may be another."""
        self.close()
        self._move(True)
        await self._servicer.set("liveness", _SERVING)

    def close(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self, progress: Progress) -> None:
        alive, idle_at, owed_at = True, 0, 0
        await self._servicer.set("liveness", _SERVING)
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            now = time.monotonic_ns()
            if progress.pending:
                owed_at = now
            elif progress.heard_at > owed_at:
                idle_at = now
            else:
                progress.ask()
            stuck = (now - max(progress.last_step_at, idle_at)) / 1e9
            silent = (now - max(progress.heard_at, idle_at)) / 1e9
            moving = stuck < max(5.0, 20 * progress.usual_step)
            if moving != self._moving:
                self._move(moving)
                await self._tell()
            lives = silent < max(self._stall_timeout, 200 * progress.usual_step)
            if lives != alive:
                alive = lives
                if not alive and not self.stuck.done():
                    self.stuck.set_result(None)
                await self._servicer.set("liveness", _SERVING if alive else _NOT_SERVING)

    def _move(self, moving: bool) -> None:
        self._moving = moving
        self._on_stall(not moving)

    async def _tell(self) -> None:
        ready = self._serving and self._moving and not self._draining
        for name in self._ready_names:
            await self._servicer.set(name, _SERVING if ready else _NOT_SERVING)
        if self._follows:
            there = not self._draining
            await self._servicer.set("readiness", _SERVING if there else _NOT_SERVING)


async def serve_health(address: str, board: HealthBoard) -> tuple[grpc.aio.Server, int]:
    """A second server with health alone: plaintext and open, for kubelet's gRPC probes.

    Raises RuntimeError if the address is taken.
    """
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    await board.add_to(server, ())
    port = server.add_insecure_port(address)
    await server.start()
    return server, port
