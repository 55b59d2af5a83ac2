"""A pod as a node runs it: its process started, probed, restarted, and ended in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.helm import Object
from deploy.manifests import container_of, probes
from deploy.sandbox import TOKENPOD, Place, Sandbox
from support.pods import prefork
from support.pods.prefork import PreforkedProcess

_RESTART_SECONDS = 0.5
#: In which the kernel ends those that shall die with the first process, on a busy machine.
_LAST_SECONDS = 5.0


@dataclass(eq=False)
class Pod:
    """A pod from its creation to its end: `start` begins its life, `delete` ends it.

    Args:
        given_labels, given_variables: what its controller adds to the template's.
    """

    name: str
    address: str
    template: Object
    place: Place
    given_labels: dict[str, str] = field(default_factory=dict)
    given_variables: dict[str, str] = field(default_factory=dict)
    ready: bool = False
    deleted: bool = False
    #: Exit statuses of its container, one a run.
    exits: list[int] = field(default_factory=list)
    #: Whether SIGKILL was needed, and whether processes were left when the first one had ended.
    killed: bool = False
    orphans: bool = False
    _process: PreforkedProcess | None = None
    _life: asyncio.Task[None] | None = None

    @property
    def labels(self) -> dict[str, str]:
        """All its labels."""
        return {**self.template["metadata"]["labels"], **self.given_labels}

    @property
    def process_id(self) -> int:
        """Of its container's first process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Schedule it."""
        self._life = asyncio.create_task(self._live())

    async def until_ready(self, seconds: float = 90.0) -> None:
        """Raises AssertionError if it does not become so."""
        deadline = time.monotonic() + seconds
        while not self.ready:
            assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self._written()}"
            await asyncio.sleep(0.05)

    async def delete(self) -> None:
        """End it as kubelet does: preStop, SIGTERM, and SIGKILL when the grace is over."""
        assert self._process is not None
        assert self._life is not None
        end = time.monotonic() + self.template["spec"]["terminationGracePeriodSeconds"]
        self.deleted = True
        hook = container_of(self.template).get("lifecycle", {}).get("preStop", {})
        await asyncio.sleep(hook.get("sleep", {}).get("seconds", 0))
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        ended, _ = await asyncio.wait({self._life}, timeout=end - time.monotonic())
        if not ended:
            await self.remove()

    async def remove(self) -> None:
        """End it at once."""
        self.deleted = True
        self.kill()
        if self._life is not None:
            await self._life

    async def _live(self) -> None:
        """Run the container, and again whenever it ends before the pod is deleted."""
        while not self.deleted:
            self._process = self._spawn()
            probing = asyncio.create_task(self._probe())
            self.exits.append(await asyncio.to_thread(self._process.wait))
            probing.cancel()
            self.ready = False
            self.orphans |= not self.killed and await _stays_alive(self._process.pid)
            # A container ends with its first process, and so does whatever that left behind.
            _kill(self._process.pid)
            if not self.deleted:
                await asyncio.sleep(_RESTART_SECONDS)

    def _spawn(self) -> PreforkedProcess:
        spec = self.template["spec"]
        sandbox = Sandbox(self.place, self.name, self.address, self.labels, spec)
        added = [{"name": n, "value": value} for n, value in self.given_variables.items()]
        server = container_of(self.template)
        command, env, folder = sandbox.invocation({**server, "env": [*added, *server["env"]]})
        assert command[: len(TOKENPOD)] == TOKENPOD
        with sandbox.log.open("a") as output:
            out = output.fileno()
            arguments = command[len(TOKENPOD) :]
            return prefork.start(
                arguments, stdout=out, stderr=out, cwd=str(folder), env=env, session=True
            )

    def kill(self) -> None:
        """SIGKILL for its container, as when memory runs out; it is started again."""
        if self._process is not None and self._process.returncode is None:
            self.killed = True
            _kill(self._process.pid)

    def _written(self) -> str:
        log = self.place.scratch / self.name / "log"
        return log.read_text()[-4000:] if log.exists() else ""

    # -- Probes ----------------------------------------------------------------------------------

    async def _probe(self) -> None:
        """Startup first; then readiness and liveness, each at its own pace."""
        asked = probes(self.template)
        if not await self._until(True, asked["startup"]):
            return self.kill()
        await asyncio.gather(self._watch_readiness(asked["readiness"]), self._watch_life(asked))
        return None

    async def _watch_readiness(self, probe: Object) -> None:
        while True:
            self.ready = await self._until(not self.ready, probe) != self.ready

    async def _watch_life(self, asked: dict[str, Object]) -> None:
        await self._until(False, asked["liveness"])
        # A pod that is to end is not asked any more.
        if not self.deleted:
            self.kill()

    async def _until(self, wanted: bool, probe: Object) -> bool:
        """Probe until it has `wanted` success or failure; False: it failed when it should not."""
        failures = 0
        while True:
            if await self._asks(probe):
                failures = 0
                if wanted:
                    return True
            else:
                failures += 1
                if failures >= probe["failureThreshold"]:
                    return not wanted
            await asyncio.sleep(probe["periodSeconds"])

    async def _asks(self, probe: Object) -> bool:
        """One probe: a new connection, plaintext, one unary call."""
        target = f"{self.address}:{probe['grpc']['port']}"
        request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
        async with grpc.aio.insecure_channel(target) as channel:
            try:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(request, timeout=probe["timeoutSeconds"])
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _stays_alive(group: int) -> bool:
    """Whether any process of this group is left, once those have ended that go with the first."""
    late = time.monotonic() + _LAST_SECONDS
    while time.monotonic() < late:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        await asyncio.sleep(0.02)
    return True


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
