"""A pod under more load than it can serve: goodput, refusals, probes, recovery.

Starts `tokenpod serve` (the demo model, unless flags after -- say otherwise). A closed loop finds
the peak: tokens per second with so many clients, each of which waits for its answer. Then comes
open-loop Poisson load of so many times that, by `tokenpod bench`, which does not wait. Requests are
random token ids, 16 to 64 in and 32 out, with a deadline. Figures are of the time after the first
seconds (--lead).

goodput   tokens per second of calls that ended OK, as a share of the peak
refusal   from a call to RESOURCE_EXHAUSTED or UNAVAILABLE, as the client sees it
health    a check every 50 ms while the load is on, on the health port and on the main port
recovery  from the load's end until a call, made every 100 ms, takes 1.2 times calm's median or less
late      how late the load's generator sent calls: refusals include its own delays

With --envoy the chart's proxy is in front of the pod while the loads are on, and lets through
--envoy-share times the calls per second of the peak.

The load is made on the same machine: give server and clients processors of their own
(`--server-cores 0-3 --client-cores 4-15 --processes 6`). Several front ends: `-- --front-ends 4`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.support.pod import Pod, bench, cores_of
from benchmarks.support.proxy import proxied
from benchmarks.support.report import Report
from benchmarks.support.timing import percentiles
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc

NEW_TOKENS = 32
REFUSALS = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
#: Seconds after a load in which it may recover.
AFTER = 8.0
SMOKE = {
    "cpu": "--seconds 2 --lead 1 --loads 2 --clients 16",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=15, help="of each load that count")
    parser.add_argument("--lead", type=float, default=6, metavar="SECONDS", help="before them")
    parser.add_argument("--loads", type=float, nargs="*", default=[1, 2, 10], metavar="X")
    parser.add_argument("--clients", type=int, default=128, help="of the closed loop")
    parser.add_argument("--deadline", type=float, default=5, metavar="SECONDS")
    parser.add_argument("--processes", type=int, default=1, help="that generate the load")
    parser.add_argument("--connections", type=int, default=8, help="of each of them")
    parser.add_argument("--server-cores", metavar="0-3", help="of the server and its processes")
    parser.add_argument("--client-cores", metavar="4-15", help="of everything else")
    parser.add_argument("--envoy", metavar="PATH", help="an Envoy to put in front of the pod")
    parser.add_argument("--envoy-share", type=float, default=1.5, metavar="X")
    parser.add_argument("--envoy-calls", type=int, default=2048, metavar="N", help="at once")
    parser.add_argument("--envoy-threads", type=int, default=2, metavar="N")
    parser.add_argument("--envoy-cores", metavar="6-7", help="of Envoy; else the clients'")
    parser.add_argument("flags", nargs="*", help="of tokenpod serve, after --")


def run(asked: argparse.Namespace, report: Report) -> None:
    if asked.client_cores:
        os.sched_setaffinity(0, cores_of(asked.client_cores))
    with (
        contextlib.ExitStack() as stack,
        Pod(asked.flags, cores=asked.server_cores) as pod,
        tempfile.TemporaryDirectory() as folder,
    ):
        scratch, seconds = Path(folder), asked.seconds
        closed = ("--concurrency", str(asked.clients), "--duration")
        load(pod.address, asked, scratch, *closed, str(asked.lead))  # kernels and caches get warm
        _, level = load(pod.address, asked, scratch, *closed, str(seconds))
        peak = level["tokens"]["output"] / level["duration_s"]
        address, proxy = pod.address, None
        if asked.envoy:
            most = asked.envoy_share * peak / NEW_TOKENS
            proxy = stack.enter_context(
                proxied(
                    asked.envoy,
                    address,
                    most,
                    most_calls=asked.envoy_calls,
                    threads=asked.envoy_threads,
                    cores=asked.envoy_cores,
                )
            )
            address = proxy.address
            report.note(f"Envoy lets {most:.0f} calls/s through, {asked.envoy_calls} at once")
        probes = Probes(pod, address)
        time.sleep(3)
        calm = statistics.median(took for _, took in probes.seen["call"])
        report.note(f"peak {peak:.0f} tokens/s; a call alone takes {1e3 * calm:.0f} ms")
        for times in asked.loads:
            rate = f"{times * peak / NEW_TOKENS:.3f}"
            whole = str(asked.lead + seconds)
            more = ("--request-rate", rate, "--duration", whole, "--deadline", str(asked.deadline))
            before, in_proxy = pod.processor()["front"], proxy.processor() if proxy else 0.0
            records, level = load(address, asked, scratch, *more)
            # Seconds of time.time(): when the load began to count, and when it ended.
            ended = level["ended_at"] - max(level["duration_s"] - asked.lead - seconds, 0.0)
            front = pod.processor()["front"] - before
            in_proxy = proxy.processor() - in_proxy if proxy else 0.0
            time.sleep(AFTER)
            counted = [each for each in records if each["due_s"] >= asked.lead]
            report.row(
                "loads; times are p50 / p99",
                load=f"{times:g}x",
                goodput_share=sum(each["code"] == "OK" for each in counted)
                * (NEW_TOKENS / seconds / peak),
                latency_ms=spread(
                    each["ended_s"] - each["due_s"] for each in counted if each["code"] == "OK"
                ),
                refusal_ms=spread(
                    each["ended_s"] - each["sent_s"] for each in counted if each["code"] in REFUSALS
                ),
                **{
                    f"{name}_ms": spread(probes.during(name, ended - seconds, ended))
                    for name in ("health port", "main port")
                },
                recovery_s=probes.recovered(ended, 1.2 * calm),
                late_ms=spread(each["sent_s"] - each["due_s"] for each in counted),
                front_us_a_call=1e6 * front / max(len(records), 1),
                proxy_us_a_call=1e6 * in_proxy / max(len(records), 1),
                codes=dict(Counter(each["code"] for each in counted)),
            )
            for (code, detail), count in others(counted).most_common(5):
                report.note(f"{times:g}x: {count} {code}: {detail[:120]}")
        probes.stop()


def others(records: Any) -> Counter[tuple[str, str]]:
    """Codes and texts of calls that ended neither well nor refused."""
    codes = ("OK", *REFUSALS)
    return Counter((r["code"], r.get("detail") or "") for r in records if r["code"] not in codes)


def load(address: str, asked: argparse.Namespace, scratch: Path, *more: str) -> tuple[Any, Any]:
    """Records of every call, and what `tokenpod bench` reports of the load."""
    file = scratch / "records.jsonl"
    own = ["--input-tokens", "uniform:16:64", "--output-tokens", str(NEW_TOKENS), "--warmup", "0"]
    own += ["--processes", str(asked.processes), "--connections", str(asked.connections)]
    found = bench(address, *own, "--records", str(file), *more, json_file=scratch / "bench.json")
    level = found["levels"][0] | {"ended_at": (scratch / "bench.json").stat().st_mtime}
    return [json.loads(line) for line in file.read_text().splitlines()], level


def spread(seconds: Any) -> str:
    """Median / 99th percentile in milliseconds."""
    values = list(seconds)
    return " / ".join(f"{1e3 * x:.1f}" for x in percentiles(values, 0.5, 0.99)) if values else "-"


class Probes:
    """Health checks and short calls from threads, all the time."""

    def __init__(self, pod: Pod, address: str) -> None:
        #: (time.time() at its begin, seconds) by name.
        self.seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._over = threading.Event()
        check = health_pb2.HealthCheckRequest()
        for name, at in (("health port", pod.health_address), ("main port", address)):
            health = health_pb2_grpc.HealthStub(grpc.insecure_channel(at))
            self._start(name, 0.05, lambda stub=health: stub.Check(check, timeout=10))  # type: ignore[misc]
        stub = rpc.TextGenerationServiceStub(grpc.insecure_channel(address))  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[11] * 16),
            stopping=pb.StoppingOptions(max_new_tokens=8, ignore_eos=True),
        )
        self._start("call", 0.1, lambda: list(stub.Generate(request, timeout=10)))

    def _start(self, name: str, every: float, act: Any) -> None:
        def repeat() -> None:
            while not self._over.wait(every):
                at, began = time.time(), time.perf_counter()
                try:
                    act()
                    took = time.perf_counter() - began
                except grpc.RpcError:
                    took = 10.0  # it counts as one that took as long as it was waited for
                self.seen[name].append((at, took))

        threading.Thread(target=repeat, daemon=True).start()

    def during(self, name: str, first: float, last: float) -> list[float]:
        """Seconds of those that began then."""
        return [took for at, took in self.seen[name] if first <= at <= last]

    def recovered(self, since: float, most: float) -> float | None:
        """Seconds until one took no more than this; None: none did."""
        return next(
            (at - since for at, took in self.seen["call"] if at >= since and took <= most), None
        )

    def stop(self) -> None:
        self._over.set()
