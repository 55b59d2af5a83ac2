"""What a server's processes take: at rest, under stalled readers, and over time.

    python benchmarks/memory.py [--stalled 200] [--warm 60] [--soak 60] [--json OUT] [-- FLAGS]

The full soak, three quarters of an hour, with a pool that fills while it gets warm:

    python benchmarks/memory.py --warm 600 --soak 1800 -- --max-batch-total-tokens 131072

Starts `tokenpod serve` (the demo model, unless flags say otherwise) and prints the resident memory
of the engine and of the front ends after each phase:

rest      nothing has been asked
warm      after so many seconds of random requests from 32 clients (--clients)
soak      in so many more seconds of random requests, six times
stalled   while so many readers have stopped reading, the most that was seen
after     all of them have lost their streams, and random requests have run for 10 s
again     stalled readers once more, and what is left after them

A stalled reader has a connection of its own with a window of 64 kB, and asks for as much as a
stream can hold: top tokens and log probabilities of 1,900 tokens (--tokens).

Keys and values lie in the engine's pool, which has its size from the start; on a CPU its pages come
when they are first written. So the engine is shown without the pool, and the pool by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from overload import serving

from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc

#: Times that a soak is looked at.
LOOKS = 6
#: Ids of the demo model's vocabulary that prompts are drawn from.
IDS = range(300, 4000)
#: Seconds in which a reader that has stopped loses its stream, at the latest.
STALL_SECONDS = 900.0
SETTLE_SECONDS = 10.0


def main() -> None:
    arguments = parse()
    with serving(arguments.flags) as server:
        report = asyncio.run(measure(arguments, server.address, server_processes(server.pid)))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stalled", type=int, default=200, help="readers at once")
    parser.add_argument("--tokens", type=int, default=1900, help="that each of them asks for")
    parser.add_argument("--warm", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--soak", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--clients", type=int, default=32, help="that make random requests")
    parser.add_argument("--pause", type=float, default=0, metavar="SECONDS", help="of a client")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="of tokenpod serve, after --")
    return parser.parse_args()


# -- processes ---------------------------------------------------------------------------------


def server_processes(server: int) -> dict[str, list[int]]:
    """Process ids of a server, by what they are."""
    found: dict[str, list[int]] = {"engine": [], "front ends": [server]}
    for pid in children(Path(f"/proc/{server}")):
        front = b"front_end" in Path(f"/proc/{pid}/cmdline").read_bytes()
        found["front ends" if front else "engine"].append(pid)
    return found


def children(process: Path) -> list[int]:
    lists = process.glob("task/*/children")
    return [int(pid) for listed in lists for pid in listed.read_text().split()]


def resident(pids: list[int]) -> float:
    """MB that processes have in memory."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def pool(pids: list[int]) -> float:
    """MB of KV pools: the memory for which numpy asks for huge pages (flag `hg`)."""
    total = 0
    for pid in pids:
        here = 0
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Rss":
                here = int(value.split()[0])
            elif name == "VmFlags" and "hg" in value.split():
                total += here
    return total * 1024 / 1e6


@dataclass
class Watch:
    """Samples memory once a second; the most of each kind."""

    processes: dict[str, list[int]]
    most: dict[str, float] = field(default_factory=dict)

    def now(self) -> dict[str, float]:
        engine = self.processes["engine"]
        keys_and_values = pool(engine)
        return {
            "engine": resident(engine) - keys_and_values,
            "its pool": keys_and_values,
            "front ends": resident(self.processes["front ends"]),
        }

    async def run(self) -> None:
        while True:
            for kind, value in self.now().items():
                self.most[kind] = max(self.most.get(kind, 0.0), value)
            await asyncio.sleep(1.0)


# -- load --------------------------------------------------------------------------------------


async def measure(
    arguments: argparse.Namespace, address: str, processes: dict[str, list[int]]
) -> dict[str, Any]:
    watch = Watch(processes)
    report: dict[str, Any] = {"command": sys.argv[1:], "MB": {}}
    began = time.monotonic()

    def note(phase: str, seen: dict[str, float]) -> None:
        report["MB"][phase] = {kind: round(value, 1) for kind, value in seen.items()}
        figures = "  ".join(f"{kind} {value:7.1f} MB" for kind, value in seen.items())
        print(f"{phase:10}{figures}  ({time.monotonic() - began:.0f} s)", flush=True)

    load = Load(address, arguments.clients, arguments.pause, random.Random(arguments.seed))
    note("rest", watch.now())
    await load.run(arguments.warm)
    note("warm", watch.now())
    for look in range(1, LOOKS + 1):
        await load.run(arguments.soak / LOOKS)
        note(f"soak {look}", watch.now())
    for phase, after in (("stalled", "after"), ("again", "at last")):
        watch.most.clear()
        watching = asyncio.create_task(watch.run())
        lost = await stall(address, arguments.stalled, arguments.tokens, processes["engine"])
        watching.cancel()
        note(phase, watch.most)
        print(f"          {lost}", flush=True)
        await load.run(SETTLE_SECONDS)
        note(after, watch.now())
    report["requests"] = load.requests
    return report


@dataclass
class Load:
    """Random requests from so many clients, one after the other each; one in ten is cancelled."""

    address: str
    clients: int
    pause: float
    draw: random.Random
    requests: int = 0

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds

        async def client() -> None:
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(self.address, options) as channel:
                stub = rpc.TextGenerationServiceStub(channel)
                while time.monotonic() < end:
                    await one(stub, self.draw)
                    self.requests += 1
                    await asyncio.sleep(self.pause)

        await asyncio.gather(*(client() for _ in range(self.clients)))


async def one(stub: Any, draw: random.Random) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=draw.choices(IDS, k=draw.randint(8, 400))),
        stopping=pb.StoppingOptions(max_new_tokens=draw.randint(1, 120), ignore_eos=True),
        sampling=pb.SamplingOptions(temperature=1.0, seed=draw.randrange(1 << 30)),
    )
    call = stub.Generate(request, timeout=120)
    leave = draw.random() < 0.1
    try:
        async for _ in call:
            if leave:
                call.cancel()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        if not leave:
            raise


async def stall(address: str, readers: int, tokens: int, engine: list[int]) -> dict[str, int]:
    """So many readers that stop after their first event; how their streams ended, by code."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    request = pb.GenerateRequest(
        text="import os\n",
        stopping=pb.StoppingOptions(max_new_tokens=tokens, ignore_eos=True),
        sampling=pb.SamplingOptions(temperature=1.0, n=1),
        output=pb.OutputOptions(stream=True, top_n_tokens=5, logprobs=True),
    )
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(readers)]
    codes: dict[str, int] = {}
    try:
        calls = [
            rpc.TextGenerationServiceStub(channel).Generate(request, timeout=STALL_SECONDS)
            for channel in channels
        ]
        await asyncio.gather(*(call.read() for call in calls))
        await idle(engine)
        for call in calls:
            code = await drained(call)
            codes[code] = codes.get(code, 0) + 1
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    return codes


async def idle(pids: list[int]) -> None:
    """Until processes have used hardly any CPU for a second."""
    before = -1.0
    while (used := cpu_seconds(pids)) - before > 0.1 or before < 0:
        before = used
        await asyncio.sleep(1.0)


def cpu_seconds(pids: list[int]) -> float:
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


async def drained(call: Any) -> str:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
        return str((await call.code()).name)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)


if __name__ == "__main__":
    main()
