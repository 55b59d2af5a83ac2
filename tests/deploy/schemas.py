"""Kubernetes' own schemas, strictly: an unknown field is an error."""

from __future__ import annotations

import functools
from typing import Any

#: Without schemas here: their controllers bring them along.
CUSTOM = {
    *("LeaderWorkerSet", "PodMonitor", "PrometheusRule", "ScaledObject"),
    *("GRPCRoute", "InferencePool"),
}


@functools.cache
def _library() -> Any:
    """It takes seconds to import, and each process that runs tests imports this module."""
    from kubernetes_validate import utils

    # It reads its definitions of all kinds, some megabytes, for each object.
    utils.schema_contents = functools.cache(utils.schema_contents)
    return utils


class Refused(Exception):
    """An API server would not take the object."""


def validate(given: dict[str, Any], kubernetes: str) -> None:
    """Raise Refused if an API server of this version would not take the object."""
    assert given["apiVersion"]
    assert given["metadata"]["name"]
    if given["kind"] in CUSTOM:
        template = given["spec"].get("leaderWorkerTemplate", {}).get("workerTemplate")
        if template:
            metadata = {**template["metadata"], "name": "worker"}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
            _check({**pod, "spec": template["spec"]}, kubernetes)
        return
    _check(given, kubernetes)


def _check(given: dict[str, Any], kubernetes: str) -> None:
    try:
        _library().validate(given, kubernetes, strict=True)
    except _library().ValidationError as error:
        raise Refused(str(error)) from error
