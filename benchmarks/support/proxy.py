"""Envoy in front of a pod, by the chart's configuration."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from benchmarks.support.pod import ROOT, free_port, processor_seconds

_CONFIGURATION = ROOT / "deploy" / "helm" / "tokenpod" / "files" / "proxy.yaml"
_READY_SECONDS = 20


@dataclass(frozen=True)
class Proxy:
    """An Envoy that runs, at `address`."""

    address: str
    pid: int

    def processor(self) -> float:
        """Processor seconds so far."""
        return processor_seconds([self.pid])


@contextlib.contextmanager
def proxied(
    envoy: str,
    address: str,
    calls_per_second: float,
    *,
    most_calls: int,
    threads: int,
    cores: str | None = None,
) -> Iterator[Proxy]:
    """Run `envoy` in front of `address`.

    Args:
        calls_per_second: that generate, and are let through; as many may come at once.
        most_calls: at once behind it.
        threads: of the proxy.
        cores: that it may run on, as taskset writes them; None: those of this process.
    """
    port = free_port()
    filled = {
        "MAX_CONNECTIONS": 10_000,
        "MAX_STREAMS": 10_000,
        "MAX_CALLS": most_calls,
        "CALLS_PER_FILL": math.ceil(calls_per_second / 10),
        "FILL_INTERVAL": "0.1s",
        "BURST": math.ceil(calls_per_second),
        "RETRY_MS": 1000,
        "ADDRESS": "127.0.0.1",
        "PORT": port,
        "SERVER_PORT": address.rpartition(":")[2],
    }
    text = _CONFIGURATION.read_text()
    for name, value in filled.items():
        text = re.sub(rf"[$]{name}\b", str(value), text)
    pinned = ["taskset", "-c", cores] if cores else []
    command = [*pinned, envoy, "--concurrency", str(threads), "--disable-hot-restart"]
    with subprocess.Popen([*command, "--log-level", "error", "--config-yaml", text]) as process:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(timeout=_READY_SECONDS)
            yield Proxy(f"127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()
