"""A server under more load than it can serve: goodput, refusals, probes, recovery.

    python benchmarks/overload.py [--seconds 20] [--loads 1 2 10] [--json OUT] [-- SERVE FLAGS]

Starts `tokenpod serve` (the demo model, unless flags say otherwise). A closed loop finds the
capacity: requests finished per second with as many clients as the server takes requests. Then
comes open-loop Poisson load of so many times the capacity, which does not wait for answers. Each
load is followed by calm (half of the capacity). Requests are random token ids, 16 to 64 in and 8 to
24 out. Probes come from a process of their own, 20 a second on each port.

goodput   requests finished per second of load, as a share of capacity
refusal   from the call to RESOURCE_EXHAUSTED or UNAVAILABLE, as the client sees it
probe     a health check while the load is on, on the health port and on the main port
recovery  from the end of the load until requests that arrive take 1.2 times the calm median or less
lag       how late the load generator's own event loop was: refusals include it
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import json
import multiprocessing
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenpod.protos.generate.v3 import generate_pb2 as pb
from tokenpod.protos.generate.v3 import generate_pb2_grpc as rpc

REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
CHANNELS = 4
#: Arrivals of so many seconds are one point of the recovery curve.
WINDOW_SECONDS = 0.25
PROBE_EVERY_SECONDS = 0.05
PROBE_SECONDS = 10.0


def main() -> None:
    arguments = parse()
    with serving(arguments.flags) as (address, health_address):
        probes = Probes({"health port": health_address, "main port": address})
        with probes:
            report = asyncio.run(measure(arguments, address, probes))
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20, help="of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=[1, 2, 10], metavar="X")
    parser.add_argument("--clients", type=int, default=128, help="of the closed loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="of tokenpod serve, after --")
    return parser.parse_args()


# -- the server --------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A server that is SERVING: its address and its health port's."""
    port, health = free_port(), free_port()
    command = [sys.executable, "-P", "-m", "tokenpod", "serve", "--hostname", "127.0.0.1"]
    command += ["--port", str(port), "--health-port", str(health), "--log-level", "warning"]
    command += ["--lame-duck-seconds", "0", *flags]
    with subprocess.Popen(command) as process:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{health}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                check = health_pb2.HealthCheckRequest(service="readiness")
                while stub.Check(check, wait_for_ready=True, timeout=60).status != 1:
                    time.sleep(0.05)
            yield f"127.0.0.1:{port}", f"127.0.0.1:{health}"
        finally:
            process.send_signal(signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- load --------------------------------------------------------------------------------------


@dataclass
class Load:
    """What became of the calls of one phase. Times in seconds of CLOCK_MONOTONIC."""

    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    #: (arrival, end) of calls that finished.
    finished: list[tuple[float, float]] = field(default_factory=list)
    #: Seconds that a refusal took.
    refused: list[float] = field(default_factory=list)
    other: dict[str, int] = field(default_factory=dict)
    lags: list[float] = field(default_factory=list)

    def rate(self) -> float:
        """Calls that finished within the phase, per second."""
        return sum(end <= self.ended for _, end in self.finished) / (self.ended - self.began)

    def latencies(self) -> list[float]:
        return [end - arrival for arrival, end in self.finished]


class Client:
    """Calls on a few connections."""

    def __init__(self, address: str, seed: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options) for _ in range(CHANNELS)]
        self._stubs = [rpc.TextGenerationServiceStub(channel) for channel in self._channels]
        self.chance = random.Random(seed)

    async def call(self, load: Load) -> None:
        """One request, noted in `load`."""
        chance = self.chance
        ids = [chance.randint(10, 3000) for _ in range(chance.randint(16, 64))]
        stopping = pb.StoppingOptions(max_new_tokens=chance.randint(8, 24), ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), stopping=stopping)
        arrived = time.monotonic()
        try:
            async for _ in chance.choice(self._stubs).Generate(request, timeout=120):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() in REFUSALS:
                load.refused.append(time.monotonic() - arrived)
            else:
                load.other[error.code().name] = load.other.get(error.code().name, 0) + 1
        else:
            load.finished.append((arrived, time.monotonic()))

    async def closed(self, clients: int, seconds: float) -> Load:
        """`clients` that each wait for an answer before they ask again."""
        load = Load()
        end = load.began + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.call(load)

        await asyncio.gather(*(client() for _ in range(clients)))
        load.ended = end
        return load

    async def poisson(self, rate: float, seconds: float) -> tuple[Load, set[asyncio.Task[None]]]:
        """Calls at random moments, `rate` a second; those under way at the end go on."""
        load, calls = Load(), set()
        at = load.began
        while (at := at + self.chance.expovariate(rate)) < load.began + seconds:
            now = time.monotonic()
            if at > now:
                await asyncio.sleep(at - now)
                load.lags.append(time.monotonic() - at)
            else:
                load.lags.append(now - at)
                # Behind: let the calls that exist move before there are more.
                await asyncio.sleep(0)
            task = asyncio.create_task(self.call(load))
            calls.add(task)
            task.add_done_callback(calls.discard)
        load.ended = time.monotonic()
        return load, calls

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


# -- probes ------------------------------------------------------------------------------------


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


async def measure(arguments: argparse.Namespace, address: str, probes: Probes) -> dict[str, Any]:
    client = Client(address, arguments.seed)
    # Kernels, caches and connections get warm.
    await client.closed(arguments.clients, 5)
    capacity = (await client.closed(arguments.clients, arguments.seconds)).rate()
    note(f"capacity: {capacity:.1f} requests/s")
    calm, calls = await client.poisson(capacity / 2, arguments.seconds / 2)
    await asyncio.gather(*calls)
    calm_median = statistics.median(calm.latencies())
    note(f"calm: median {1000 * calm_median:.0f} ms")
    phases = []
    for times in arguments.loads:
        load, calls = await client.poisson(times * capacity, arguments.seconds)
        after, later = await client.poisson(capacity / 2, arguments.seconds / 2)
        await asyncio.gather(*calls, *later)
        phase = Phase.of(times, load, capacity, probes.during(load), recovery(after, calm_median))
        phases.append(asdict(phase))
        note(f"{times:g}x: done")
    await client.close()
    return {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "flags": arguments.flags,
        "capacity_requests_per_second": capacity,
        "calm_median_ms": 1000 * calm_median,
        "loads": phases,
    }


@dataclass(frozen=True)
class Phase:
    """One load. Milliseconds, as [median, 99th percentile]."""

    times_capacity: float
    offered_per_second: float
    goodput: float
    latency_ms: list[float]
    refused: int
    refusal_ms: list[float]
    probe_ms: dict[str, list[float]]
    recovery_seconds: float | None
    lag_ms: list[float]
    other: dict[str, int]

    @classmethod
    def of(
        cls,
        times: float,
        load: Load,
        capacity: float,
        probed: dict[str, list[float]],
        recovered: float | None,
    ) -> Phase:
        return cls(
            times_capacity=times,
            offered_per_second=len(load.lags) / (load.ended - load.began),
            goodput=load.rate() / capacity,
            latency_ms=spread(load.latencies()),
            refused=len(load.refused),
            refusal_ms=spread(load.refused),
            probe_ms={name: spread(took) for name, took in probed.items()},
            recovery_seconds=recovered,
            lag_ms=spread(load.lags),
            other=load.other,
        )


def recovery(after: Load, calm_median: float) -> float | None:
    """Seconds until arrivals take 1.2 times the calm median or less; None if they never do.

    A refused call has no latency; a window without a finished one has not recovered.
    """
    finished = sorted(after.finished)
    arrivals = [arrival for arrival, _ in finished]
    begin = after.began
    while begin < after.ended:
        low = bisect.bisect_left(arrivals, begin)
        high = bisect.bisect_left(arrivals, begin + WINDOW_SECONDS)
        took = [end - arrival for arrival, end in finished[low:high]]
        if took and statistics.median(took) <= 1.2 * calm_median:
            return begin - after.began
        begin += WINDOW_SECONDS / 5
    return None


def spread(seconds: Sequence[float]) -> list[float]:
    """[median, 99th percentile] in milliseconds; empty for nothing."""
    if not seconds:
        return []
    ordered = sorted(seconds)
    return [1000 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99)]


def show(report: dict[str, Any]) -> None:
    def pair(values: Sequence[float]) -> str:
        return " / ".join(f"{value:.1f}" for value in values) or "-"

    print(f"capacity {report['capacity_requests_per_second']:.1f} requests/s, ", end="")
    print(f"calm median {report['calm_median_ms']:.0f} ms; times in ms: median / 99th percentile\n")
    names = ["load", "offered/s", "goodput", "latency", "refused", "refusal"]
    names += ["probe, health port", "probe, main port", "recovery, s", "lag"]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for load in report["loads"]:
        cells = [f"{load['times_capacity']:g}x", f"{load['offered_per_second']:.0f}"]
        cells += [f"{load['goodput']:.1%}", pair(load["latency_ms"]), str(load["refused"])]
        cells += [pair(load["refusal_ms"])]
        cells += [pair(load["probe_ms"].get(name, [])) for name in ("health port", "main port")]
        recovered = load["recovery_seconds"]
        cells += ["never" if recovered is None else f"{recovered:.2f}", pair(load["lag_ms"])]
        print("| " + " | ".join(cells) + " |")
        if load["other"]:
            print(f"\nunexpected: {load['other']}\n")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
