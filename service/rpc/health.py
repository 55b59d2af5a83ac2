"""`grpc.health.v1` for every service, and for the three kubelet probes.

    ""  readiness  TextGenerationService...   can a request be served now?
    startup                                   is the model loaded?
    liveness                                  would a restart help?

A probe must tell "busy" from "stuck". Readiness goes when work is pending and no step has settled
for max(5 s, 20 times the usual step), and comes back with the next step; meanwhile new calls are
refused. Liveness goes only after max(--stall-timeout, 200 times the usual step) in which the engine
said nothing: a full queue, a drain, or rows that a router keeps never restart a good pod. The pod
then ends by itself, or forms its group again. Time in which this process itself did not run does
not count, because what the engine said meanwhile has not been read.

Cancelled work still counts as pending until the engine sends another message: a cancel does not
show that the engine is alive.

On a pod that follows, `startup` is SERVING as soon as it listens, because its group may wait for
pods that are not there yet; `readiness` is SERVING when the group serves, so that a rollout, which
replaces pods one by one, waits for the whole group.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.rpc.intake import Intake
from tokenpod.service.rpc.interceptors import ErrorInterceptor
from tokenpod.service.rpc.listen import CONNECTION_TIMES, bind
from tokenpod.service.rpc.methods import SMALL, Access, MethodTable, method_of
from tokenpod.service.rpc.open_streams import OpenStreams
from tokenpod.service.rpc.reflection import METHODS as REFLECTION
from tokenpod.service.rpc.reflection import enable_reflection

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

#: A pod's health is the first front end's to tell.
METHODS = tuple(
    method_of(
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        name,
        SMALL,
        access=Access.HEALTH,
        on_followers=True,
        traced=False,
    )
    for name in ("Check", "Watch", "List")
)

_POLL_SECONDS = 0.25

#: Of the health port's server, whose clients send a name and wait a moment.
_HEALTH_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_concurrent_streams", 100),
    *CONNECTION_TIMES,
    ("grpc.max_connection_idle_ms", 120_000),
)


class _Statuses:
    """The status of every name; whoever watches is woken when one changes."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {"": _NOT_SERVING}
        #: Set when any status changes; there is another one then.
        self.change = asyncio.Event()

    def of(self, name: str, default: Any = None) -> Any:
        """The status of a name; `default` if there is none."""
        return self.by_name.get(name, default)

    def set(self, name: str, status: Any) -> None:
        if self.by_name.get(name) != status:
            self.by_name[name] = status
            self.change.set()
            self.change = asyncio.Event()


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers on one server.

    grpcio's own keeps a lock of the name while it writes to a watcher: one that does not read
    would keep its status from changing.

    Args:
        statuses: what it tells.
        most_watchers: `Watch` streams at once.
    """

    def __init__(self, statuses: _Statuses, most_watchers: int) -> None:
        self._statuses = statuses
        self._watchers = OpenStreams("Watch", most_watchers)

    async def Check(  # noqa: N802 - protobuf's name
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """The status of a name; NOT_FOUND if there is none."""
        status = self._statuses.of(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def List(  # noqa: N802 - protobuf's name
        self, request: health_pb2.HealthListRequest, context: Any
    ) -> health_pb2.HealthListResponse:
        """Every name with its status."""
        statuses = {
            name: health_pb2.HealthCheckResponse(status=status)
            for name, status in self._statuses.by_name.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802 - protobuf's name
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> None:
        """The status of a name, and each that it changes to."""
        with self._watchers.place(context.peer()):
            told = None
            while True:
                change = self._statuses.change
                status = self._statuses.of(request.service, _SERVICE_UNKNOWN)
                if status != told:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                await change.wait()


class HealthBoard:
    """The health statuses that probes and load balancers read.

    Args:
        follows: this pod has no part in serving but to follow the leader.
        stall_timeout: seconds without a sign of the engine after which it never moves again.
        counters: say whether other front ends wait for the engine, and hear whether all wait in
            vain; None: this process is alone.
        most_watchers: `Watch` streams of each server at once.
    """

    def __init__(
        self,
        *,
        follows: bool = False,
        stall_timeout: float = 40.0,
        counters: PodCounters | None = None,
        most_watchers: int = 1000,
    ) -> None:
        self._statuses = _Statuses()
        self._most_watchers = most_watchers
        self._follows = follows
        self._stall_timeout = stall_timeout
        self._counters = counters or PodCounters.create(1)
        self._ready_names = {"", "readiness"}
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
        # One for each server: what watches on one takes no place of another's probes.
        servicer = HealthServicer(self._statuses, self._most_watchers)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        if not self._added:
            self._added = True
            self._statuses.set("liveness", _SERVING)
            self._statuses.set("startup", _SERVING if self._follows else _NOT_SERVING)
        self._tell()

    def is_serving(self) -> bool:
        """Whether the engine moves; draining does not count."""
        return self._serving and self._moving

    async def set_serving(self, serving: bool) -> None:
        """The model can generate; or it cannot any more."""
        if self._serving and not serving:
            self._unready_at = time.monotonic()
        self._serving = serving
        if serving:
            self._statuses.set("startup", _SERVING)
        self._tell()

    @property
    def unready_seconds(self) -> float:
        """How long ago `set_serving` said that the model can't generate any more."""
        return time.monotonic() - self._unready_at

    async def drain(self) -> None:
        """No new work, please. `liveness` stays."""
        self._draining = True
        self._tell()

    @property
    def stuck(self) -> asyncio.Future[None]:
        """Done once the engine that is watched has stood still for so long that it never moves."""
        if self._stuck is None:
            self._stuck = asyncio.get_running_loop().create_future()
        return self._stuck

    def watch(self, engine: EngineClient) -> None:
        """Watch this engine's progress from now on, and no other one's."""
        self.close()
        self._stuck = None
        self._move(True)
        self._watcher = asyncio.create_task(self._watch(engine))

    async def unwatch(self) -> None:
        """The engine is gone, and known to be; there may be another."""
        self.close()
        self._move(True)
        self._statuses.set("liveness", _SERVING)

    def close(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self, engine: EngineClient) -> None:
        alive, idle_at, owed_at = True, 0, 0
        listening = Listening(_POLL_SECONDS, time.monotonic_ns())
        self._statuses.set("liveness", _SERVING)
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            now = time.monotonic_ns()
            listening.tick(now)
            if engine.pending or self._counters.pending:
                owed_at = now
            elif engine.heard_at > owed_at:
                idle_at = now
            else:
                engine.ask()
            stuck = listening.seconds(since=max(engine.last_step_at, idle_at))
            silent = listening.seconds(since=max(engine.heard_at, idle_at))
            listening.forget(before=max(engine.last_step_at, idle_at))
            moving = stuck < max(5.0, 20 * engine.usual_step)
            if moving != self._moving:
                self._move(moving)
                self._tell()
            lives = silent < max(self._stall_timeout, 200 * engine.usual_step)
            if lives != alive:
                alive = lives
                if not alive and not self.stuck.done():
                    self.stuck.set_result(None)
                self._statuses.set("liveness", _SERVING if alive else _NOT_SERVING)

    def _move(self, moving: bool) -> None:
        self._moving = moving
        self._counters.set_stalled(not moving)

    def _tell(self) -> None:
        ready = self._serving and self._moving and not self._draining
        for name in self._ready_names:
            self._statuses.set(name, _SERVING if ready else _NOT_SERVING)


class Listening:
    """How long a listener that ticks has really listened, without the time in which it did not run.

    Args:
        period: seconds between two ticks. Of a longer time between two the rest was lost: the
            listener did not run.
        now: nanoseconds of the clock at the first tick.
    """

    def __init__(self, period: float, now: int) -> None:
        # A tick is a little late even on a free machine.
        self._most = int(2 * period * 1e9)
        self._ticked_at = now
        #: When time was lost, oldest first: begin and end in nanoseconds.
        self._lost: deque[tuple[int, int]] = deque()

    def tick(self, now: int) -> None:
        """The listener runs, `now` in nanoseconds."""
        if now - self._ticked_at > self._most:
            self._lost.append((self._ticked_at + self._most, now))
        self._ticked_at = now

    def seconds(self, since: int) -> float:
        """For how long it has listened from `since` to the last tick, in seconds."""
        lost = sum(end - max(begin, since) for begin, end in self._lost if end > since)
        return max(self._ticked_at - since - lost, 0) / 1e9

    def forget(self, before: int) -> None:
        """Nobody will ask about times before this one, in nanoseconds."""
        while self._lost and self._lost[0][1] <= before:
            self._lost.popleft()


async def serve_health(address: str, board: HealthBoard) -> tuple[grpc.aio.Server, int]:
    """A second server with health alone: plaintext and open, for kubelet's gRPC probes.

    It has no authentication, so it takes small messages only. It has no limit on connections:
    probes must get through.

    Raises StartError if the address is taken.
    """
    table = MethodTable([*METHODS, *REFLECTION])
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor(), Intake(table.limits())], options=_HEALTH_OPTIONS
    )
    await board.add_to(server, ())
    enable_reflection(table, server, files=[health_pb2.DESCRIPTOR])
    port = bind(server, address, None)
    await server.start()
    return server, port
