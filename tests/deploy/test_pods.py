"""A pod's settings and permissions, and how it starts and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.helm import CHART, Helm, Object
from deploy.manifests import container_of, mounts, pod_of, probes, settings_of, volumes

#: Seconds that the server allows itself to end: front ends 6, engines 5, exporters 4.5.
LEAVING = 15.5
LIMITED = {"resources": {"limits": {"cpu": "8", "memory": "8Gi"}}}


def pod(helm: Helm, values: Object | None = None, **more: Any) -> Object:
    return pod_of(helm.install(values, **more).one("Deployment"))


# -- Settings ------------------------------------------------------------------------------------


def test_the_server_understands_its_arguments(helm: Helm) -> None:
    settings = settings_of(pod(helm))
    assert (settings.model_id, settings.port, settings.health_port) == ("demo", 50051, 50052)
    assert settings.json_output


def test_settings_are_named_by_their_flags_in_camel_case(helm: Helm) -> None:
    server = {
        "maxBatchTotalTokens": 10_000_000,
        "maxTopNTokens": 7,
        "memoryFraction": 0.75,
        "jsonOutput": False,
        "logLevel": "debug",
        "startTimeout": 1e6,
    }
    settings = settings_of(pod(helm, {"server": server}))
    assert settings.max_batch_total_tokens == 10_000_000
    assert settings.max_top_n_tokens == 7
    assert settings.memory_fraction == 0.75
    assert settings.json_output is False
    assert settings.log_level == "debug"
    assert settings.start_timeout == 1e6


def test_extra_arguments_come_last_and_win(helm: Helm) -> None:
    values = {"server": {"maxBatchSize": 8}, "extraArgs": ["--max-batch-size=9"]}
    assert settings_of(pod(helm, values)).max_batch_size == 9


def test_the_metrics_port_and_its_names_are_those_of_the_values(helm: Helm) -> None:
    metrics = {"enabled": True, "names": ["vllm", "tgi"]}
    values = {"telemetry": {"metrics": metrics}, "ports": {"metrics": 9999}}
    settings = settings_of(pod(helm, values))
    assert (settings.metrics_port, settings.metrics_names) == (9999, "vllm,tgi")
    assert settings_of(pod(helm)).metrics_port == 0


def test_telemetry_names_the_release_and_the_pod(helm: Helm) -> None:
    values = {"telemetry": {"otlp": {"endpoint": "https://collector:4317", "sampleRatio": 0.25}}}
    given = pod(helm, values)
    settings = settings_of(given)
    assert settings.otlp_endpoint == "https://collector:4317"
    assert settings.otlp_service_name == "demo-tokenpod"
    assert settings.otlp_sample_ratio == 0.25
    names = [variable["name"] for variable in container_of(given)["env"]]
    # $(POD_NAME) is expanded only if it is defined before.
    assert names.index("POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES")


@pytest.mark.parametrize(
    ("cpu", "threads"), [("8", 7), ("1", 1), (4, 3), ("3500m", 2), ("500m", 1), ("2.5", 1)]
)
def test_threads_follow_the_cpu_limit(helm: Helm, cpu: object, threads: int) -> None:
    assert settings_of(pod(helm, {"resources": {"limits": {"cpu": cpu}}})).threads == threads


def test_threads_are_shared_by_a_pods_ranks(helm: Helm) -> None:
    args = container_of(pod(helm, {**LIMITED, "parallelism": {"tensor": 2}}))["args"]
    assert "--threads=3" in args


def test_threads_that_are_given_are_kept(helm: Helm) -> None:
    assert settings_of(pod(helm, {**LIMITED, "server": {"threads": 5}})).threads == 5


def test_without_a_limit_the_server_counts_cores_itself(helm: Helm) -> None:
    assert not any(arg.startswith("--threads") for arg in container_of(pod(helm))["args"])


# -- The model -----------------------------------------------------------------------------------


def test_a_claim_is_mounted_read_only_and_a_folder_in_it_served(helm: Helm) -> None:
    given = pod(helm, {"model": {"source": "pvc", "existingClaim": "models", "path": "a/b"}})
    assert volumes(given)["model"]["persistentVolumeClaim"] == {
        "claimName": "models",
        "readOnly": True,
    }
    assert mounts(given)["/model"]["readOnly"] is True
    assert "--model-id=/model/a/b" in container_of(given)["args"]


def test_a_model_of_a_cache_is_found_by_its_name(helm: Helm) -> None:
    model = {"source": "pvc", "existingClaim": "hub", "id": "org/name", "revision": "v2"}
    server = container_of(pod(helm, {"model": model}))
    assert {"--model-id=org/name", "--revision=v2"} <= set(server["args"])
    assert {"name": "HF_HUB_CACHE", "value": "/model"} in server["env"]


def test_a_folder_of_the_node_can_be_served(helm: Helm) -> None:
    given = pod(helm, {"model": {"source": "hostPath", "hostPath": "/srv/models"}})
    assert volumes(given)["model"]["hostPath"]["path"] == "/srv/models"


NFS = {"nfs": {"server": "files", "path": "/models"}}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": {"source": "hostPath", "hostPath": "/srv/models"}}, "model: hostPath"),
        ({"model": {"source": "volume", "volume": NFS}}, "model: nfs"),
        ({"extraVolumes": [{"name": "more", **NFS}]}, "more: nfs"),
    ],
)
def test_installing_what_the_restricted_standard_forbids_warns(
    helm: Helm, values: Object, named: str
) -> None:
    notes = helm.install(values).notes
    assert "WARNING: the restricted Pod Security Standard" in notes
    assert named in notes


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model": {"source": "pvc", "existingClaim": "models"}},
        {"model": {"source": "volume", "volume": {"emptyDir": {}}}},
        {"extraVolumes": [{"name": "more", "configMap": {"name": "c"}}]},
    ],
)
def test_installing_what_it_allows_does_not(helm: Helm, values: Object) -> None:
    assert "WARNING" not in helm.install(values).notes


def test_a_strategy_of_another_type_takes_no_numbers_along(helm: Helm) -> None:
    values = {"parallelism": {"pod": {"strategy": {"type": "Recreate"}}}}
    given = helm.install(values, as_set=True).one("Deployment")["spec"]["strategy"]
    assert given == {"type": "Recreate"}


def test_an_image_can_be_the_model(helm: Helm) -> None:
    model = {"source": "oci", "image": {"reference": "r/m:1"}}
    given = pod(helm, {"model": model}, kubernetes="1.35")
    assert volumes(given)["model"]["image"]["reference"] == "r/m:1"
    assert "--model-id=/model" in container_of(given)["args"]


def test_nothing_is_fetched_at_start(helm: Helm) -> None:
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container_of(pod(helm))["env"]


# -- What it may do ------------------------------------------------------------------------------

EVERYTHING = {
    **LIMITED,
    "tls": {"existingSecret": "tls", "mtls": {"enabled": True}},
    "auth": {"existingSecret": "tokens"},
    "helmTest": {"tlsSecret": "client"},
    "model": {"source": "pvc", "existingClaim": "models"},
}


@pytest.mark.parametrize("values", [{}, EVERYTHING])
def test_pods_meet_the_restricted_pod_security_standard(helm: Helm, values: Object) -> None:
    rendered = helm.install(values)
    (test,) = rendered.hooks
    for spec in (pod_of(rendered.one("Deployment"))["spec"], test["spec"]):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for each in spec["containers"]:
            context = each["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is True
            assert not context.get("privileged")
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
        for volume in spec["volumes"]:
            assert volume.keys() - {"name"} <= allowed


def test_a_platform_may_choose_the_user(helm: Helm) -> None:
    ours = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    context = pod(helm, {"podSecurityContext": ours})["spec"]["securityContext"]
    assert not context.keys() & ours.keys()
    assert context["runAsNonRoot"] is True


def test_pods_get_no_token_of_the_api_server(helm: Helm) -> None:
    rendered = helm.install()
    (test,) = rendered.hooks
    assert rendered.one("ServiceAccount")["automountServiceAccountToken"] is False
    assert pod_of(rendered.one("Deployment"))["spec"]["automountServiceAccountToken"] is False
    assert test["spec"]["automountServiceAccountToken"] is False


def test_what_the_server_writes_goes_to_volumes(helm: Helm) -> None:
    given = pod(helm)
    written = {"/tmp", "/var/cache/tokenpod", "/dev/shm"}
    assert {path for path, mount in mounts(given).items() if not mount.get("readOnly")} == written
    for variable in container_of(given)["env"]:
        if variable["name"].endswith("_DIR") or variable["name"] == "HOME":
            assert any(Path(variable["value"]).is_relative_to(path) for path in written)


def test_secrets_are_files_that_only_the_servers_group_reads(helm: Helm) -> None:
    given = pod(helm, EVERYTHING)
    args = container_of(given)["args"]
    for name in ("tls", "client-ca", "auth"):
        assert volumes(given)[name]["secret"]["defaultMode"] == 0o440
        assert mounts(given)[f"/etc/tokenpod/{name}"]["readOnly"] is True
    assert "--tls-cert=/etc/tokenpod/tls/tls.crt" in args
    assert "--tls-key=/etc/tokenpod/tls/tls.key" in args
    assert "--tls-client-ca=/etc/tokenpod/client-ca/ca.crt" in args
    assert "--auth-token-file=/etc/tokenpod/auth/tokens" in args
    # A mount of a single file would never see the tokens change.
    assert not any("subPath" in mount for mount in mounts(given).values())


def test_adapters_are_loaded_from_a_volume_by_those_who_show_a_token(helm: Helm) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "adapters"}}
    values = {
        "adapters": {"existingSecret": "operators", "volume": claim},
        "server": {"maxAdapters": 4, "loraAdapters": "sql=/adapters/sql"},
    }
    given = pod(helm, values)
    assert volumes(given)["adapters"] == {"name": "adapters", **claim}
    tokens = volumes(given)["adapter-tokens"]["secret"]
    assert (tokens["secretName"], tokens["defaultMode"]) == ("operators", 0o440)
    for path in ("/adapters", "/etc/tokenpod/adapters"):
        assert mounts(given)[path]["readOnly"] is True
    args = container_of(given)["args"]
    assert "--adapter-token-file=/etc/tokenpod/adapters/tokens" in args
    assert "--adapter-folder=/adapters" in args
    assert settings_of(given).max_adapters == 4


def test_a_volume_of_adapters_alone_lets_nobody_load_them(helm: Helm) -> None:
    given = pod(helm, {"adapters": {"volume": {"emptyDir": {}}}})
    assert "/adapters" in mounts(given)
    assert not any("adapter-token" in arg for arg in container_of(given)["args"])


def test_a_route_leads_to_the_client_service_and_a_pool_to_its_pods(helm: Helm) -> None:
    rendered = helm.install(
        {
            "grpcRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
            "service": {"port": 8033},
        }
    )
    service = rendered.one("Service", "demo-tokenpod")
    (rule,) = rendered.one("GRPCRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "demo-tokenpod", "port": 8033}]
    pool = rendered.one("InferencePool")["spec"]
    assert pool["selector"]["matchLabels"] == service["spec"]["selector"]
    container = container_of(pod_of(rendered.one("Deployment")))
    (grpc_port,) = [each for each in container["ports"] if each["name"] == "grpc"]
    assert pool["targetPorts"] == [{"number": grpc_port["containerPort"]}]
    assert pool["endpointPickerRef"]["name"] == "picker"


def test_the_cache_can_begin_with_the_images_own(helm: Helm) -> None:
    given = pod(helm, {"cache": {"copyFromImage": True}, "initContainers": [{"name": "more"}]})
    copy, more = given["spec"]["initContainers"]
    (cache,) = copy["volumeMounts"]
    assert copy["image"] == container_of(given)["image"]
    assert copy["securityContext"] == container_of(given)["securityContext"]
    assert mounts(given)[copy["command"][2].removesuffix("/.")]["name"] == cache["name"]
    assert copy["command"][3] == cache["mountPath"]
    assert more["name"] == "more"


def test_every_mount_has_its_volume(helm: Helm) -> None:
    rendered = helm.install(EVERYTHING)
    for given in (pod_of(rendered.one("Deployment")), *rendered.hooks):
        for each in given["spec"]["containers"]:
            mounted = {mount["name"] for mount in each["volumeMounts"]}
            assert mounted == {volume["name"] for volume in given["spec"]["volumes"]}


# -- Start, health, end --------------------------------------------------------------------------


def test_probes_ask_the_health_port_for_services_that_it_has(helm: Helm) -> None:
    values = {"ports": {"health": 8081}, "tls": {"existingSecret": "tls"}}
    asked = {name: probe["grpc"] for name, probe in probes(pod(helm, values)).items()}
    assert asked == {
        name: {"port": 8081, "service": name} for name in ("startup", "readiness", "liveness")
    }


@pytest.mark.parametrize("seconds", [600, 1805, 7.5])
def test_a_pod_may_start_longer_than_the_servers_own_limit(helm: Helm, seconds: float) -> None:
    given = pod(helm, {"server": {"startTimeout": seconds}})
    startup = probes(given)["startup"]
    # The server's own clock begins once it has been imported.
    spent = startup["periodSeconds"] * startup["failureThreshold"]
    assert seconds + 25 < spent < seconds + 35


def test_a_pod_serves_a_second_after_it_is_warm_and_is_out_of_the_service_in_three(
    helm: Helm,
) -> None:
    asked = probes(pod(helm))
    assert asked["startup"]["periodSeconds"] == 1
    assert asked["readiness"]["periodSeconds"] * (asked["readiness"]["failureThreshold"] + 1) <= 3


def test_what_liveness_ends_is_not_given_the_time_of_a_drain(helm: Helm) -> None:
    given = pod(helm)
    liveness = probes(given)["liveness"]
    assert liveness["terminationGracePeriodSeconds"] == 10
    assert given["spec"]["terminationGracePeriodSeconds"] > 90
    # Back within a minute, less the time to load.
    spent = liveness["periodSeconds"] * liveness["failureThreshold"]
    assert spent + liveness["terminationGracePeriodSeconds"] < 50


def test_liveness_waits_long_enough_for_readiness_to_go_first(helm: Helm) -> None:
    asked = probes(pod(helm))
    spent = {
        name: asked[name]["periodSeconds"] * asked[name]["failureThreshold"]
        for name in ("readiness", "liveness")
    }
    assert spent["liveness"] >= 4 * spent["readiness"]


@pytest.mark.parametrize("kubernetes", ["1.28", "1.29", "1.30", "1.34"])
@pytest.mark.parametrize(
    "drain",
    [
        {"preStopSeconds": 7, "lameDuckSeconds": 3, "timeoutSeconds": 40},
        {"preStopSeconds": 0, "lameDuckSeconds": 0, "timeoutSeconds": 0},
        {"preStopSeconds": 5, "lameDuckSeconds": 0.5, "timeoutSeconds": 12.5},
    ],
)
def test_the_grace_period_covers_every_part_of_the_drain(
    helm: Helm, drain: Object, kubernetes: str
) -> None:
    given = pod(helm, {"drain": drain}, kubernetes=kubernetes)
    hook = container_of(given).get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    settings = settings_of(given)
    asleep = hook.get("seconds", 0)
    before_refusing = asleep + settings.lame_duck_seconds
    assert before_refusing == drain["preStopSeconds"] + drain["lameDuckSeconds"]
    assert settings.graceful_termination_timeout == drain["timeoutSeconds"]
    grace = given["spec"]["terminationGracePeriodSeconds"]
    assert grace >= before_refusing + drain["timeoutSeconds"] + LEAVING
    assert bool(asleep) == (kubernetes >= "1.30" and drain["preStopSeconds"] > 0)


# -- Resources -----------------------------------------------------------------------------------


def test_a_rank_has_a_gpu_of_its_own(helm: Helm) -> None:
    values = {"gpu": {"enabled": True}, "parallelism": {"tensor": 4}, **LIMITED}
    server = container_of(pod(helm, values))
    assert server["resources"]["limits"] == {"cpu": "8", "memory": "8Gi", "nvidia.com/gpu": "4"}
    assert "--num-shard=4" in server["args"]


def test_one_rank_is_not_told_of_shards(helm: Helm) -> None:
    assert not any("shard" in arg for arg in container_of(pod(helm))["args"])


def test_shared_memory_has_the_size_that_was_asked_for(helm: Helm) -> None:
    given = pod(helm, {"shm": {"size": "16Gi"}})
    assert volumes(given)["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert "shm" not in volumes(pod(helm, {"shm": {"enabled": False}}))


def test_variables_of_services_stay_out(helm: Helm) -> None:
    # A Service called tokenpod would set TOKENPOD_PORT.
    assert pod(helm)["spec"]["enableServiceLinks"] is False


def test_the_chart_and_its_image_have_the_packages_version(helm: Helm) -> None:
    import tokenpod

    assert f"appVersion: {tokenpod.__version__}\n" in (CHART / "Chart.yaml").read_text()
    for values, variant in (({}, "cpu"), ({"gpu": {"enabled": True}}, "cuda")):
        name = f"tokenpod:{tokenpod.__version__}-{variant}"
        assert container_of(pod(helm, values))["image"] == name
        # As the documentation builds it.
        page = (CHART.parents[2] / "docs" / "image.md").read_text()
        assert f"docker build --tag {name} " in page
        assert f"REGISTRY/{name}" in (CHART.parents[2] / "docs" / "kubernetes.md").read_text()
