"""Dashboard, rules and compose file name what a real pod shows, and Prometheus takes them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.helm import CHART, Helm
from support.clients.public_api import generate, text_request
from support.outside.certificates import make_authority, make_certificate
from support.pods.harness import ServerProcess, free_port, serve
from support.waiting import wait_for
from tokenpod.service.config.sources import ServerSettings
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

FOLDER = CHART.parents[1] / "observability"
OPERATIONS = (CHART.parents[2] / "docs" / "operations.md").read_text()
RULES = CHART / "files" / "rules.yaml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
PANELS = {
    p["title"]: [t["expr"] for t in p["targets"]] for p in DASHBOARD["panels"] if "targets" in p
}
#: What a pod shows only once it drafts, or once somebody names an adapter.
OCCASIONAL = {
    "tokenpod_draft_tokens_total",
    "tokenpod_draft_accepted_tokens_total",
    "tokenpod_adapter_requests",
}
#: What Prometheus adds to a pod's metrics.
POD = {"namespace": "models", "pod": "demo-tokenpod-0"}
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


def queries() -> list[str]:
    """Of all panels and rules, with Grafana's variables filled in."""
    found = [expr for exprs in PANELS.values() for expr in exprs]
    found += [rule["expr"] for group in GROUPS for rule in group["rules"]]
    return [filled(expr) for expr in found]


def filled(expr: str) -> str:
    for variable, value in (("$__rate_interval", "1m"), ("$job", ".*"), ("$instance", ".*")):
        expr = expr.replace(variable, value)
    return expr


def metrics_in(expr: str) -> set[str]:
    """Names of the metrics that a query selects."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", expr)
    bare = re.sub(r"\b(by|without|on|ignoring) *\([^)]*\)", "", bare)
    return set(re.findall(r"\b(?:tokenpod|gen_ai|rpc)[a-z0-9_:]+", bare))


@dataclass
class Pod:
    server: ServerProcess
    metrics_port: int
    authority: Path

    def load(self, calls: int) -> None:
        """Calls that end well, one that is cancelled and one that is refused."""
        trusted = grpc.ssl_channel_credentials(self.authority.read_bytes())
        with grpc.secure_channel(self.server.address, trusted) as channel:
            stub: Any = GenerationServiceStub(channel)
            for _ in range(calls):
                generate(stub, text_request("import os\n", stopping={"max_new_tokens": 20}))
            call = stub.Generate(text_request("x", stopping={"max_new_tokens": 500}), timeout=60)
            next(call)
            call.cancel()
            with pytest.raises(grpc.RpcError):
                generate(stub, text_request("x", stopping={"max_new_tokens": 10**8}))

    def names(self) -> set[str]:
        """Of all samples on the page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {sample.name for family in families for sample in family.samples}


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    folder, port = tmp_path_factory.mktemp("tls"), free_port()
    make_authority(folder, "ca")
    make_certificate(folder, "server", "ca")
    tls = ["--tls-cert", f"{folder}/server.pem", "--tls-key", f"{folder}/server.key"]
    with serve("--metrics-port", str(port), *tls) as server:
        loaded = Pod(server, port, folder / "ca.pem")
        loaded.load(5)
        wait_for(lambda: "tokenpod_calls_failed_total" in loaded.names())
        yield loaded


def test_every_metric_of_dashboard_and_rules_is_on_a_loaded_pods_page(pod: Pod) -> None:
    shown = pod.names() | OCCASIONAL
    shown |= {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
    named = set.union(*map(metrics_in, queries()))
    assert len(named) > 30
    assert named - shown == set()


def example(name: str) -> tuple[Any, str]:
    """The autoscaling of an example of the chart, and what its comment has behind `#`."""
    text = (CHART / "examples" / f"autoscaled-{name}.yaml").read_text()
    comment = [line[1:] for line in text.splitlines() if line.startswith("#")]
    return yaml.safe_load(text)["autoscaling"][name], "\n".join(comment)


def asked_by_keda() -> list[str]:
    """The queries that KEDA asks by the example."""
    return [trigger["metadata"]["query"] for trigger in example("keda")[0]["triggers"]]


def asked_by_the_adapter() -> list[str]:
    """The queries that prometheus-adapter asks for the example's HorizontalPodAutoscaler."""
    scaler, comment = example("hpa")
    (rule,) = yaml.safe_load(comment[comment.index("   rules:") :])["rules"]["custom"]
    series = re.fullmatch(r"\{__name__=~\"(.+)\",pod!=\"\"\}", rule["seriesQuery"])
    assert series is not None
    found = []
    for metric in scaler["metrics"]:
        name = metric["pods"]["metric"]["name"]
        assert re.fullmatch(series[1], name)
        query: str = rule["metricsQuery"].replace("<<.Series>>", name)
        query = query.replace("<<.LabelMatchers>>", ",".join(f'{k}="{v}"' for k, v in POD.items()))
        found.append(query.replace("<<.GroupBy>>", "pod"))
    return found


def test_the_examples_scale_by_queue_and_memory_that_a_loaded_pod_shows(pod: Pod) -> None:
    both = {"tokenpod_queue_requests", "tokenpod_kv_utilization_ratio"}
    assert both <= pod.names()
    for queries in (asked_by_keda(), asked_by_the_adapter()):
        assert len(queries) == 2
        assert set.union(*map(metrics_in, queries)) == both


def test_every_alert_has_a_severity_a_summary_and_a_place_in_the_runbooks() -> None:
    alerts = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
    assert len(alerts) >= 10
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        assert f"`{alert['alert']}`" in OPERATIONS


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(taken)) == len(taken)


def test_the_compose_file_mounts_what_is_there_and_the_pod_takes_its_flags() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert set(services) == {"pod", "collector", "prometheus", "grafana"}
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert (FOLDER / volume.split(":")[0]).exists(), volume
    flags = [flag.removeprefix("--").partition("=") for flag in services["pod"]["command"][1:]]
    given = {name.replace("-", "_"): value or "true" for name, _, value in flags}
    settings = ServerSettings.model_validate(given)
    scrapes = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    assert scrapes[0]["static_configs"][0]["targets"] == [f"pod:{settings.metrics_port}"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_takes_the_rules_and_each_alert_fires_for_what_it_is_about() -> None:
    for command in (["check", "rules", RULES], ["test", "rules", FOLDER / "rules_test.yaml"]):
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = (FOLDER / "rules_test.yaml").read_text()
    for group in GROUPS:
        for rule in group["rules"]:
            assert rule.get("alert", "") in tested


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
def test_prometheus_evaluates_every_query_over_a_loaded_pod(pod: Pod, tmp_path: Path) -> None:
    with scraping(pod, tmp_path) as ask:
        wait_for(lambda: bool(ask("tokenpod_ready")))
        pod.load(3)
        # A rate needs two scrapes, and what was counted in between.
        wait_for(lambda: bool(ask("rate(gen_ai_server_time_to_first_token_seconds_count[1m]) > 0")))
        for title, exprs in PANELS.items():
            for expr in exprs:
                found = ask(filled(expr))
                assert found or metrics_in(expr) & OCCASIONAL, f"{title}: {expr}"
        for expr in queries():
            ask(expr)
        # KEDA takes a single value, the adapter one for each pod.
        for expr in asked_by_keda():
            (value,) = ask(expr)
            assert float(value["value"][1]) >= 0
        for expr in asked_by_the_adapter():
            (value,) = ask(expr)
            assert value["metric"] == {"pod": POD["pod"]}


@contextlib.contextmanager
def scraping(pod: Pod, folder: Path) -> Iterator[Any]:
    """Prometheus, which fetches this pod's page every half second; what it answers to a query."""
    port = free_port()
    target = f"127.0.0.1:{pod.metrics_port}"
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        # As the chart's PodMonitor has it, of a release called demo.
        "scrape_configs": [
            {"job_name": "demo", "static_configs": [{"targets": [target], "labels": POD}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [str(PROMETHEUS), f"--config.file={folder}/prometheus.yaml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(expr: str) -> list[Any]:
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expr})
        with urllib.request.urlopen(url) as answer:
            return list(json.load(answer)["data"]["result"])

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return ask("1") is not None
        except OSError:
            time.sleep(0.1)
            return False

    try:
        wait_for(answers)
        yield ask
    finally:
        process.kill()
        process.wait()


# -- the chart -----------------------------------------------------------------------------------

METRICS = {"enabled": True, "names": ["vllm", "tgi"]}
WATCHED = {
    "telemetry": {
        "metrics": {
            **METRICS,
            "podMonitor": {"enabled": True, "labels": {"release": "prom"}, "interval": "15s"},
            "prometheusRule": {"enabled": True, "labels": {"release": "prom"}},
            "dashboard": {"enabled": True},
        }
    }
}


def test_the_chart_renders_monitor_rules_and_dashboard(helm: Helm) -> None:
    rendered = helm.install(WATCHED)
    monitor = rendered.one("PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prom"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    pod = rendered.one("Deployment")["spec"]["template"]
    (port,) = [
        each
        for each in pod["spec"]["containers"][0]["ports"]
        if each["name"] == endpoint["port"] == "metrics"
    ]
    assert port["containerPort"] == 9464
    selector = monitor["spec"]["selector"]["matchLabels"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    assert monitor["spec"]["jobLabel"] in pod["metadata"]["labels"]
    assert rendered.one("PrometheusRule")["spec"]["groups"] == GROUPS
    dashboards = rendered.one("ConfigMap", "demo-tokenpod-dashboard")
    assert json.loads(dashboards["data"]["tokenpod.json"]) == DASHBOARD
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_chart_opens_no_metrics_port_unless_it_is_asked_to(helm: Helm) -> None:
    rendered = helm.install({})
    ports = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert [each["name"] for each in ports] == ["grpc", "health"]
    for kind in ("PodMonitor", "PrometheusRule", "ConfigMap"):
        assert not rendered.all(kind)
