"""A rollout under traffic: values for a small machine, clients that go on, and what must hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from deploy.emulator import Namespace
from deploy.helm import Object
from deploy.traffic import ClusterIp, Traffic
from support.pods.harness import free_port

#: Tokens of each client's requests. Long ones take seconds: only a drain brings them to their end.
LENGTHS = (20, 100, 900)
#: Seconds until a node hears that a pod has come or gone.
LAG = 0.5
SERVICE = "demo-tokenpod.models.svc"


def values(**more: Any) -> Object:
    """The chart's values for a small machine, with probes and drain in seconds."""
    ports = {name: free_port() for name in ("grpc", "health", "rendezvous", "plans")}
    probe = {"periodSeconds": 1, "timeoutSeconds": 5}
    return {
        "ports": ports,
        "server": {"hostname": "$(POD_IP)", "threads": 1, "maxBatchTotalTokens": 8192},
        "cache": {"existingClaim": "kernels"},
        "probes": {"startup": probe, "readiness": probe, "liveness": probe},
        "drain": {"preStopSeconds": 1, "lameDuckSeconds": 1, "timeoutSeconds": 120},
        **more,
    }


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for is not ours to signal)
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def traffic(
    here: Namespace, lengths: Sequence[int] = LENGTHS, **client: Any
) -> AsyncIterator[Traffic]:
    """Clients of the release's Service while the block runs, served before it and after it."""
    service = here.rendered.one("Service", "demo-tokenpod")
    async with ClusterIp(service, lambda: here.pods, LAG) as cluster_ip:
        here.names[f"{SERVICE}:50051"] = cluster_ip.address
        seen = Traffic(cluster_ip.address, SERVICE, **client)
        async with asyncio.TaskGroup() as clients:
            tasks = [
                clients.create_task(seen.generate(tokens=tokens, every=0.1)) for tokens in lengths
            ]
            await until(lambda: seen.finished >= len(lengths))
            yield seen
            before = seen.finished
            await until(lambda: seen.finished >= before + len(lengths))
            for task in tasks:
                task.cancel()


def assert_nothing_was_lost(here: Namespace, seen: Traffic) -> None:
    assert not seen.failed, seen.failed
    for pod in here.gone:
        assert (pod.exits, pod.killed, pod.orphans) == ([0], False, False), pod.name
    assert not any(pod.exits for pod in here.pods), "a container has restarted"
