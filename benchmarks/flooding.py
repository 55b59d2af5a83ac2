"""What one connection that floods costs the others, and how bursts of calls end.

    python benchmarks/flooding.py [--server-cores 0-3] [--client-cores 4-15] [-- SERVE FLAGS]

Starts `tokenpod serve` on the demo model. For each kind of flood a thread of another process sends
frames as fast as it can, on a new connection whenever it is cut off; meanwhile one client calls
`Info` and asks the health port, 50 times a second at most. Then come bursts: calls of `Generate`
that are all made at once. Memory is the front end's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from overload import Server, cores, serving

from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))
import floods

MEGABYTE = 1024 * 1024
BURSTS = ((1, 1500), (8, 250), (24, 250))
#: Frames of each kind of flood.
KINDS = {"none": None, **floods.ONGOING, **floods.CLOSED}


def send(kind: str, port: int, stop: Any, told: Any) -> None:
    """Flood until told; says how many bytes and connections it took."""
    over, sent, connections = threading.Event(), 0, 0
    threading.Thread(target=lambda: (stop.recv(), over.set()), daemon=True).start()
    while not over.is_set():
        with contextlib.suppress(OSError):
            sent += floods.flood(port, KINDS[kind](), over)
        connections += 1
    told.send((sent, connections))


def memory(pid: int, name: str) -> float:
    """Of a process, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024 / 1e6


def milliseconds(seconds: list[float]) -> str:
    """Median and p99."""
    ordered = sorted(seconds)
    p99 = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
    return f"{statistics.median(ordered) * 1000:.1f} / {p99 * 1000:.1f}"


def measure(server: Server, kind: str, seconds: float) -> None:
    """Print a row for one kind of flood."""
    pid, flooding = server.pid, KINDS[kind] is not None
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = memory(pid, "VmRSS")
    stop_here, stop = multiprocessing.Pipe()
    told_here, told = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(
        target=send, args=(kind, int(server.address.rpartition(":")[2]), stop, told)
    )
    if flooding:
        process.start()
        time.sleep(2)
    codes: Counter[str] = Counter()
    calls: list[float] = []
    probes: list[float] = []
    with (
        grpc.insecure_channel(server.address) as channel,
        grpc.insecure_channel(server.health_address) as health,
    ):
        stub, probe = rpc.TextGenerationServiceStub(channel), health_pb2_grpc.HealthStub(health)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.perf_counter()
            try:
                stub.Info(pb.InfoRequest(), timeout=30)
                codes["OK"] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1
            calls.append(time.perf_counter() - began)
            began = time.perf_counter()
            probe.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=30)
            probes.append(time.perf_counter() - began)
            time.sleep(0.02)
    sent, connections = 0, 0
    if flooding:
        stop_here.send("stop")
        sent, connections = told_here.recv()
        process.join()
    peak = memory(pid, "VmHWM")
    time.sleep(3)
    print(
        f"{kind:26} {sent / 1e6:7.1f} {connections:6} {dict(codes)!s:18}"
        f" {milliseconds(calls):>14} {milliseconds(probes):>14}"
        f" {before:6.0f} {peak:6.0f} {memory(pid, 'VmRSS'):6.0f}",
        flush=True,
    )


def main() -> None:
    """Floods, then bursts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each flood")
    parser.add_argument("--server-cores", metavar="0-3", help="of the server and its processes")
    parser.add_argument("--client-cores", metavar="4-15", help="of everything else")
    parser.add_argument("flags", nargs="*", help="flags of tokenpod serve")
    arguments = parser.parse_args()
    if arguments.client_cores:
        os.sched_setaffinity(0, cores(arguments.client_cores))
    with serving(arguments.flags, arguments.server_cores) as server:
        columns = f"{'flood':26} {'MB':>7} {'conns':>6} {'calls':18}"
        times = f"{'call p50/p99':>14} {'probe p50/p99':>14}"
        print(columns, times, f"{'MB':>6} {'peak':>6} {'after':>6}")
        for kind in KINDS:
            measure(server, kind, arguments.seconds)
        for connections, calls in BURSTS:
            began = time.perf_counter()
            ends = asyncio.run(floods.burst(server.address, connections, calls))
            took = time.perf_counter() - began
            said = {f"{code}{' with a hint' * hint}": count for (code, hint), count in ends.items()}
            print(f"{connections} x {calls} calls at once: {said} in {took:.1f} s")


if __name__ == "__main__":
    main()
