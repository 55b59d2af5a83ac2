"""The rendered release runs: pods start, are probed, serve clients, and are replaced one by one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness import free_port

from deploy.certificates import Authority
from deploy.emulator import Namespace
from deploy.helm import Helm, Object
from deploy.traffic import ClusterIp, Traffic

CLIENTS = 5
#: Seconds until a node hears that a pod has come or gone.
LAG = 0.5
SERVICE = "demo-tokenpod.models.svc"
GUARDED = {
    "tls": {"existingSecret": "server", "mtls": {"enabled": True}},
    "auth": {"existingSecret": "tokens"},
    "helmTest": {"tlsSecret": "client"},
}


@pytest.fixture(scope="session")
def claims(request: pytest.FixtureRequest) -> Path:
    """A folder for persistent volume claims, which outlive the session: kernels stay compiled."""
    return request.config.cache.mkdir("claims")


def values(**more: Any) -> Object:
    """The chart's values for a small machine, with probes and drain in seconds."""
    ports = {name: free_port() for name in ("grpc", "health", "rendezvous", "plans")}
    probe = {"periodSeconds": 1, "timeoutSeconds": 5}
    return {
        "ports": ports,
        "server": {"hostname": "$(POD_IP)", "threads": 1, "maxBatchTotalTokens": 8192},
        "cache": {"existingClaim": "kernels"},
        "probes": {"startup": probe, "readiness": probe, "liveness": probe},
        "drain": {"preStopSeconds": 1, "lameDuckSeconds": 1, "timeoutSeconds": 20},
        **more,
    }


def replaced(rolling: Object) -> Object:
    """Two pods that are replaced in this way."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": rolling}
    return {"replicaCount": 2, "parallelism": {"pod": {"strategy": strategy}}}


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for is not ours to signal)
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def traffic(here: Namespace, **client: Any) -> AsyncIterator[Traffic]:
    """Clients of the release's Service while the block runs, served before it and after it."""
    service = here.rendered.one("Service", "demo-tokenpod")
    async with ClusterIp(service, lambda: here.pods, LAG) as cluster_ip:
        here.names[f"{SERVICE}:50051"] = cluster_ip.address
        seen = Traffic(cluster_ip.address, SERVICE, **client)
        async with asyncio.TaskGroup() as clients:
            tasks = [
                clients.create_task(seen.generate(tokens=20 + 60 * (k % 3), every=0.1))
                for k in range(CLIENTS)
            ]
            await until(lambda: seen.finished >= 2 * CLIENTS)
            yield seen
            before = seen.finished
            await until(lambda: seen.finished >= before + 2 * CLIENTS)
            for task in tasks:
                task.cancel()


def assert_nothing_was_lost(here: Namespace, seen: Traffic) -> None:
    assert not seen.failed
    for pod in here.gone:
        assert (pod.exits, pod.killed, pod.orphans) == ([0], False, False), pod.name
    assert not any(pod.exits for pod in here.pods), "a container has restarted"


async def test_no_accepted_request_fails_while_guarded_pods_are_replaced(
    helm: Helm, tmp_path: Path, claims: Path
) -> None:
    authority = Authority(tmp_path / "secrets")
    authority.issue("server", f"DNS:{SERVICE}", "IP:127.0.0.1")
    client = authority.issue("client", "DNS:client")
    (tmp_path / "secrets" / "tokens").mkdir()
    (tmp_path / "secrets" / "tokens" / "tokens").write_text("first\nsecond\n")
    credentials = grpc.ssl_channel_credentials(
        *((client / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    )
    # No machine is spare: the old pod goes before the new one comes.
    rolling = replaced({"maxSurge": 0, "maxUnavailable": 1})
    rendered = helm.install(values(**rolling, **GUARDED))
    async with Namespace.running(rendered, tmp_path, claims) as here:
        await here.until_ready()
        metadata = (("authorization", "Bearer second"),)
        async with traffic(here, credentials=credentials, metadata=metadata) as seen:
            await here.roll()
            status, output = await here.test()
            assert status == 0, output
        assert len(here.gone) == 2
        assert_nothing_was_lost(here, seen)


@pytest.mark.slow
async def test_no_accepted_request_fails_while_pods_are_replaced_by_a_surge(
    helm: Helm, tmp_path: Path, claims: Path
) -> None:
    rendered = helm.install(values(**replaced({"maxSurge": 1, "maxUnavailable": 0})))
    async with Namespace.running(rendered, tmp_path, claims) as here:
        await here.until_ready()
        async with traffic(here) as seen:
            await here.roll()
        assert len(here.gone) == 2
        assert_nothing_was_lost(here, seen)
