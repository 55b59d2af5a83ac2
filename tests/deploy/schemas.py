"""Kubernetes' own schemas, strictly: an unknown field is an error."""

from __future__ import annotations

import functools
from typing import Any

from kubernetes_validate import utils

#: Without schemas here: their controllers bring them along.
CUSTOM = {"LeaderWorkerSet", "ScaledObject"}

# It reads its definitions of all kinds, some megabytes, for each object.
utils.schema_contents = functools.cache(utils.schema_contents)


def validate(given: dict[str, Any], kubernetes: str) -> None:
    """Raise if an API server of this version would not take the object."""
    assert given["apiVersion"]
    assert given["metadata"]["name"]
    if given["kind"] in CUSTOM:
        template = given["spec"].get("leaderWorkerTemplate", {}).get("workerTemplate")
        if template:
            metadata = {**template["metadata"], "name": "worker"}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
            utils.validate({**pod, "spec": template["spec"]}, kubernetes, strict=True)
        return
    utils.validate(given, kubernetes, strict=True)
