"""The gateway of the chart: what it may do, whom it finds, and who finds it.

SMG_VENV names a virtual environment with the package smg, which is no dependency of this project.
With it the unmodified gateway runs by the chart's own arguments, before pods that run by theirs. It
runs as its container would, which takes root, and an environment outside of /tmp that all users may
read: as the chart's user, without capabilities, on a read-only root, with what a kubelet gives pods
for the API server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc
import pytest
import yaml

from deploy.certificates import Authority
from deploy.helm import CHART, NAMESPACE, Helm, Object
from deploy.manifests import container_of, pod_of, settings_of
from support.clients.public_api import generate, text_request
from support.pods.harness import free_port
from support.waiting import wait_for
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

VENV = os.environ.get("SMG_VENV")
NAME = "demo-tokenpod-gateway"
ON = {"gateway": {"enabled": True}}
GROUPS = {"parallelism": {"mode": "statefulset", "tensor": 4, "pods": 2}}


def gateway_of(rendered: Any) -> Object:
    """The gateway's container."""
    (found,) = pod_of(rendered.one("Deployment", NAME))["spec"]["containers"]
    return found


def selected(args: list[str]) -> dict[str, str]:
    """The labels that the gateway looks for."""
    return dict(each.split("=", 1) for each in args[args.index("--selector") + 1 :])


def test_there_is_no_gateway_unless_asked_for(helm: Helm) -> None:
    rendered = helm.install()
    assert len(rendered.all("Deployment")) == len(rendered.all("Service")) == 1
    assert not rendered.all("Role")
    assert not settings_of(pod_of(rendered.one("Deployment"))).kv_cache_events


@pytest.mark.parametrize("values", [{}, GROUPS, {"fullnameOverride": "x"}], ids=str)
def test_it_finds_those_pods_that_clients_may_call_and_their_port(
    helm: Helm, values: Object
) -> None:
    rendered = helm.install({**ON, **values, "ports": {"grpc": 50999}})
    name = "x" if "fullnameOverride" in values else "demo-tokenpod"
    (found,) = pod_of(rendered.one("Deployment", f"{name}-gateway"))["spec"]["containers"]
    assert selected(found["args"]) == rendered.one("Service", name)["spec"]["selector"]
    assert "--service-discovery-port=50999" in found["args"]
    assert f"--service-discovery-namespace={NAMESPACE}" in found["args"]
    assert (found["image"], found["command"]) == (
        "docker.io/lightseekorg/smg:1.13.0",
        ["smg", "launch"],
    )


def test_pods_tell_what_they_have_cached_unless_an_operator_says_otherwise(helm: Helm) -> None:
    told = settings_of(pod_of(helm.install(ON).one("Deployment", "demo-tokenpod")))
    assert told.kv_cache_events
    silent = {"server": {"kvCacheEvents": False}}
    rendered = helm.install({"gateway": {"enabled": True, "policy": "round_robin"}, **silent})
    assert not settings_of(pod_of(rendered.one("Deployment", "demo-tokenpod"))).kv_cache_events


def test_it_may_list_and_watch_pods_of_its_namespace_and_nothing_else(helm: Helm) -> None:
    rendered = helm.install(ON)
    assert rendered.one("Role")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    ]
    assert not [each for each in rendered.objects if each["kind"].startswith("Cluster")]
    binding = rendered.one("RoleBinding")
    assert binding["roleRef"]["name"] == rendered.one("Role")["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (NAME, NAMESPACE)
    spec = pod_of(rendered.one("Deployment", NAME))["spec"]
    assert spec["serviceAccountName"] == NAME
    assert rendered.one("ServiceAccount", NAME).get("automountServiceAccountToken", True)
    server = pod_of(rendered.one("Deployment", "demo-tokenpod"))["spec"]
    assert server["serviceAccountName"] == "demo-tokenpod", "pods still have no such rights"


def test_it_meets_the_restricted_standard_as_the_pods_do(helm: Helm) -> None:
    rendered = helm.install(ON)
    spec = pod_of(rendered.one("Deployment", NAME))["spec"]
    server = pod_of(rendered.one("Deployment", "demo-tokenpod"))["spec"]
    assert spec["securityContext"] == server["securityContext"]
    assert gateway_of(rendered)["securityContext"] == server["containers"][0]["securityContext"]


def test_those_who_chat_may_not_replace_the_pods_by_others(helm: Helm) -> None:
    """Its control plane, on the port of its clients, wants a key that each pod has of its own."""
    container = gateway_of(helm.install(ON))
    (key,) = (arg for arg in container["args"] if arg.startswith("--control-plane-api-keys="))
    assert key.endswith(":admin:$(POD_UID)")
    (uid,) = (each for each in container["env"] if each["name"] == "POD_UID")
    assert uid["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.uid"}}


def test_its_clients_show_a_key_and_come_over_tls(helm: Helm) -> None:
    plain = gateway_of(helm.install(ON))
    assert not any(arg.startswith(("--tenant", "--tls")) for arg in plain["args"])
    gateway = {"auth": {"existingSecret": "keys"}, "tls": {"existingSecret": "certificate"}}
    rendered = helm.install({"gateway": {"enabled": True, **gateway}})
    container = gateway_of(rendered)
    assert "--tenant-api-key=clients:$(CLIENT_KEY)" in container["args"]
    (key,) = (each for each in container["env"] if each["name"] == "CLIENT_KEY")
    assert key["valueFrom"] == {"secretKeyRef": {"name": "keys", "key": "key"}}
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "gateway-tls")
    for name in ("crt", "key"):
        path = f"{mount['mountPath']}/tls.{name}"
        assert any(a.startswith("--tls-") and a.endswith(f"={path}") for a in container["args"])
    volumes = pod_of(rendered.one("Deployment", NAME))["spec"]["volumes"]
    assert {"name": "gateway-tls", "secret": {"secretName": "certificate"}} in volumes


def test_its_service_leads_to_it_alone(helm: Helm) -> None:
    rendered = helm.install(ON)
    service = rendered.one("Service", NAME)["spec"]
    labels = pod_of(rendered.one("Deployment", NAME))["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    server = pod_of(rendered.one("Deployment", "demo-tokenpod"))["metadata"]["labels"]
    assert not service["selector"].items() <= server.items()
    assert service["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]


def test_policies_let_it_reach_pods_and_its_clients_reach_it(helm: Helm) -> None:
    teams = [{"podSelector": {"matchLabels": {"app": "web"}}}]
    policy = {"networkPolicy": {"enabled": True, "clients": []}}
    rendered = helm.install({"gateway": {"enabled": True, "clients": teams}, **policy})
    labels = pod_of(rendered.one("Deployment", NAME))["metadata"]["labels"]
    grpc = rendered.one("NetworkPolicy", "demo-tokenpod")["spec"]["ingress"][0]
    assert grpc["ports"] == [{"protocol": "TCP", "port": "grpc"}]
    assert {"podSelector": {"matchLabels": labels}} in grpc["from"]
    own = rendered.one("NetworkPolicy", NAME)["spec"]
    assert own["podSelector"] == {"matchLabels": labels}
    assert own["ingress"][0]["from"] == teams
    to_pods, to_api = own["egress"]
    selector = rendered.one("Service", "demo-tokenpod")["spec"]["selector"]
    assert to_pods["to"] == [{"podSelector": {"matchLabels": selector}}]
    assert [port["port"] for port in (*to_pods["ports"], *to_api["ports"])] == [50051, 443, 6443]


def test_nodes_are_drained_and_copies_added_without_its_callers_noticing(helm: Helm) -> None:
    labels = pod_of(helm.install(ON).one("Deployment", NAME))["metadata"]["labels"]
    budget = helm.install(ON).one("PodDisruptionBudget", NAME)["spec"]
    assert (budget["maxUnavailable"], budget["selector"]) == (1, {"matchLabels": labels})
    assert helm.install(ON).one("Deployment", NAME)["spec"]["replicas"] == 1
    scaled = {"gateway": {"enabled": True, "autoscaling": {"enabled": True, "maxReplicas": 5}}}
    rendered = helm.install(scaled)
    assert "replicas" not in rendered.one("Deployment", NAME)["spec"]
    scaler = rendered.one("HorizontalPodAutoscaler", NAME)["spec"]
    assert scaler["scaleTargetRef"]["name"] == NAME
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 5)
    (metric,) = scaler["metrics"]
    assert metric["resource"] == {
        "name": "cpu",
        "target": {"type": "Utilization", "averageUtilization": 70},
    }


# -- as a container of the server's pods ---------------------------------------------------------

BESIDE: Object = {"gateway": {"enabled": True, "mode": "sidecar"}}
GUARDED = {"tls": {"existingSecret": "tls"}, "auth": {"existingSecret": "tokens"}}


def beside(rendered: Any) -> Object:
    """The gateway's container, in the server's pod."""
    containers = pod_of(rendered.one("Deployment"))["spec"]["containers"]
    (found,) = (each for each in containers if each["name"] == "gateway")
    return found


def test_beside_the_server_it_calls_that_server_alone(helm: Helm) -> None:
    for values, port in (({}, 50051), (GUARDED, 50055)):
        rendered = helm.install({**BESIDE, **values})
        args = beside(rendered)["args"]
        assert args[-1] == f"--worker-urls=grpc://127.0.0.1:{port}"
        assert not any("discovery" in arg or "selector" in arg for arg in args)
        server = container_of(pod_of(rendered.one("Deployment")))["args"]
        assert ("--loopback-port=50055" in server) is (port == 50055)
        assert "--kv-cache-events" not in server
        assert not rendered.all("Role"), "it needs nothing of the API server"


def test_its_service_leads_to_the_pods_and_policies_let_its_clients_in(helm: Helm) -> None:
    teams = [{"podSelector": {"matchLabels": {"app": "web"}}}]
    policy = {"networkPolicy": {"enabled": True, "clients": []}}
    gateway = {**BESIDE["gateway"], "clients": teams}
    rendered = helm.install({"gateway": gateway, **policy, **GUARDED})
    pod = pod_of(rendered.one("Deployment"))
    service = rendered.one("Service", NAME)["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    names = [port["name"] for each in pod["spec"]["containers"] for port in each["ports"]]
    assert len(names) == len(set(names))
    assert service["ports"][0]["targetPort"] in names
    (policy_of_pods,) = rendered.all("NetworkPolicy")
    (http,) = (
        rule
        for rule in policy_of_pods["spec"]["ingress"]
        if {"protocol": "TCP", "port": "http"} in rule["ports"]
    )
    assert http["from"] == teams
    opened = [str(p["port"]) for r in policy_of_pods["spec"]["ingress"] for p in r["ports"]]
    assert "50055" not in opened


def test_the_pods_time_to_end_is_enough_for_both(helm: Helm) -> None:
    for seconds, grace in ((120, 135), (20, 120)):
        gateway = {**BESIDE["gateway"], "shutdownSeconds": seconds}
        rendered = helm.install({"gateway": gateway})
        pod = pod_of(rendered.one("Deployment"))["spec"]
        assert pod["terminationGracePeriodSeconds"] == grace
        assert f"--shutdown-grace-period-secs={seconds}" in beside(rendered)["args"]
        assert beside(rendered)["lifecycle"] == container_of({"spec": pod})["lifecycle"]


@pytest.mark.skipif(VENV is None, reason="SMG_VENV names no environment with smg")
def test_beside_a_server_with_certificate_and_tokens_it_serves_also_when_that_starts_again(
    helm: Helm, tmp_path: Path
) -> None:
    ports = {"grpc": free_port(), "health": free_port(), "loopback": free_port()}
    own = {"http": free_port(), "health": free_port(), "metrics": free_port()}
    values = {"gateway": {**BESIDE["gateway"], "ports": own}, "ports": ports, **GUARDED}
    rendered = helm.install({**values, "server": {"threads": 1}})
    secret = Authority(tmp_path / "secrets").issue("tls", "DNS:localhost")
    (tmp_path / "tokens").write_text("a-token\n")
    places = {"/etc/tokenpod/tls": str(secret), "/etc/tokenpod/auth": str(tmp_path)}

    def placed(text: str) -> str:
        for inside, here in places.items():
            text = text.replace(inside, here)
        return text

    server = container_of(pod_of(rendered.one("Deployment")))
    serve = [sys.executable, "-P", "-m", "tokenpod", *server["command"][1:]]
    serve += [placed(arg) for arg in server["args"]]
    gateway = beside(rendered)
    launch = [str(Path(VENV or "") / "bin" / gateway["command"][0]), *gateway["command"][1:]]
    launch += [arg.replace("$(POD_UID)", "the-pods-uid") for arg in gateway["args"]]

    def ready() -> bool:
        return answered(own["health"], "/readiness")[0] == 200

    def ask() -> int:
        body = {"model": "demo", "prompt": "def f():", "max_tokens": 3}
        return answered(own["http"], "/v1/completions", body)[0]

    with running(launch, tmp_path / "gateway.log", HOME=str(tmp_path)):
        # Containers of a pod start together.
        with running(serve, tmp_path / "server.log"):
            wait_for(ready, 120)
            assert ask() == 200
            trusted = grpc.ssl_channel_credentials((secret / "ca.crt").read_bytes())
            with grpc.secure_channel(f"localhost:{ports['grpc']}", trusted) as channel:
                with pytest.raises(grpc.RpcError) as refused:
                    generate(GenerationServiceStub(channel), text_request("x"))
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with running(serve, tmp_path / "again.log"):
            wait_for(lambda: ask() == 200, 120)


# -- without Kubernetes: the compose file --------------------------------------------------------

COMPOSE = CHART.parents[1] / "gateway" / "compose.yaml"


def composed(**variables: str) -> dict[str, Object]:
    """The compose file's services, as Compose fills in its variables."""

    def filled(found: re.Match[str]) -> str:
        name, default = found["name"], found["default"]
        assert name in variables or default is not None, f"{name} must be set"
        return variables.get(name, default or "")

    text = re.sub(
        r"\$\{(?P<name>[A-Z_]+)(:-(?P<default>[^}]*)|:\?[^}]*)\}", filled, COMPOSE.read_text()
    )
    services: dict[str, Object] = yaml.safe_load(text)["services"]
    return services


def test_the_compose_file_pins_the_gateway_and_opens_nothing_to_other_machines() -> None:
    with pytest.raises(AssertionError, match="CONTROL_PLANE_KEY must be set"):
        composed()
    services = composed(CONTROL_PLANE_KEY="k")
    assert set(services) == {"pod", "gateway"}
    project = tomllib.loads((COMPOSE.parents[2] / "pyproject.toml").read_text())["project"]
    (pinned,) = (each for each in project["optional-dependencies"]["gateway"] if "smg==" in each)
    assert services["gateway"]["image"].rpartition(":")[2] == pinned.partition("==")[2]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.skipif(VENV is None, reason="SMG_VENV names no environment with smg")
def test_the_compose_files_commands_answer_those_who_have_the_key(tmp_path: Path) -> None:
    services = composed(CONTROL_PLANE_KEY="operators", API_KEY="secret")
    places = {
        "50051": str(free_port()),
        "8000": (http := str(free_port())),
        "//pod:": "//localhost:",
    }

    def placed(service: str) -> list[str]:
        found = []
        for arg in services[service]["command"]:
            for there, here in places.items():
                arg = arg.replace(there, here)
            found.append(arg)
        return found

    pod = [sys.executable, "-P", "-m", "tokenpod", *placed("pod"), "--port", places["50051"]]
    pod += ["--health-port", "0", "--threads", "1"]
    gateway = [str(Path(VENV or "") / "bin" / services["gateway"]["entrypoint"][0])]
    gateway += [*placed("gateway"), "--prometheus-port", str(free_port())]
    body = {"model": "demo", "prompt": "def f():", "max_tokens": 3}

    def ask(path: str = "/v1/completions", key: str = "secret") -> int:
        return answered(int(http), path, body, authorization=f"Bearer {key}")[0]

    with running(pod, tmp_path / "pod.log"), running(gateway, tmp_path / "gateway.log"):
        wait_for(lambda: ask() == 200, 120)
        assert ask(key="other") == 401
        assert ask("/flush_cache") in (401, 403)


# -- the gateway itself --------------------------------------------------------------------------

TOKEN = "of the service account"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
#: The container's mounts: $1 is its service account's folder, $2 its /tmp, $3 its user.
CONTAINED = f"""
set -e
mount -t tmpfs tmpfs /run
mkdir -p {ACCOUNT}
cp "$1"/* {ACCOUNT}
mount --bind "$2" /tmp
mount -o remount,bind,ro /
user=$3
shift 3
cd /
exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs \\
  --bounding-set -all --inh-caps -all -- "$@"
"""


def contained(rendered: Any, folder: Path, authority: Path, command: list[str]) -> list[str]:
    """`command` as the gateway's container runs it."""
    account, scratch = folder / "account", folder / "scratch"
    account.mkdir()
    (account / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text(NAMESPACE)
    scratch.mkdir(mode=0o777)
    scratch.chmod(0o777)
    user = pod_of(rendered.one("Deployment", NAME))["spec"]["securityContext"]["runAsUser"]
    assert gateway_of(rendered)["securityContext"]["readOnlyRootFilesystem"]
    around = ["unshare", "--mount", "--propagation", "private", "sh", "-c", CONTAINED, "sh"]
    return [*around, str(account), str(scratch), str(user), *command]


class PodList(ThreadingHTTPServer):
    """As much of the Kubernetes API as the gateway may use: list and watch pods of a namespace."""

    daemon_threads = True

    def __init__(self, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Api)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "tls.crt", certificate / "tls.key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.pods: dict[str, Object] = {}
        self.changes: list[tuple[str, Object]] = []
        self.asked: set[str] = set()

    def put(self, name: str, address: str, labels: dict[str, str]) -> None:
        ready = [{"type": "Ready", "status": "True"}]
        pod = {
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": name, "labels": labels},
            "spec": {"containers": []},
            "status": {"phase": "Running", "podIP": address, "conditions": ready},
        }
        self.pods[name] = pod
        self._changed("ADDED", pod)

    def remove(self, name: str) -> None:
        gone = self.pods.pop(name)
        gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self._changed("MODIFIED", gone)
        self._changed("DELETED", gone)

    def _changed(self, kind: str, pod: Object) -> None:
        pod["metadata"]["resourceVersion"] = str(len(self.changes) + 1)
        self.changes.append((kind, json.loads(json.dumps(pod))))


class _Api(BaseHTTPRequestHandler):
    server: PodList
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        watches = query.get("watch") in (["true"], ["1"])
        self.server.asked.add(f"{'watch' if watches else 'list'} {url.path}")
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self.send_error(401)
        elif url.path != f"/api/v1/namespaces/{NAMESPACE}/pods":
            self.send_error(403)
        elif watches:
            self._watch(int(query.get("resourceVersion", ["0"])[0] or 0))
        else:
            version = {"resourceVersion": str(len(self.server.changes))}
            items = [*self.server.pods.values()]
            self._say({"kind": "PodList", "apiVersion": "v1", "metadata": version, "items": items})

    def _say(self, answer: Object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self, after: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while True:
            for kind, pod in self.server.changes[after:]:
                event = {"type": kind, "object": {"kind": "Pod", "apiVersion": "v1", **pod}}
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                after += 1
            time.sleep(0.1)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def running(command: list[str], log: Path, **variables: str) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=log.parent, env={**os.environ, **variables}
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def answered(port: int, path: str, body: Object | None = None, **more: str) -> tuple[int, Any, str]:
    """Status, answer and the worker that served; status 0: nobody is there."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        try:
            data = None if body is None else json.dumps(body)
            headers = {"content-type": "application/json", **more} if body else more
            client.request("POST" if body else "GET", path, data, headers)
            answer = client.getresponse()
            text = answer.read()
        except OSError:
            return 0, None, ""
        worker = answer.getheader("x-smg-routed-worker-id") or ""
        return answer.status, text, worker


@pytest.mark.skipif(VENV is None, reason="SMG_VENV names no environment with smg")
@pytest.mark.skipif(os.geteuid() != 0, reason="a container's mounts need root")
def test_the_unmodified_gateway_serves_the_pods_that_it_finds(helm: Helm, tmp_path: Path) -> None:
    ports = {"grpc": free_port(), "health": free_port()}
    own = {"http": free_port(), "health": free_port(), "metrics": free_port()}
    values = {"gateway": {"enabled": True, "ports": own}, "ports": ports}
    rendered = helm.install({**values, "server": {"threads": 1}})
    server = pod_of(rendered.one("Deployment", "demo-tokenpod"))
    labels = server["metadata"]["labels"]

    def ask(prompt: str) -> tuple[int, str]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 3}
        status, _, worker = answered(own["http"], "/v1/completions", body)
        return status, worker

    with contextlib.ExitStack() as stack:
        authority = Authority(tmp_path / "secrets").issue("api", "IP:127.0.0.1")
        api = PodList(authority)
        stack.callback(api.server_close)
        stack.callback(api.shutdown)
        threading.Thread(target=api.serve_forever, args=(0.05,), daemon=True).start()
        cluster = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(api.server_port),
        }
        for number in (2, 3):
            serve = [sys.executable, "-P", "-m", "tokenpod", *container_of(server)["command"][1:]]
            command = [*serve, *container_of(server)["args"], f"--hostname=127.0.0.{number}"]
            stack.enter_context(running(command, tmp_path / f"pod-{number}.log"))
        gateway = gateway_of(rendered)
        program = str(Path(VENV or "") / "bin" / gateway["command"][0])
        given = [arg.replace("$(POD_UID)", "the-pods-uid") for arg in gateway["args"]]
        command = [program, *gateway["command"][1:], *given]
        (home,) = (each["value"] for each in gateway["env"] if each["name"] == "HOME")
        command = contained(rendered, tmp_path, authority, command)
        stack.enter_context(running(command, tmp_path / "gateway.log", HOME=home, **cluster))
        wait_for(lambda: answered(own["health"], "/liveness")[0] == 200, 60)
        assert answered(own["health"], "/readiness")[0] == 503, "it knows no pod yet"
        api.put("other", "127.0.0.9", {**labels, "app.kubernetes.io/component": "test"})
        api.put("a", "127.0.0.2", labels)
        wait_for(lambda: answered(own["health"], "/readiness")[0] == 200, 120)
        assert ask("def f():")[0] == 200
        assert answered(own["http"], "/workers", {"url": "grpc://127.0.0.9:1"})[0] == 401
        assert answered(own["http"], "/flush_cache", {"timeout_s": 1})[0] == 401
        api.put("b", "127.0.0.3", labels)
        served: set[str] = set()

        def both() -> bool:
            served.update(ask(f"# {time.monotonic()}\n")[1] for _ in range(4))
            return len(served) == 2

        wait_for(both, 120)
        api.remove("a")
        wait_for(lambda: len({ask(f"# again {at}\n")[1] for at in range(6)}) == 1, 60)
        assert {ask(f"# last {at}\n")[0] for at in range(4)} == {200}
        assert api.asked == {
            f"{verb} /api/v1/namespaces/{NAMESPACE}/pods" for verb in ("list", "watch")
        }
