"""Wrong values are refused, with the value's name in what is said."""

from __future__ import annotations

import json
from collections.abc import Sequence

import chart_schema
import pytest
import yaml

from deploy.helm import CHART, Helm, Object, Refused
from tokenpod.service.config.settings import REMOVED
from tokenpod.service.config.sources import ServerSettings

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
STATEFUL = {"mode": "statefulset", "tensor": 4, "pods": 2}
METRIC = {"type": "Resource"}
BESIDE = {"mode": "sidecar"}
SCALED = {"autoscaling": {"enabled": True}}


def refused(helm: Helm, values: Object, kubernetes: str = "1.34", *, as_set: bool = False) -> str:
    with pytest.raises(Refused) as caught:
        helm.install(values, kubernetes=kubernetes, as_set=as_set)
    return str(caught.value)


def rollout(*, mode: str = "pod", tensor: int = 1, pods: int = 1, **update: int | str) -> Object:
    """Values in which a LeaderWorkerSet is to be rolled out this way."""
    lws = {"rolloutStrategy": {"rollingUpdateConfiguration": update}}
    return {"parallelism": {"mode": mode, "tensor": tensor, "pods": pods, "lws": lws}}


def fronted(gateway: Object | None = None, **values: Object) -> Object:
    """Values with a gateway in front of the pods."""
    return {"gateway": {"enabled": True, **(gateway or {})}, **values}


def numbered(values: object) -> bool:
    """Whether there are whole numbers among them."""
    if isinstance(values, dict):
        return any(map(numbered, values.values()))
    return isinstance(values, int) and not isinstance(values, bool)


def both_ways(names: str, cases: Sequence[tuple[Object, str]]) -> pytest.MarkDecorator:
    """Values from a file, and by --set as well if that makes a difference.

    It does for whole numbers, which have another type there.
    """
    each = [(*case, way) for case in cases for way in (False, True) if not way or numbered(case[0])]
    return pytest.mark.parametrize(f"{names},as_set", each)


@both_ways(
    "values,named",
    [
        ({"replicas": 2}, "replicas"),
        ({"metrics": {"enabled": True}}, "metrics"),
        ({"server": {"maxBatchSze": 2}}, "maxBatchSze"),
        ({"server": {"maxBatchSize": 0}}, "maxBatchSize"),
        ({"server": {"memoryFraction": 1}}, "memoryFraction"),
        ({"server": {"dtype": "int3"}}, "dtype"),
        ({"server": {"port": 1}}, "port"),
        ({"replicaCount": -1}, "replicaCount"),
        ({"replicaCount": "2"}, "replicaCount"),
        ({"parallelism": {"mode": "ray"}}, "mode"),
        ({"parallelism": {"tensor": 0}}, "tensor"),
        ({"service": {"port": 70000}}, "port"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"resources": {"limits": {"memory": "much"}}}, "memory"),
        ({"drain": {"timeoutSeconds": -1}}, "timeoutSeconds"),
        ({"telemetry": {"otlp": {"endpoint": "collector:4317"}}}, "endpoint"),
        ({"telemetry": {"otlp": {"sampleRatio": 2}}}, "sampleRatio"),
        ({"model": {"path": "/absolute"}}, "path"),
        ({"model": {"hostPath": "relative"}}, "hostPath"),
        ({"model": {"source": "s3"}}, "source"),
        ({"model": {"download": {"url": "http://host/model"}}}, "url"),
        ({"model": {"download": {"claim": {"size": "much"}}}}, "size"),
        ({"model": {"download": {"token": "hf_secret"}}}, "token"),
        ({"podDisruptionBudget": {"minAvailable": "half"}}, "minAvailable"),
        ({"podLabels": {"a": 1}}, "podLabels"),
        ({"gateway": {"enable": True}}, "enable"),
        ({"gateway": {"policy": "cache aware"}}, "policy"),
        ({"gateway": {"mode": "beside"}}, "mode"),
        ({"fullnameOverride": "1abc"}, "fullnameOverride"),
        ({"parallelism": {"lws": {"rolloutStrategy": {"type": "OnDelete"}}}}, "type"),
        (rollout(maxSurg=1), "maxSurg"),
        (rollout(maxUnavailable=-1), "maxUnavailable"),
        (rollout(maxUnavailable="lots"), "maxUnavailable"),
    ],
)
def test_the_schema_names_the_value(helm: Helm, values: Object, named: str, as_set: bool) -> None:
    said = refused(helm, values, as_set=as_set)
    assert "schema" in said
    assert named in said


@both_ways(
    "values,said",
    [
        ({"parallelism": {"tensor": 3, "mode": "lws", "pods": 2}}, "same number of ranks"),
        (rollout(mode="lws", tensor=2, pods=2, maxUnavailable=0), "one of them must be above 0"),
        (rollout(mode="lws", tensor=2, pods=2, maxUnavailable="0%"), "must be above 0"),
        ({"parallelism": {"tensor": 4, "pods": 2}}, "need mode statefulset or lws"),
        ({"parallelism": {"mode": "statefulset", "tensor": 4}}, "take mode pod"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "set gpu.enabled"),
        ({"resources": {"requests": {"nvidia.com/gpu": 1}}}, "set gpu.enabled"),
        ({"model": {"source": "hf", "id": "a/b"}}, "nothing is downloaded at start"),
        ({"model": {"source": "download"}}, "model.download.url"),
        ({"model": {"download": {"url": "a/b"}}}, "set model.source to download"),
        (
            {"model": {"source": "download", "id": "a/b", "download": {"url": "a/b"}}},
            "set model.download.url alone",
        ),
        (
            {"model": {"source": "download", "download": {"url": "s3://a/b", "revision": "v1"}}},
            "model.download.revision is v1: only models of a hub",
        ),
        ({"model": {"source": "pvc"}}, "model.existingClaim"),
        ({"model": {"source": "hostPath"}}, "model.hostPath"),
        ({"model": {"source": "oci"}}, "model.image.reference"),
        ({"model": {"source": "volume"}}, "model.volume"),
        ({"model": {"id": "a/b"}}, "model.source"),
        ({"model": {"source": "pvc", "existingClaim": "x", "revision": "v"}}, "model.id"),
        ({"tls": {"mtls": {"enabled": True}}}, "tls.existingSecret"),
        (
            {"tls": {"existingSecret": "t", "mtls": {"enabled": True}}},
            "helmTest.tlsSecret",
        ),
        ({"tls": {"shards": {"existingSecret": "t"}}}, "with parallelism.mode pod"),
        ({"ports": {"health": 50051}}, "must differ"),
        ({"ports": {"health": 8081, "grpc": 8081}}, "must differ"),
        ({"service": {"headless": True, "type": "NodePort"}}, "can be headless"),
        ({"service": {"nodePort": 30000}}, "needs type NodePort"),
        (
            {"autoscaling": {"hpa": {"enabled": True, "metrics": [METRIC]}, "minReplicas": 0}},
            "only KEDA scales to none",
        ),
        ({"extraArgs": ["--health-port=1"]}, "--health-port"),
        (fronted(tls={"existingSecret": "t"}), "Set gateway.mode=sidecar"),
        (fronted(auth={"existingSecret": "t"}), "Set gateway.mode=sidecar"),
        (fronted(BESIDE, auth={"existingSecret": "t"}), "Set tls.existingSecret too"),
        (fronted(BESIDE, parallelism=STATEFUL), "sidecar with parallelism.pods 2"),
        (fronted(BESIDE | SCALED), "there are as many gateways as pods"),
        (fronted(BESIDE | {"ports": {"http": 50052}}), 'ports are {"grpc":50051'),
        (
            fronted({"autoscaling": {"enabled": True, "minReplicas": 9}}),
            "at most gateway.autoscaling.maxReplicas, which is 8",
        ),
        (
            fronted(SCALED | {"resources": {"requests": {"cpu": None}}}),
            "without gateway.resources.requests.cpu",
        ),
        (fronted(server={"kvCacheEvents": False}), "such as round_robin"),
        (fronted({"ports": {"health": 8000}}), "gateway.ports are"),
        (
            {"telemetry": {"metrics": {"podMonitor": {"enabled": True}}}},
            "telemetry.metrics.enabled",
        ),
        (fronted({"service": {"nodePort": 30000}}), "gateway.service.type ClusterIP"),
        (fronted({"image": {"tag": ""}}), "neither tag nor digest"),
        (fronted({"extraArgs": ["--port=1"]}), "gateway.extraArgs has --port"),
        ({"extraArgs": ["--num-shard", "2"]}, "--num-shard"),
        ({"server": {"draftTree": 31}}, "server.draftTree is 31: it was removed: drafts of a"),
        ({"server": {"draftTree": 0}}, "server.speculate (--speculate)"),
        ({"autoscaling": {"hpa": {"enabled": True}}}, "autoscaling.hpa.metrics"),
        ({"autoscaling": {"keda": {"enabled": True}}}, "autoscaling.keda.triggers"),
        (
            {"autoscaling": {"hpa": {"enabled": True, "metrics": [METRIC]}, "minReplicas": 9}},
            "at most autoscaling.maxReplicas, which is 4",
        ),
        (
            {"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}},
            "two scalers would fight",
        ),
    ],
)
def test_values_that_contradict_each_other_are_told(
    helm: Helm, values: Object, said: str, as_set: bool
) -> None:
    assert said in refused(helm, values, as_set=as_set)


@pytest.mark.parametrize("scaler", ["hpa", "keda"])
@pytest.mark.parametrize("as_set", [False, True], ids=["file", "set"])
def test_nothing_may_scale_the_ranks_of_a_model(helm: Helm, scaler: str, as_set: bool) -> None:
    scaling = {"hpa": {"enabled": scaler == "hpa"}, "keda": {"enabled": scaler == "keda"}}
    said = refused(helm, {"parallelism": STATEFUL, "autoscaling": scaling}, as_set=as_set)
    assert "a scaler would change one of them" in said
    assert "mode lws" in said


def test_image_volumes_need_a_kubernetes_that_has_them(helm: Helm) -> None:
    model = {"source": "oci", "image": {"reference": "r/m:1"}}
    assert "1.31" in refused(helm, {"model": model}, kubernetes="1.30")


@pytest.mark.parametrize(("kubernetes", "gate"), [("1.31", True), ("1.34", True), ("1.35", False)])
def test_image_volumes_that_may_be_dropped_silently_must_be_vouched_for(
    helm: Helm, kubernetes: str, gate: bool
) -> None:
    model = {"source": "oci", "image": {"reference": "r/m:1", "featureGate": gate}}
    assert helm.install({"model": model}, kubernetes=kubernetes).one("Deployment")
    if gate:
        model["image"] = {"reference": "r/m:1"}
        assert "ImageVolume" in refused(helm, {"model": model}, kubernetes=kubernetes)


def test_an_old_kubernetes_is_refused(helm: Helm) -> None:
    said = refused(helm, {}, kubernetes="1.27")
    assert "Kubernetes is v1.27.0: this chart needs 1.28 or newer" in said
    assert "--kube-version" in said


def test_a_helm_that_knows_no_cluster_renders_what_any_kubernetes_takes(helm: Helm) -> None:
    """Built without its release flags it claims 1.20."""
    rendered = helm.install({}, kubernetes="1.20")
    assert rendered.one("Deployment") == helm.install({}, kubernetes="1.28").one("Deployment")
    said = refused(
        helm, {"model": {"source": "oci", "image": {"reference": "r/m:1"}}}, kubernetes="1.20"
    )
    assert "--kube-version" in said


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"grpcRoute": {"enabled": True}}, "grpcRoute.parentRefs"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name"),
        (
            {
                "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
                "tls": {"existingSecret": "tls"},
            },
            "tls.existingSecret",
        ),
        ({"adapters": {"existingSecret": "tokens"}}, "adapters.volume"),
        (
            {"adapters": {"existingSecret": "tokens", "volume": {"emptyDir": {}}}},
            "server.maxAdapters",
        ),
    ],
)
def test_routes_and_adapters_that_lead_nowhere_are_refused(
    helm: Helm, values: Object, named: str
) -> None:
    assert named in refused(helm, values)


# -- Completeness --------------------------------------------------------------------------------


def test_every_setting_of_the_server_is_a_value_or_follows_from_one() -> None:
    reachable = set(SCHEMA["properties"]["server"]["properties"])
    assert chart_schema.schema() == (CHART / "values.schema.json").read_text()
    settings = set(ServerSettings.model_fields)
    assert len(reachable) == len(settings - chart_schema.DERIVED) + len(REMOVED)


@pytest.mark.parametrize("name", REMOVED)
def test_every_removed_setting_is_refused_by_the_chart_too(helm: Helm, name: str) -> None:
    named = chart_schema._camel(name)
    assert f"server.{named} is 1: it was removed" in refused(helm, {"server": {named: 1}})


def test_every_setting_that_is_not_a_value_is_made_by_the_chart() -> None:
    templates = (CHART / "templates" / "_args.tpl").read_text()
    for name in chart_schema.DERIVED - chart_schema.UNUSED:
        assert f"--{name.replace('_', '-')}" in templates


def test_every_default_is_in_the_schema_and_every_name_of_the_schema_has_a_default() -> None:
    def compare(defaults: Object, schema: Object, path: str) -> None:
        known = schema.get("properties")
        if known is None:
            return
        assert set(defaults) == set(known) - {"global", "claims"}, path
        for name, value in defaults.items():
            if isinstance(value, dict) and f"{path}.{name}" not in (".server", ".resources"):
                compare(value, known[name], f"{path}.{name}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), SCHEMA, "")


def test_every_part_of_the_schema_is_closed() -> None:
    def closed(schema: object) -> None:
        if isinstance(schema, dict):
            if "properties" in schema:
                assert schema.get("additionalProperties") is False
            for part in schema.values():
                closed(part)

    closed(SCHEMA["properties"])
