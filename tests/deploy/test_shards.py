"""Groups of pods: each rank knows its place, and clients find leaders alone."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.helm import Helm, Object
from deploy.manifests import container_of, environment, expanded, mounts, pod_of, volumes

INDEX = "apps.kubernetes.io/pod-index"
LWS_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


def groups(mode: str = "statefulset", **more: Any) -> Object:
    """Two copies of a model, each over two pods with four ranks."""
    parallelism = {"mode": mode, "tensor": 8, "pods": 2}
    return {"replicaCount": 2, "parallelism": parallelism, **more}


def arguments(pod: Object, labels: dict[str, str], **known: str) -> dict[str, str]:
    """The arguments as a pod with these labels gets them."""
    fields = {f"metadata.labels['{name}']": value for name, value in labels.items()}
    fields |= {"metadata.name": "pod", "metadata.namespace": "models"}
    fields |= {"status.podIP": "10.0.0.1", "spec.nodeName": "node"}
    known |= environment(container_of(pod), fields)
    pairs = (expanded(arg, known).partition("=") for arg in container_of(pod)["args"])
    return {name: value for name, _, value in pairs}


def test_a_stateful_set_for_each_place_in_a_copy_of_the_model(helm: Helm) -> None:
    found = helm.install({**groups(), "replicaCount": 3}).all("StatefulSet")
    assert {each["metadata"]["name"]: each["spec"]["replicas"] for each in found} == {
        "demo-tokenpod-leader": 3,
        "demo-tokenpod-follower-1": 3,
    }


@pytest.mark.parametrize(("rank", "name"), [("0", "leader"), ("1", "follower-1")])
def test_a_pods_copy_comes_from_its_index(helm: Helm, rank: str, name: str) -> None:
    place = helm.install(groups()).one("StatefulSet", f"demo-tokenpod-{name}")
    given = arguments(pod_of(place), {INDEX: "1"})
    assert given["--node-rank"] == rank
    assert (given["--num-nodes"], given["--num-shard"]) == ("2", "4")
    assert given["--master-addr"] == "demo-tokenpod-leader-1.demo-tokenpod-shards.models.svc"
    assert (given["--master-port"], given["--shard-port"]) == ("29500", "50053")


def test_a_leader_worker_sets_pods_are_placed_by_its_own_labels(helm: Helm) -> None:
    rendered = helm.install(groups("lws"))
    found = rendered.one("LeaderWorkerSet")
    assert found["spec"]["replicas"] == 2
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 2
    leader = "demo-tokenpod-shards-1.demo-tokenpod-shards.models"
    given = arguments(pod_of(found), {LWS_INDEX: "1"}, LWS_LEADER_ADDRESS=leader)
    assert given["--node-rank"] == "1"
    assert given["--master-addr"] == leader
    assert not rendered.all("StatefulSet")


def test_the_service_that_a_leader_worker_set_makes_has_a_name_of_its_own(helm: Helm) -> None:
    rendered = helm.install(groups("lws"))
    ours = {each["metadata"]["name"] for each in rendered.all("Service")}
    assert rendered.one("LeaderWorkerSet")["metadata"]["name"] not in ours


def test_all_modes_share_one_pod(helm: Helm) -> None:
    def common(pod: Object) -> Object:
        server = dict(container_of(pod))
        del server["args"], server["env"], server["ports"]
        return {**pod["spec"], "containers": [server]}

    one = pod_of(helm.install().one("Deployment"))
    ordered = pod_of(helm.install(groups()).one("StatefulSet", "demo-tokenpod-leader"))
    led = pod_of(helm.install(groups("lws")).one("LeaderWorkerSet"))
    assert common(one) == common(ordered) == common(led)


def test_pods_of_a_group_start_together_and_find_each_other_before_they_are_ready(
    helm: Helm,
) -> None:
    rendered = helm.install(groups())
    headless = rendered.one("Service", "demo-tokenpod-shards")
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"] is True
    for each in rendered.all("StatefulSet"):
        assert each["spec"]["podManagementPolicy"] == "Parallel"
        assert each["spec"]["serviceName"] == "demo-tokenpod-shards"
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert headless["spec"]["selector"].items() <= labels.items()


def test_clients_reach_the_leader_of_each_stateful_sets_copy_alone(helm: Helm) -> None:
    rendered = helm.install(groups())
    selector = rendered.one("Service", "demo-tokenpod")["spec"]["selector"]
    called = [
        each["metadata"]["name"]
        for each in rendered.all("StatefulSet")
        if selector.items() <= pod_of(each)["metadata"]["labels"].items()
    ]
    assert called == ["demo-tokenpod-leader"]


def test_clients_reach_the_leaders_of_a_leader_worker_set_alone(helm: Helm) -> None:
    rendered = helm.install(groups("lws"))
    selector = rendered.one("Service", "demo-tokenpod")["spec"]["selector"]
    labels = pod_of(rendered.one("LeaderWorkerSet"))["metadata"]["labels"]
    assert selector.items() <= {**labels, LWS_INDEX: "0"}.items()
    assert not selector.items() <= {**labels, LWS_INDEX: "1"}.items()


def test_clients_of_single_pods_reach_them_all(helm: Helm) -> None:
    rendered = helm.install({"replicaCount": 3})
    assert rendered.one("Deployment")["spec"]["replicas"] == 3
    selector = rendered.one("Service")["spec"]["selector"]
    labels = pod_of(rendered.one("Deployment"))["metadata"]["labels"]
    assert selector.items() <= labels.items()


def test_a_pod_has_gpus_for_its_own_ranks(helm: Helm) -> None:
    for each in helm.install(groups(gpu={"enabled": True})).all("StatefulSet"):
        assert container_of(pod_of(each))["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_a_copy_of_the_model_is_kept_whole_while_nodes_are_drained(helm: Helm) -> None:
    budget = helm.install(groups()).one("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert "pod-index" not in str(budget["selector"])


@pytest.mark.parametrize("mode", ["statefulset", "lws"])
def test_clients_of_groups_reconnect_now_and_then_unless_told_otherwise(
    helm: Helm, mode: str
) -> None:
    kind = "StatefulSet" if mode == "statefulset" else "LeaderWorkerSet"

    def age(server: Object) -> list[str]:
        controller = helm.install(groups(mode, server=server)).all(kind)[0]
        args = container_of(pod_of(controller))["args"]
        return [arg for arg in args if arg.startswith("--max-connection-age")]

    assert age({}) == ["--max-connection-age-seconds=300"]
    assert age({"maxConnectionAgeSeconds": 0}) == ["--max-connection-age-seconds=0"]


def test_groups_can_be_replaced_by_hand(helm: Helm) -> None:
    values = groups()
    values["parallelism"]["statefulset"] = {"updateStrategy": {"type": "OnDelete"}}
    for each in helm.install(values).all("StatefulSet"):
        assert each["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_pods_show_each_other_certificates(helm: Helm) -> None:
    values = groups(tls={"shards": {"existingSecret": "peers"}})
    given = pod_of(helm.install(values).one("StatefulSet", "demo-tokenpod-leader"))
    assert volumes(given)["shard-tls"]["secret"]["secretName"] == "peers"
    folder = "/etc/tokenpod/shard-tls"
    assert mounts(given)[folder]["readOnly"] is True
    flags = {
        "--shard-tls-cert": "tls.crt",
        "--shard-tls-key": "tls.key",
        "--shard-tls-ca": "ca.crt",
    }
    assert {f"{flag}={folder}/{file}" for flag, file in flags.items()} <= set(
        container_of(given)["args"]
    )


def test_ports_between_shards_are_opened_for_groups_alone(helm: Helm) -> None:
    (first, _) = helm.install(groups()).all("StatefulSet")
    alone = helm.install().one("Deployment")
    assert [p["name"] for p in container_of(pod_of(alone))["ports"]] == ["grpc", "health"]
    assert [p["name"] for p in container_of(pod_of(first))["ports"]][2:] == ["rendezvous", "plans"]
