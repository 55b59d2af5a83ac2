"""The manifests are what Kubernetes takes, over a matrix of values and versions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm import CHART, Helm
from deploy.schemas import Refused, validate

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
OLDEST, NEWEST = "1.28", "1.37"
#: The example whose volume the oldest one does not know.
IMAGE_VOLUME = "two-pods-of-four-gpus-lws"

PLAIN = {"server": {"threads": 3}, "probes": {"startup": {"periodSeconds": 3}}}
SECURED = {
    "tls": {"existingSecret": "tls", "mtls": {"enabled": True, "existingSecret": "clients"}},
    "auth": {"existingSecret": "tokens"},
    "helmTest": {"tlsSecret": "test-client"},
    "networkPolicy": {
        "enabled": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        "extraIngress": [{"ports": [{"port": "health"}]}],
        "extraEgress": [{"ports": [{"port": 8888}]}],
    },
    "telemetry": {"otlp": {"endpoint": "http://collector:4317", "sampleRatio": 0.1}},
}
DRESSED = {
    "image": {"registry": "registry.example.com", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "pull"}],
    "model": {"source": "volume", "volume": {"emptyDir": {"sizeLimit": "20Gi"}}},
    "initContainers": [
        {
            "name": "download",
            "image": "downloader",
            "volumeMounts": [{"name": "model", "mountPath": "/model"}],
        }
    ],
    "extraContainers": [{"name": "router", "image": "{{ .Chart.Name }}-router"}],
    "service": {"type": "NodePort", "nodePort": 30051, "annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"a": "b"}},
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "true"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "{{ .Chart.Name }}"}},
        }
    ],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "extraEnvFrom": [{"secretRef": {"name": "more"}}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "cache": {"existingClaim": "kernels", "copyFromImage": True},
    "podDisruptionBudget": {"minAvailable": "50%"},
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "{{ .Release.Name }}-more"},
        }
    ],
}
SCALED = {
    "autoscaling": {
        "hpa": {
            "enabled": True,
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": "tokenpod.queue.requests"},
                        "target": {"type": "AverageValue", "averageValue": "4"},
                    },
                }
            ],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        }
    }
}
DOWNLOADED = {
    "model": {
        "source": "download",
        "path": "llama",
        "existingClaim": "models",
        "download": {
            "url": "s3://bucket/llama",
            "env": [{"name": "AWS_ENDPOINT_URL", "value": "http://{{ .Release.Name }}-s3"}],
            "envFrom": [{"secretRef": {"name": "s3"}}],
        },
    },
    "networkPolicy": {"enabled": True},
}
FRONTED = {
    "gateway": {
        "enabled": True,
        "service": {"type": "NodePort", "nodePort": 30080, "annotations": {"a": "b"}},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        "extraIngress": [{"ports": [{"port": "gateway-metrics"}]}],
        "extraEgress": [{"ports": [{"port": 4317}]}],
        "podDisruptionBudget": {"minAvailable": 1},
        "autoscaling": {
            "enabled": True,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        },
    },
    "networkPolicy": {"enabled": True},
    "imagePullSecrets": [{"name": "pull"}],
}
BESIDE = {
    **SECURED,
    "gateway": {
        "enabled": True,
        "mode": "sidecar",
        "auth": {"existingSecret": "keys"},
        "tls": {"existingSecret": "https"},
        "extraIngress": [{"ports": [{"port": "gateway-metrics"}]}],
        "extraEgress": [{"ports": [{"port": 4317}]}],
    },
}
WATCHED = {
    "telemetry": {
        "metrics": {
            "enabled": True,
            "names": ["vllm"],
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
            "podMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True},
        }
    },
    "networkPolicy": {"enabled": True},
}
ROUTED = {
    "grpcRoute": {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways"}],
        "hostnames": ["models.example.com"],
        "annotations": {"a": "b"},
    },
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    "telemetry": {"metrics": {"enabled": True, "names": ["vllm"]}},
}
ADAPTED = {
    "adapters": {
        "existingSecret": "adapters",
        "volume": {"persistentVolumeClaim": {"claimName": "adapters"}},
    },
    "server": {"maxAdapters": 8},
}
GROUPS = {"replicaCount": 3, "parallelism": {"mode": "statefulset", "tensor": 4, "pods": 2}}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain": PLAIN,
    "secured": SECURED,
    "dressed": DRESSED,
    "scaled": SCALED,
    "downloaded": DOWNLOADED,
    "fronted": FRONTED,
    "beside": BESIDE,
    "watched": WATCHED,
    "routed": ROUTED,
    "adapted": ADAPTED,
    "routed groups": {**GROUPS, **ROUTED},
    "adapted groups": {**GROUPS, **ADAPTED},
    "fronted groups": {**GROUPS, **FRONTED},
    "groups": GROUPS,
    "downloaded groups": {**GROUPS, **DOWNLOADED},
    "secured groups": {**GROUPS, **SECURED},
    "dressed groups": {**GROUPS, **DRESSED},
    **{path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES},
}


VERSIONS = (NEWEST, "1.31", OLDEST)
#: The version with which each case is looked at in every run.
TURNS = {case: VERSIONS[at % 3] for at, case in enumerate(CASES)} | {IMAGE_VOLUME: NEWEST}


@pytest.mark.parametrize(
    ("case", "kubernetes"),
    [
        pytest.param(case, version, marks=[] if TURNS[case] == version else [pytest.mark.slow])
        for case in CASES
        for version in VERSIONS
        if (case, version) != (IMAGE_VOLUME, OLDEST)
    ],
)
def test_every_object_is_valid_to_the_letter(helm: Helm, case: str, kubernetes: str) -> None:
    rendered = helm.install(CASES[case], kubernetes=kubernetes)
    for each in [*rendered.objects, *rendered.hooks]:
        validate(each, kubernetes)


def test_an_invalid_object_would_be_found(helm: Helm) -> None:
    deployment = helm.install().one("Deployment")
    deployment["spec"]["template"]["spec"]["graceSeconds"] = 5
    with pytest.raises(Refused):
        validate(deployment, NEWEST)


@pytest.mark.parametrize(
    ("case", "kind", "wrong"),
    [
        ("routed", "GRPCRoute", {"backendRefs": []}),
        ("routed", "InferencePool", {"targetPorts": [{"number": "50051"}]}),
        ("autoscaled-keda", "ScaledObject", {"triggers": [{"type": "cpu", "metadata": {"a": 1}}]}),
    ],
)
def test_an_invalid_object_of_a_kind_that_others_define_would_be_found(
    helm: Helm, case: str, kind: str, wrong: dict[str, Any]
) -> None:
    given = helm.install(CASES[case]).one(kind)
    validate(given, NEWEST)
    given["spec"] |= wrong
    with pytest.raises(Refused):
        validate(given, NEWEST)


@pytest.mark.parametrize("case", CASES)
def test_no_two_objects_share_a_name_and_all_carry_the_releases_labels(
    helm: Helm, case: str
) -> None:
    objects = helm.install(CASES[case], kubernetes=TURNS[case]).objects
    names = Counter((each["kind"], each["metadata"]["name"]) for each in objects)
    assert max(names.values()) == 1
    for each in objects:
        if each["kind"] != "ConfigMap":
            assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"


@pytest.mark.parametrize("case", CASES)
def test_a_controllers_selector_matches_its_own_pods_alone(helm: Helm, case: str) -> None:
    objects = helm.install(CASES[case], kubernetes=TURNS[case]).objects
    controllers = [e for e in objects if e["kind"] in ("Deployment", "StatefulSet")]
    for one in controllers:
        wanted = one["spec"]["selector"]["matchLabels"].items()
        matched = [
            other["metadata"]["name"]
            for other in controllers
            if wanted <= other["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert matched == [one["metadata"]["name"]]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_say_what_they_are_for(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_lint_has_no_complaint(helm: Helm) -> None:
    assert helm.lint()["Errors"] is None


def test_names_stay_short_enough_for_the_labels_that_controllers_make(helm: Helm) -> None:
    rendered = helm.install({**GROUPS, "fullnameOverride": "x" * 60})
    for each in rendered.all("StatefulSet"):
        # StatefulSets label pods with their name and a hash of 10 characters.
        assert len(each["metadata"]["name"]) + 11 <= 63
    for each in rendered.objects:
        assert len(each["metadata"]["name"]) <= 63
