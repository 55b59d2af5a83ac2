"""Who reaches what: Services, policies; and what follows load."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.helm import Helm, Object

GROUPS = {"parallelism": {"mode": "statefulset", "tensor": 4, "pods": 2}}
METRIC = {
    "type": "External",
    "external": {"metric": {"name": "queue"}, "target": {"type": "Value"}},
}


def policy(helm: Helm, **values: Any) -> Object:
    values.setdefault("networkPolicy", {})["enabled"] = True
    return helm.install(values).one("NetworkPolicy")["spec"]


def rule_for(policy: Object, port: object) -> Object:
    (found,) = [
        rule for rule in policy["ingress"] if any(p["port"] == port for p in rule.get("ports", ()))
    ]
    return found


# -- Services ------------------------------------------------------------------------------------


def test_the_client_service_says_that_it_speaks_grpc(helm: Helm) -> None:
    (port,) = helm.install().one("Service")["spec"]["ports"]
    assert port == {"name": "grpc", "port": 50051, "targetPort": "grpc", "appProtocol": "grpc"}


def test_with_tls_a_mesh_is_not_told_to_read_along(helm: Helm) -> None:
    (port,) = helm.install({"tls": {"existingSecret": "tls"}}).one("Service")["spec"]["ports"]
    assert "appProtocol" not in port


def test_a_client_that_balances_by_itself_can_see_every_pod(helm: Helm) -> None:
    service = helm.install({"service": {"headless": True}}).one("Service")["spec"]
    assert service["clusterIP"] == "None"
    # Only to those that are ready.
    assert "publishNotReadyAddresses" not in service


# -- Policies ------------------------------------------------------------------------------------


def test_there_is_no_policy_unless_asked_for(helm: Helm) -> None:
    assert not helm.install().all("NetworkPolicy")


def test_clients_come_from_the_namespace_or_from_where_the_operator_says(helm: Helm) -> None:
    namespace, test = rule_for(policy(helm), "grpc")["from"]
    assert namespace == {"podSelector": {}}
    assert test["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    team = {"namespaceSelector": {"matchLabels": {"team": "a"}}}
    chosen = policy(helm, networkPolicy={"clients": [team]})
    assert rule_for(chosen, "grpc")["from"][0] == team


def test_the_charts_own_test_carries_the_label_that_is_let_in(helm: Helm) -> None:
    rendered = helm.install({"networkPolicy": {"enabled": True}})
    rule = rule_for(rendered.one("NetworkPolicy")["spec"], "grpc")
    wanted = rule["from"][-1]["podSelector"]["matchLabels"]
    assert wanted.items() <= rendered.hooks[0]["metadata"]["labels"].items()


def test_probes_reach_the_health_port_from_anywhere(helm: Helm) -> None:
    assert "from" not in rule_for(policy(helm), "health")


def test_the_metrics_port_is_open_to_those_who_are_named(helm: Helm) -> None:
    metrics = {"enabled": True}
    assert "from" not in rule_for(policy(helm, telemetry={"metrics": metrics}), "metrics")
    team = {"namespaceSelector": {"matchLabels": {"team": "a"}}}
    chosen = policy(helm, telemetry={"metrics": {**metrics, "clients": [team]}})
    assert rule_for(chosen, "metrics")["from"] == [team]


def test_a_single_pod_opens_no_connection_at_all(helm: Helm) -> None:
    assert not policy(helm)["egress"]
    assert len(policy(helm)["ingress"]) == 2


def test_shards_reach_each_other_on_any_port_and_names_too(helm: Helm) -> None:
    given = policy(helm, **GROUPS)
    (between,) = [rule for rule in given["ingress"] if "ports" not in rule]
    assert between["from"] == [{"podSelector": given["podSelector"]}]
    assert given["egress"][0] == {"to": [{"podSelector": given["podSelector"]}]}
    assert {p["port"] for p in given["egress"][1]["ports"]} == {53}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector:4317", 4317),
        ("https://collector.example.com", 443),
        ("http://collector/", 80),
        ("http://[fd00::1]:4317", 4317),
    ],
)
def test_the_collector_can_be_reached(helm: Helm, endpoint: str, port: int) -> None:
    given = policy(helm, telemetry={"otlp": {"endpoint": endpoint}})
    open_ports = [p["port"] for rule in given["egress"] for p in rule["ports"]]
    assert open_ports == [53, 53, port]


# -- Scaling -------------------------------------------------------------------------------------


def test_a_scaler_decides_how_many_pods_there_are(helm: Helm) -> None:
    scaled = {"autoscaling": {"hpa": {"enabled": True, "metrics": [METRIC]}}}
    rendered = helm.install(scaled)
    # Else every upgrade would set it back.
    assert "replicas" not in rendered.one("Deployment")["spec"]
    scaler = rendered.one("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == "demo-tokenpod"
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (1, 4)


@pytest.mark.parametrize(
    ("mode", "pods", "kind"), [("pod", 1, "Deployment"), ("lws", 2, "LeaderWorkerSet")]
)
def test_keda_scales_whole_copies_of_the_model(helm: Helm, mode: str, pods: int, kind: str) -> None:
    trigger = {"type": "prometheus", "metadata": {"query": "q"}}
    rendered = helm.install(
        {
            "parallelism": {"mode": mode, "tensor": 2, "pods": pods},
            "autoscaling": {"maxReplicas": 9, "keda": {"enabled": True, "triggers": [trigger]}},
        }
    )
    scaler = rendered.one("ScaledObject")["spec"]
    target = rendered.one(kind)
    assert scaler["scaleTargetRef"] == {
        "apiVersion": target["apiVersion"],
        "kind": kind,
        "name": target["metadata"]["name"],
    }
    assert scaler["maxReplicaCount"] == 9
    assert scaler["triggers"] == [trigger]
    assert "replicas" not in target["spec"]
