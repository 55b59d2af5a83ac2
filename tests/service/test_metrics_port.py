"""The page that Prometheus fetches: its port, its names, and how processes add up to one pod."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from support.outside.certificates import make_authority
from support.pods.harness import free_port
from tokenpod.core.outputs import Ended, Load, StepCounts
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.rpc.certificates import expiry
from tokenpod.service.telemetry.histograms import Histograms, PageReader
from tokenpod.service.telemetry.instruments import Instruments
from tokenpod.service.telemetry.metrics_port import MetricsPort, Page
from tokenpod.service.telemetry.recorder import PodReadings
from tokenpod.service.telemetry.snapshots import (
    FrontEndSnapshots,
    answer_scrapes,
    snapshot_of,
    summed,
)

LOAD = Load(
    *(3, 5, 90, 1000, 600, 100),
    preemptions=7,
    prompt_tokens=50,
    cached_tokens=20,
    ended=Ended(stopped=5, length=4, aborted=2, ignored=1),
    steps=StepCounts(steps=10, busy_ns=2_000_000_000, rows=40, tokens=70),
)
READINGS = PodReadings(2.0, True, False, 8, 1024, 4096, 1e9)


class Process:
    """The instruments of one front end."""

    def __init__(self) -> None:
        histograms = Histograms()
        self.reader = PageReader(histograms)
        provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self.instruments = Instruments(provider.get_meter("test"), histograms)


def samples(text: str, parse: Any = text_string_to_metric_families) -> dict[Any, float]:
    """(name, sorted labels) -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def page(process: Process, names: str | None = None, accept: str = "") -> str:
    settings = ServerSettings(metrics_port=1, metrics_names=names)
    text, _ = Page(settings, process.reader, FrontEndSnapshots())(accept)
    return text.decode()


@contextlib.contextmanager
def listening(make: Any) -> Iterator[int]:
    port = free_port()
    opened = MetricsPort(f"127.0.0.1:{port}", make)
    yield port
    opened.close()


def fetch(port: int, path: str = "/metrics") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


# -- names -------------------------------------------------------------------------------------


def test_names_and_units_are_those_that_opentelemetry_gives_to_prometheus() -> None:
    process = Process()
    process.instruments.watch(lambda: LOAD)
    process.instruments.watch_pod(lambda: READINGS)
    process.instruments.record_call(0.02, {"rpc.method": "a/B"})
    found = samples(page(process))
    assert found["tokenpod_queue_requests", ()] == 5
    assert found["tokenpod_kv_utilization_ratio", ()] == pytest.approx(0.3)
    states = ("used", 300), ("evictable", 100), ("free", 600)
    for state, count in states:
        assert found["tokenpod_kv_tokens", (("tokenpod_kv_state", state),)] == count
    assert found["tokenpod_steps_total", ()] == 10
    assert found["tokenpod_steps_time_seconds_total", ()] == 2
    assert found["tokenpod_steps_rows_total", ()] == 40
    assert found["tokenpod_ready", ()] == 1
    assert found["tokenpod_engine_stalled", ()] == 0
    assert found["tokenpod_tls_certificate_expiry_seconds", ()] == 1e9
    method = ("rpc_method", "a/B")
    name = "rpc_server_call_duration_seconds"
    assert found[f"{name}_bucket", (("le", "0.01"), method)] == 0
    assert found[f"{name}_bucket", (("le", "0.025"), method)] == 1
    assert found[f"{name}_bucket", (("le", "+Inf"), method)] == found[f"{name}_count", (method,)]


def test_the_openmetrics_format_is_there_for_who_asks() -> None:
    process = Process()
    process.instruments.watch(lambda: LOAD)
    text = page(process, "vllm,tgi", "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    found = samples(text, parse_openmetrics)
    assert found["tokenpod_preemptions_total", ()] == 7
    model = (("engine", "0"), ("model_name", "demo"))
    assert found["vllm:num_requests_waiting", model] == 5


def test_labels_are_read_as_they_were_recorded() -> None:
    process, adapter = Process(), 'a "quoted"\\\nname'
    process.instruments.add_adapter_requests(adapter, 1)
    text = page(process, accept="application/openmetrics-text; version=1.0.0")
    labels = (("tokenpod_adapter", adapter),)
    assert samples(text, parse_openmetrics)["tokenpod_adapter_requests", labels] == 1


def test_a_page_of_all_names_takes_less_than_five_milliseconds_of_a_processor() -> None:
    process = Process()
    process.instruments.watch(lambda: LOAD)
    process.instruments.watch_pod(lambda: READINGS)
    for at in range(16):
        process.instruments.record_call(0.02, {"rpc.method": f"a/{at}"})
    settings = ServerSettings(metrics_port=1, metrics_names="vllm,tgi")
    make, times = Page(settings, process.reader, FrontEndSnapshots()), []
    for _ in range(20):
        began = time.thread_time()
        text, _ = make("")
        times.append(time.thread_time() - began)
    assert text.count(b"\n") > 400
    assert statistics.median(times) < 0.005


def test_names_of_vllm_and_tgi_come_only_when_asked_for() -> None:
    process = Process()
    process.instruments.watch(lambda: LOAD)
    process.instruments.add_adapter_requests("sql", 2)
    process.instruments.add_adapter_requests("gone", 1)
    process.instruments.add_adapter_requests("gone", -1)
    plain = page(process)
    assert "vllm" not in plain
    assert "tgi_" not in plain
    text = page(process, "vllm,tgi")
    found = samples(text)
    model = (("engine", "0"), ("model_name", "demo"))
    assert found["vllm:num_requests_waiting", model] == 5
    assert found["vllm:num_requests_running", model] == 3
    assert found["vllm:kv_cache_usage_perc", model] == pytest.approx(0.3)
    assert found["vllm:prefix_cache_hits_total", model] == 20
    assert found[
        "vllm:request_success_total", (*model[:1], ("finished_reason", "stop"), *model[1:])
    ]
    assert any(name == "vllm:cache_config_info" for name, _ in found)
    ((_, labels),) = [key for key in found if key[0] == "vllm:lora_requests_info"]
    assert dict(labels)["running_lora_adapters"] == "sql"
    assert found["tgi_queue_size", ()] == 5
    assert found["tgi_batch_current_size", ()] == 3
    assert "tgi_request_count 0.0" in text


# -- processes ---------------------------------------------------------------------------------


def test_front_ends_add_up_and_what_one_counted_stays_when_it_has_ended() -> None:
    first, second = Process(), Process()
    others = FrontEndSnapshots()
    end = others.add()
    answer_scrapes(end, second.reader)
    for process in (first, second, second):
        process.instruments.record_call(0.02, {"rpc.method": "a/B"})
    second.instruments.add_adapter_requests("sql", 1)

    def counts() -> tuple[int, float]:
        pod = summed([snapshot_of(first.reader), *others.read()])
        (calls,) = pod["rpc.server.call.duration"].counts.values()
        adapters = pod.get("tokenpod.adapter.requests")
        return sum(calls.buckets), sum(adapters.numbers.values()) if adapters else 0

    assert counts() == (3, 1)
    end.shutdown(socket.SHUT_RDWR)
    assert counts() == (3, 0), "requests of a process that has ended are under way no more"
    assert counts() == (3, 0)


def test_a_front_end_that_hangs_counts_as_it_did_and_is_heard_later() -> None:
    process, others = Process(), FrontEndSnapshots()
    end = others.add()
    released = threading.Event()
    process.instruments.record_lag(0.0)

    class Hanging:
        def get_metrics_data(self) -> Any:
            released.wait(60)
            return process.reader.get_metrics_data()

    answer_scrapes(end, Hanging())  # type: ignore[arg-type]
    assert others.read() == [{}, {}]
    process.instruments.record_lag(0.0)
    released.set()
    _, heard = others.read()
    (lag,) = heard["tokenpod.front_end.lag"].counts.values()
    assert sum(lag.buckets) == 2


# -- the port ----------------------------------------------------------------------------------


def test_the_page_is_under_metrics_and_nothing_else_is_there() -> None:
    with listening(lambda accept: (b"the page", "text/plain")) as port:
        assert fetch(port) == (200, b"the page")
        assert fetch(port, "/metrics?x=1")[0] == 200
        assert fetch(port, "/")[0] == 404


def test_clients_that_are_slow_to_ask_or_to_read_keep_nobody_away() -> None:
    large = b"x" * 50_000_000
    with listening(lambda accept: (large, "text/plain")) as port, contextlib.ExitStack() as stack:
        for at in range(20):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            # The first half does not finish its question, the others do not read the answer.
            slow.sendall(b"GET /metrics HTTP/1.1\r\n" + (b"\r\n" if at >= 10 else b"Ac"))
            if at >= 10:
                assert slow.recv(1) == b"H"
        status, body = fetch(port)
        assert (status, len(body)) == (200, len(large))


def test_a_client_that_asks_without_a_pause_gets_pages_that_were_made_before() -> None:
    made: list[int] = []

    def make(accept: str) -> tuple[bytes, str]:
        made.append(1)
        return b"%d" % len(made), "text/plain"

    with listening(make) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(200):
            connection.request("GET", "/metrics")
            connection.getresponse().read()
        connection.close()
    assert len(made) < 200


def test_a_port_in_use_is_an_error() -> None:
    with listening(lambda accept: (b"", "")) as port, pytest.raises(OSError, match="in use"):
        MetricsPort(f"127.0.0.1:{port}", lambda accept: (b"", ""))


# -- certificates ------------------------------------------------------------------------------


@pytest.mark.pod  # openssl is a process
def test_when_a_certificate_expires_is_read_from_its_file(tmp_path: Path) -> None:
    make_authority(tmp_path, "one")
    text = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", tmp_path / "one.pem"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    expected = ssl.cert_time_to_seconds(text.strip().removeprefix("notAfter="))
    assert expiry(tmp_path / "one.pem") == expected
    (tmp_path / "bad.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
    )
    assert expiry(tmp_path / "bad.pem") is None
    assert expiry(tmp_path / "none.pem") is None
