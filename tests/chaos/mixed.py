"""Minutes of everything at once, while a canary, a router and probes look on.

Once a minute it is noted what the calls met, how long the longest probe took, and what the pod's
processes have in memory: the pool of keys and values by itself, because on a CPU its pages come
when they are first written.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos.mixed_load import Made, MixedLoad
from chaos.routed import RoutedBystander, RoutedSeen
from chaos.scene import OPTIONS, Bystanders, Pod, Seen
from chaos.waiting import wait_for

#: No event loop is held up for longer, on two cores that others use too.
STALL_SECONDS = 0.25
_PROBE_EVERY_SECONDS = 0.02
_CLIENTS, _PAUSE_SECONDS = 16, 0.2
#: Codes that no call may meet, whatever it asks.
_NEVER = ("INTERNAL", "UNKNOWN", "DATA_LOSS")
#: A small pool, so that the cache is full, and evicts, from the first minutes on.
_FLAGS = ("--max-batch-total-tokens", "16384")


@dataclass(frozen=True)
class Minute:
    """One line of the table."""

    made: Made
    seen: Seen
    routed: RoutedSeen
    #: The longest probe of the minute, and the longest that its own process was late, in seconds.
    probe: float
    late: float
    #: MB.
    engine: float
    pool: float
    front_end: float
    others: float

    def cells(self) -> list[str]:
        """For the table."""
        codes, refused = self.made.codes, Counter(self.made.codes)
        good = sum(codes[code] for code in ("OK", "router OK"))
        for code in ("OK", "router OK", "router wrong"):
            del refused[code]
        return [
            str(codes.total()),
            str(good),
            ", ".join(f"{count} {code}" for code, count in refused.most_common()),
            str(sum(codes[code] for code in _NEVER)),
            f"{self.seen.served}, {self.seen.wrong + self.seen.failed.total()}",
            f"{self.routed.served}, {self.routed.wrong + self.routed.cut}",
            f"{codes['router OK']}, {self.lost}",
            f"{self.probe * 1e3:.0f} ({self.late * 1e3:.0f})",
            *(f"{mb:.0f}" for mb in (self.engine, self.pool, self.front_end, self.others)),
        ]

    @property
    def lost(self) -> int:
        """Batches in which the innocent request was cut off or got another text."""
        return sum(
            count
            for code, count in self.made.codes.items()
            if code.startswith("router") and code != "router OK"
        )

    @property
    def fault(self) -> str:
        """What the contract forbids and happened; empty: nothing did."""
        if bad := [code for code in _NEVER if self.made.codes[code]]:
            return f"{bad}: {self.made.faults}"
        if self.lost:
            return f"{self.lost} batches lost their innocent request: {self.made.faults}"
        if self.seen.failed or self.seen.wrong:
            return f"the canary: {self.seen.wrong} wrong, failed {dict(self.seen.failed)}"
        if self.routed.wrong or self.routed.cut:
            return f"the router: {self.routed.wrong} wrong, {self.routed.cut} cut off"
        return ""

    @property
    def stalled(self) -> bool:
        """Whether the front end's event loop was held up, by more than the machine accounts for."""
        return self.probe - self.late > STALL_SECONDS


HEAD = [
    "minute",
    "calls",
    "OK",
    "others",
    "INTERNAL, UNKNOWN",
    "canary: served, wrong",
    "router: served, lost",
    "batches' neighbours: served, lost",
    "longest probe, ms (its client was late)",
    "engine, MB",
    "its pool",
    "front end",
    "others",
]


def mixed(
    seed: int,
    seconds: float,
    *,
    flags: Sequence[str] = _FLAGS,
    clients: int = _CLIENTS,
    pause: float = _PAUSE_SECONDS,
    every: float = 60.0,
    tell: Callable[[Minute], None] = lambda minute: None,
) -> list[Minute]:
    """Run it for so many seconds, and until all have been served; a look `every` so many."""
    minutes: list[Minute] = []
    with asyncio.Runner() as attackers:
        pod = Pod(attackers, *flags)
        canary, router = Bystanders(pod, 1, seed), RoutedBystander(pod.socket)
        # A router clears all batches when it starts.
        wait_for(lambda: router.served() > 0, "no router is served before any load")
        load, prober = MixedLoad(pod.address, clients, pause, seed), _Prober(pod.health_port)
        try:
            prober.look()
            every = min(every, seconds)
            while len(minutes) < round(seconds / every) or not _served(minutes):
                time.sleep(every)
                made, (probe, late) = load.look(), prober.look()
                memory = _memory(pod)
                minute = Minute(made, canary.look(), router.look(), probe, late, *memory)
                minutes.append(minute)
                tell(minute)
            load.close()
            pod.check_log()
        finally:
            prober.close()
            router.close()
            canary.close()
            pod.close()
    return minutes


def _served(minutes: Sequence[Minute]) -> bool:
    """Whether each kind of call has been."""
    codes = sum((minute.made.codes for minute in minutes), Counter[str]())
    canary = sum(minute.seen.served for minute in minutes)
    router = sum(minute.routed.served for minute in minutes)
    return all((codes["OK"], codes["router OK"], canary, router))


def table(minutes: Sequence[Minute]) -> str:
    """Markdown."""
    rows = [[str(at), *minute.cells()] for at, minute in enumerate(minutes, 1)]
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- memory --------------------------------------------------------------------------------------


def _memory(pod: Pod) -> tuple[float, float, float, float]:
    """MB of the engine without its pool, the pool, the first front end, and all other children."""
    first, engines = pod.server.process.pid, pod.engines()
    pools = sum(map(_pool, engines))
    others = [pid for pid in pod.server.children() if pid not in engines]
    engine = sum(map(_resident, engines)) - pools
    return engine, pools, _resident(first), sum(map(_resident, others))


def _resident(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _pool(pid: int) -> float:
    """MB of the KV pool: the memory for which numpy asks for huge pages (flag `hg`)."""
    total = here = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Rss":
            here = int(value.split()[0])
        elif name == "VmFlags" and "hg" in value.split():
            total += here
    return total * 1024 / 1e6


# -- probes --------------------------------------------------------------------------------------


class _Prober:
    """Asks the health port for `liveness` all the time, from a process of its own.

    The health port is served by the front end's event loop, so its slowest answer bounds how long
    that loop was held up. How late the prober itself woke from a sleep is what the machine adds.
    """

    def __init__(self, port: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_probe, args=(port, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def look(self) -> tuple[float, float]:
        """Seconds of the longest probe and of the longest lateness since the last look."""
        self._ours.send(True)
        probe, late = self._ours.recv()
        return probe, late

    def close(self) -> None:
        """End it."""
        self._ours.close()
        self._process.join(60)
        self._process.kill()


def _probe(port: int, link: Connection) -> None:
    request = health_pb2.HealthCheckRequest(service="liveness")
    probe = late = 0.0
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            began = time.monotonic()
            try:
                asked = link.poll(_PROBE_EVERY_SECONDS)
                if asked:
                    link.recv()
                    link.send((probe, late))
                    probe = late = 0.0
                    continue
            except (EOFError, OSError):
                return
            woke = time.monotonic()
            late = max(late, woke - began - _PROBE_EVERY_SECONDS)
            stub.Check(request, timeout=60)
            probe = max(probe, time.monotonic() - woke)
