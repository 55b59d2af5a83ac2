"""Short ways to what is in a manifest."""

from __future__ import annotations

import re

from deploy.helm import Object
from tokenpod.commands.serve import serve
from tokenpod.service.config.sources import ServerSettings, load_settings

#: Settings whose files are there only in a pod.
_FILES = {"tls_cert", "tls_key", "tls_client_ca", "auth_token_file"}
_FILES |= {"adapter_token_file", "adapter_folder"}
#: What is refused without them.
_WITH_FILES = {"loopback_port"}


def pod_of(controller: Object) -> Object:
    """The pod template of a Deployment, StatefulSet or LeaderWorkerSet."""
    spec = controller["spec"]
    if controller["kind"] == "LeaderWorkerSet":
        return spec["leaderWorkerTemplate"]["workerTemplate"]
    return spec["template"]


def container_of(pod: Object) -> Object:
    """The server's container."""
    (server,) = [each for each in pod["spec"]["containers"] if each["name"] == "server"]
    return server


def probes(pod: Object) -> dict[str, Object]:
    """startup, readiness, liveness."""
    server = container_of(pod)
    return {name: server[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}


def volumes(pod: Object) -> dict[str, Object]:
    """By name."""
    return {volume["name"]: volume for volume in pod["spec"]["volumes"]}


def mounts(pod: Object) -> dict[str, Object]:
    """The server's, by path."""
    return {mount["mountPath"]: mount for mount in container_of(pod)["volumeMounts"]}


def environment(container: Object, fields: dict[str, str]) -> dict[str, str]:
    """A container's variables; `fields` are what the downward API knows of the pod."""
    found: dict[str, str] = {}
    for each in container["env"]:
        if "value" in each:
            found[each["name"]] = expanded(each["value"], found)
        else:
            found[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
    return found


def expanded(text: str, known: dict[str, str]) -> str:
    """`text` with each $(NAME) of `known` replaced, as Kubernetes does it."""
    return re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), text)


def settings_of(pod: Object) -> ServerSettings:
    """The settings that the server makes of the pod's arguments."""
    context = serve.make_context("serve", list(container_of(pod)["args"]))
    given = {name: value for name, value in context.params.items() if value is not None}
    return load_settings(**{n: v for n, v in given.items() if n not in _FILES | _WITH_FILES})
