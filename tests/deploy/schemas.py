"""Kubernetes' own schemas, strictly: an unknown field is an error."""

from __future__ import annotations

import functools
from typing import Any

#: Without schemas here: their controllers bring them along.
CUSTOM = {"LeaderWorkerSet", "PodMonitor", "PrometheusRule"}


def _closed(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties alone, of which the required ones must be there."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required.split(),
    }


def _several(of: Any, most: int = 16) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "maxItems": most, "items": of}


_TEXT, _TEXTS = {"type": "string", "minLength": 1}, {"additionalProperties": {"type": "string"}}
_NUMBER, _PORT = {"type": "integer"}, {"type": "integer", "minimum": 1, "maximum": 65535}
_REFERENCE = {"group": _TEXT, "kind": _TEXT, "name": _TEXT, "namespace": _TEXT, "port": _PORT}
#: The `spec` of kinds that others define, after their API references: what charts may say in it.
SPECS = {
    # Gateway API 1.4.
    "GRPCRoute": _closed(
        "parentRefs rules",
        parentRefs=_several(_closed("name", **_REFERENCE, sectionName=_TEXT)),
        hostnames=_several(_TEXT),
        rules=_several(
            _closed(
                "backendRefs",
                name=_TEXT,
                matches={},
                filters={},
                backendRefs=_several(_closed("name port", **_REFERENCE, weight=_NUMBER)),
            )
        ),
    ),
    # Gateway API Inference Extension 1.
    "InferencePool": _closed(
        "selector targetPorts endpointPickerRef",
        selector=_closed("matchLabels", matchLabels=_TEXTS),
        targetPorts=_several(_closed("number", number=_PORT), 8),
        appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        endpointPickerRef=_closed(
            "name port",
            **{**_REFERENCE, "port": _closed("number", number=_PORT)},
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    # KEDA 2.
    "ScaledObject": _closed(
        "scaleTargetRef triggers",
        scaleTargetRef=_closed("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
        **dict.fromkeys(("pollingInterval", "cooldownPeriod", "idleReplicaCount"), _NUMBER),
        **dict.fromkeys(("minReplicaCount", "maxReplicaCount"), _NUMBER),
        advanced={},
        fallback={},
        triggers=_several(
            _closed(
                "type metadata",
                type=_TEXT,
                name=_TEXT,
                metadata=_TEXTS,
                metricType={"enum": ["AverageValue", "Value", "Utilization"]},
                authenticationRef={},
            )
        ),
    ),
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
    if given["kind"] in SPECS:
        _check_spec(given)
        return
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


def _check_spec(given: dict[str, Any]) -> None:
    # An import of seconds, for the few tests that need it.
    from jsonschema import Draft202012Validator

    errors = Draft202012Validator(SPECS[given["kind"]]).iter_errors(given["spec"])
    if said := [f"{error.json_path}: {error.message}" for error in errors]:
        raise Refused("; ".join(said))
