"""A server under more load than it can serve: goodput, refusals, probes, recovery.

    python benchmarks/overload.py [--server-cores 0-3] [--client-cores 4-15] [-- SERVE FLAGS]

Starts `tokenpod serve` (the demo model, unless flags say otherwise). A closed loop finds the peak:
tokens per second with so many clients, each of which waits for its answer. Then comes open-loop
Poisson load of so many times that, which does not wait, first of callers that take a refusal for
the end, then of callers that heed its hint: they come again after it, as long as their deadline
lets them. Each load is followed by calm (half of the peak). Requests are random token ids, 16 to 64
in and 32 out, with a deadline. Figures are of the time after the first seconds (--lead) of a load.

goodput   tokens per second of calls that ended OK, as a share of the peak
refusal   from a call to RESOURCE_EXHAUSTED or UNAVAILABLE, as the client sees it
probe     a health check while the load is on, on the health port and on the main port
recovery  from the end of the load until requests that arrive take 1.2 times the calm median or less
lag       how late a load generator's own event loop was: refusals include it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from overload_clients import NEW_TOKENS, Load, Segment, generate

#: Arrivals of so many seconds are one point of the recovery curve.
WINDOW_SECONDS = 0.25
PROBE_EVERY_SECONDS = 0.05
PROBE_SECONDS = 10.0


def main() -> None:
    arguments = parse()
    if arguments.client_cores:
        os.sched_setaffinity(0, cores(arguments.client_cores))
    with serving(arguments.flags, arguments.server_cores) as server:
        probes = Probes({"health port": server.health_address, "main port": server.address})
        with probes, Clients(arguments, server.address) as clients:
            report = measure(arguments, clients, probes)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15, help="of each load that count")
    parser.add_argument("--lead", type=float, default=6, metavar="SECONDS", help="before them")
    parser.add_argument("--loads", type=float, nargs="+", default=[1, 2, 10], metavar="X")
    parser.add_argument("--clients", type=int, default=128, help="of the closed loop")
    parser.add_argument("--deadline", type=float, default=5, metavar="SECONDS")
    parser.add_argument("--processes", type=int, default=1, help="that generate the load")
    parser.add_argument("--server-cores", metavar="0-3", help="of the server and its processes")
    parser.add_argument("--client-cores", metavar="4-15", help="of everything else")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="of tokenpod serve, after --")
    return parser.parse_args()


def cores(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    ends = [part.partition("-") for part in text.split(",")]
    return {core for low, _, high in ends for core in range(int(low), int(high or low) + 1)}


# -- the server --------------------------------------------------------------------------------


class Server(NamedTuple):
    """Where a server that has been started is reached, and its process."""

    address: str
    health_address: str
    pid: int


@contextlib.contextmanager
def serving(flags: Sequence[str], on_cores: str | None = None) -> Iterator[Server]:
    """A server that is SERVING, on those cores."""
    port, health = free_port(), free_port()
    command = ["taskset", "-c", on_cores] if on_cores else []
    command += [sys.executable, "-P", "-m", "tokenpod", "serve", "--hostname", "127.0.0.1"]
    command += ["--port", str(port), "--health-port", str(health), "--log-level", "warning"]
    command += ["--lame-duck-seconds", "0", *flags]
    with subprocess.Popen(command) as process:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{health}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                check = health_pb2.HealthCheckRequest(service="readiness")
                while stub.Check(check, wait_for_ready=True, timeout=60).status != 1:
                    time.sleep(0.05)
            yield Server(f"127.0.0.1:{port}", f"127.0.0.1:{health}", process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- load and probes ---------------------------------------------------------------------------


class Clients:
    """Processes that generate load together."""

    def __init__(self, arguments: argparse.Namespace, address: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(arguments.processes)]
        self._ours = [ours for ours, _ in pipes]
        given = (address, arguments.deadline)
        self._processes = [
            spawn.Process(target=generate, args=(*given, arguments.seed + at, theirs), daemon=True)
            for at, (_, theirs) in enumerate(pipes)
        ]

    def __enter__(self) -> Clients:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def run(self, *segments: Segment) -> list[Load]:
        """One load after the other; what became of the calls of each."""
        count = len(self._ours)
        for at, pipe in enumerate(self._ours):
            pipe.send([segment.share(at, count) for segment in segments])
        parts = [pipe.recv() for pipe in self._ours]
        return [Load.sum(each) for each in zip(*parts, strict=True)]


class Probes:
    """Health checks from a process of their own, all the time."""

    def __init__(self, addresses: dict[str, str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=probe, args=(addresses, theirs), daemon=True)
        self._seen: list[tuple[float, str, float]] = []

    def __enter__(self) -> None:
        self._process.start()

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def during(self, load: Load) -> dict[str, list[float]]:
        """Seconds that the probes of a phase took, by port."""
        self._ours.send("report")
        self._seen += self._ours.recv()
        found: dict[str, list[float]] = {}
        for at, name, took in self._seen:
            if load.began <= at <= load.ended:
                found.setdefault(name, []).append(took)
        return found


def probe(addresses: dict[str, str], parent: Connection) -> None:
    """Check each address in turn; send (moment, name, seconds) of all checks when asked."""
    seen: list[tuple[float, str, float]] = []
    stubs = {
        name: health_pb2_grpc.HealthStub(grpc.insecure_channel(address))
        for name, address in addresses.items()
    }
    while True:
        for name, stub in stubs.items():
            began = time.monotonic()
            try:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
                seen.append((began, name, time.monotonic() - began))
            except grpc.RpcError:
                # An unanswered probe counts as one that took as long as it was waited for.
                seen.append((began, name, PROBE_SECONDS))
        if parent.poll(PROBE_EVERY_SECONDS):
            parent.recv()
            parent.send(seen)
            seen = []


# -- measuring ---------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, clients: Clients, probes: Probes) -> dict[str, Any]:
    seconds, lead = arguments.seconds, arguments.lead
    closed = Segment(seconds, lead, clients=arguments.clients)
    # Kernels, caches and connections get warm.
    clients.run(Segment(lead, 0, clients=arguments.clients))
    (load,) = clients.run(closed)
    peak = load.goodput()
    if not peak:
        raise SystemExit(f"no call of the closed loop ended within {seconds:g} s: {load.codes}")
    calm = Segment(seconds / 2, 0, calls_per_second=peak / NEW_TOKENS / 2)
    (quiet,) = clients.run(calm)
    calm_median = statistics.median(quiet.latencies())
    print(f"peak {peak:.0f} tokens/s; calm median {1000 * calm_median:.0f} ms", end="; ")
    print("times in ms: median / 99th percentile\n")
    names = ["load", "hints", "goodput", "latency", "refusal", "probe, health port"]
    names += ["probe, main port", "recovery, s", "lag", "calls by code"]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    rows = [row(load, peak, probes, None)]
    show("closed", rows[0])
    for heeds in (False, True):
        for times in arguments.loads:
            rate = times * peak / NEW_TOKENS
            above = Segment(seconds, lead, calls_per_second=rate, heeds=heeds)
            load, after = clients.run(above, calm)
            rows.append(row(load, peak, probes, recovery(after, calm_median)))
            rows[-1] |= {"times_peak": times, "heeds": heeds}
            show(f"{times:g}x", rows[-1])
    return {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "command": sys.argv[1:],
        "peak_tokens_per_second": peak,
        "calm_median_ms": 1000 * calm_median,
        "loads": rows,
    }


def row(load: Load, peak: float, probes: Probes, recovered: float | None) -> dict[str, Any]:
    """One load. Milliseconds, as [median, 99th percentile]."""
    return {
        "goodput": load.goodput() / peak,
        "latency_ms": spread(load.latencies()),
        "refusal_ms": spread(load.refused),
        "probe_ms": {name: spread(took) for name, took in probes.during(load).items()},
        "recovery_seconds": recovered,
        "lag_ms": spread(load.lags),
        "codes": dict(sorted(load.codes.items())),
    }


def recovery(after: Load, calm_median: float) -> float | None:
    """Seconds until arrivals take 1.2 times the calm median or less; None if they never do.

    A refused call has no latency; a window without a finished one has not recovered.
    """
    windows: dict[int, list[float]] = {}
    for call in after.finished:
        at = int((call.arrived - after.began) / WINDOW_SECONDS)
        windows.setdefault(at, []).append(call.ended - call.arrived)
    for at, took in sorted(windows.items()):
        if at >= 0 and statistics.median(took) <= 1.2 * calm_median:
            return at * WINDOW_SECONDS
    return None


def spread(seconds: Sequence[float]) -> list[float]:
    """[median, 99th percentile] in milliseconds; empty for nothing."""
    if not seconds:
        return []
    ordered = sorted(seconds)
    return [1000 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99)]


def show(name: str, row: dict[str, Any]) -> None:
    def pair(values: Sequence[float]) -> str:
        return " / ".join(f"{value:.1f}" for value in values) or "-"

    cells = [name, {None: "-", False: "ignored", True: "heeded"}[row.get("heeds")]]
    cells += [f"{row['goodput']:.1%}", pair(row["latency_ms"]), pair(row["refusal_ms"])]
    cells += [pair(row["probe_ms"].get(port, [])) for port in ("health port", "main port")]
    recovered = row["recovery_seconds"]
    cells += ["-" if recovered is None else f"{recovered:.2f}", pair(row["lag_ms"])]
    cells.append(", ".join(f"{count} {code}" for code, count in Counter(row["codes"]).items()))
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
