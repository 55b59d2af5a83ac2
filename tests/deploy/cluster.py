"""An API server for Helm to install into: it knows some kinds, and keeps what it is given.

Enough of the Kubernetes API for `helm install`: the version, discovery, and objects that can be
created, read, patched and deleted. Nothing runs.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

#: group/version -> plural name -> kind.
KINDS = {
    "v1": {
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "gateway.networking.k8s.io/v1": {"grpcroutes": "GRPCRoute"},
    "inference.networking.k8s.io/v1": {"inferencepools": "InferencePool"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
    "leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"},
    "monitoring.coreos.com/v1": {
        "podmonitors": "PodMonitor",
        "prometheusrules": "PrometheusRule",
    },
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


class Cluster(ThreadingHTTPServer):
    """Serves on a free port of the loopback address. `version` is Kubernetes', such as `1.31`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Api)
        self.version = ""
        self.objects: dict[str, Any] = {}

    @property
    def kubeconfig(self) -> str:
        """What a client needs to know, in YAML: Helm takes what begins otherwise for a path."""
        name = "stand-in"
        server = f"http://127.0.0.1:{self.server_port}"
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": name, "cluster": {"server": server}}],
                "users": [{"name": name, "user": {}}],
                "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
                "current-context": name,
            },
            sort_keys=False,
        )

    @contextlib.contextmanager
    def serving(self, version: str) -> Iterator[Cluster]:
        """Empty, and of this version, until the block ends."""
        self.version, self.objects = version, {}
        thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()


class _Api(BaseHTTPRequestHandler):
    server: Cluster
    protocol_version = "HTTP/1.1"
    # Or every answer waits 40 ms for the client to acknowledge its headers.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        if (found := self._discovered(path)) is None:
            found = self.server.objects.get(path)
        self._answer(found)

    def do_POST(self) -> None:
        given = self._body()
        path = f"{self.path.partition('?')[0]}/{given['metadata']['name']}"
        self.server.objects[path] = given
        self._answer(given, 201)

    def do_PATCH(self) -> None:
        self._body()
        self._answer(self.server.objects.get(self.path.partition("?")[0]))

    def do_DELETE(self) -> None:
        self._body()
        self._answer(self.server.objects.pop(self.path.partition("?")[0], None))

    def log_message(self, *_: object) -> None:
        pass

    def _discovered(self, path: str) -> Any:
        if path == "/version":
            major, minor = self.server.version.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{major}.{minor}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [_group(name) for name in KINDS if "/" in name]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in KINDS:
            resources = [_resource(*each) for each in KINDS[version].items()]
            return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        return None

    def _body(self) -> Any:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return json.loads(raw) if raw else None

    def _answer(self, found: Any, status: int = 200) -> None:
        if found is None:
            status = 404
            failure = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            found = {**failure, "apiVersion": "v1", "message": f"{self.path} not found"}
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _group(group_version: str) -> dict[str, Any]:
    group, _, version = group_version.partition("/")
    entry = {"groupVersion": group_version, "version": version}
    return {"name": group, "versions": [entry], "preferredVersion": entry}


def _resource(plural: str, kind: str) -> dict[str, Any]:
    singular = kind.lower()
    return {
        "name": plural,
        "singularName": singular,
        "kind": kind,
        "namespaced": True,
        "verbs": _VERBS,
    }
