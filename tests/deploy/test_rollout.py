"""The rendered release runs: pods start, are probed, serve clients, and are replaced one by one."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from deploy.certificates import Authority
from deploy.emulator import Namespace
from deploy.helm import Helm, Object
from deploy.rollout import SERVICE, assert_nothing_was_lost, traffic, values

GUARDED = {
    "tls": {"existingSecret": "server", "mtls": {"enabled": True}},
    "auth": {"existingSecret": "tokens"},
    "helmTest": {"tlsSecret": "client"},
}


def replaced(rolling: Object) -> Object:
    """Two pods that are replaced in this way."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": rolling}
    return {"replicaCount": 2, "parallelism": {"pod": {"strategy": strategy}}}


@pytest.mark.slow
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


@pytest.mark.slow
async def test_without_a_drain_requests_would_fail_and_the_test_would_see_it(
    helm: Helm, tmp_path: Path, claims: Path
) -> None:
    none = {"preStopSeconds": 0, "lameDuckSeconds": 0, "timeoutSeconds": 0}
    rolling = replaced({"maxSurge": 0, "maxUnavailable": 1})
    rendered = helm.install(values(**rolling, drain=none))
    async with Namespace.running(rendered, tmp_path, claims) as here:
        await here.until_ready()
        async with traffic(here, [900] * 5) as seen:
            await here.roll()
        assert seen.failed
