"""What is attacked, and who must not notice: a pod, clients that retry, and probes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos.waiting import PATIENCE_SECONDS, wait_for
from support.clients.public_api import text_request
from support.pods.harness import SERVING, ServerProcess, free_port, serve
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

#: What innocent clients ask.
INNOCENT = text_request("def fibonacci(n):\n", stopping={"max_new_tokens": 24, "ignore_eos": True})
CALL_SECONDS = 300.0
#: Codes after which the contract lets clients try again.
AGAIN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
#: A connection of its own that comes back soon after a restart.
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
_PROBE_EVERY_SECONDS = 0.05
#: For chats with tools: the demo model has none of its own.
TEMPLATE = "{{ tools | tojson }} {{ messages[-1].content }}"


class Pod:
    """A server that is started again on the same ports, as kubelet would.

    Args:
        attackers: the event loop of those who attack: grpc.aio wants one for the whole process.
        flags: of `tokenpod serve`.
    """

    def __init__(self, attackers: asyncio.Runner, *flags: str) -> None:
        self.attackers = attackers
        self.port, self.health_port = free_port(), free_port()
        self.restarts = 0
        self.server: ServerProcess
        self._folder = tempfile.TemporaryDirectory()
        self._flags = (*flags, "--port", str(self.port), "--health-port", str(self.health_port))
        self._flags += ("--uds-path", f"{self._folder.name}/shard")
        template = Path(self._folder.name, "template.jinja")
        template.write_text(TEMPLATE)
        self._flags += ("--chat-template", str(template), "--tool-parser", "hermes")
        self._life = contextlib.ExitStack()
        self._start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def socket(self) -> Path:
        """What routers open."""
        return Path(self._folder.name, "shard-0")

    def further(self) -> list[int]:
        """Process ids of the further front ends."""
        return self.server.front_end_pids()

    def text_workers(self) -> list[int]:
        """Process ids of all front ends' text workers."""
        fronts = [self.server.process.pid, *self.further()]
        return [pid for front in fronts for pid in self.server.text_worker_pids(front)]

    def engines(self) -> list[int]:
        """Process ids of the engine, or of its ranks."""
        return self.server.engine_pids()

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send one to the first front end."""
        self.server.process.send_signal(number)

    def await_end(self, status: int, processes: list[int]) -> None:
        """Wait for the end; AssertionError unless it is this one, and nothing is left."""
        got = self.server.process.wait(PATIENCE_SECONDS)
        assert got == status, f"exit status {got}, not {status}"
        wait_for(lambda: all(gone(pid) for pid in processes), "a process is left over")
        assert not self.socket.exists() or status < 0, "the unix socket is left over"

    def restart(self) -> None:
        """Start it again; it must have ended."""
        self.check_log()
        self._life.close()
        self.restarts += 1
        self._start()

    def check_log(self) -> None:
        """AssertionError if the server has told of a fault of its own."""
        text = self.server.log.read_text()
        for fault in ("Traceback", "internal error"):
            assert fault not in text, f"{fault} in the log:\n{text[-4000:]}"

    def memory(self) -> float:
        """MB that all of its processes have resident."""
        pids = [self.server.process.pid, *self.server.children()]
        pages = 0
        for pid in pids:
            with contextlib.suppress(FileNotFoundError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * 4096 / 1e6

    def close(self) -> None:
        """End it, whatever it does."""
        self._life.close()
        self._folder.cleanup()

    def _start(self) -> None:
        self._life = contextlib.ExitStack()
        self.server = self._life.enter_context(serve(*self._flags, wait=False))
        self.server.port, self.server.health_port = self.port, self.health_port
        self.server.uds = str(self.socket)
        self.server.wait_until_serving(PATIENCE_SECONDS)


@dataclass
class Seen:
    """What the innocent have met since the last look."""

    served: int = 0
    retried: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    #: Seconds of answered probes; how many were not answered within one, and in a row at most.
    probes: list[float] = field(default_factory=list)
    lost_probes: int = 0
    lost_in_a_row: int = 0

    @property
    def probe_p99_ms(self) -> float:
        """Milliseconds; 0 if there was no probe."""
        return 1e3 * sorted(self.probes)[int(0.99 * len(self.probes))] if self.probes else 0.0


class Bystanders:
    """Clients that retry as the contract lets them, and a probe, each on a thread.

    Args:
        pod: whom they call.
        clients: how many.
        seed: of their pauses.
    """

    def __init__(self, pod: Pod, clients: int, seed: int) -> None:
        self._pod = pod
        self._lock = threading.Lock()
        self._seen = Seen()
        self._over = threading.Event()
        self._expected = answer(pod.address)
        self._threads = [
            threading.Thread(target=self._call, args=(random.Random(seed + at),), daemon=True)
            for at in range(clients)
        ]
        self._threads.append(threading.Thread(target=self._probe, daemon=True))
        for thread in self._threads:
            thread.start()

    def look(self) -> Seen:
        """What has happened since the last look."""
        with self._lock:
            seen, self._seen = self._seen, Seen()
            return seen

    def served(self) -> int:
        """Calls served since the last look."""
        with self._lock:
            return self._seen.served

    def close(self) -> None:
        """Stop, and wait for what is under way."""
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS + CALL_SECONDS)

    def _call(self, draw: random.Random) -> None:
        with grpc.insecure_channel(self._pod.address, options=OPTIONS) as channel:
            stub = GenerationServiceStub(channel)
            while not self._over.is_set():
                self._one(stub)
                self._over.wait(draw.uniform(0.0, 0.1))

    def _one(self, stub: Any) -> None:
        began = time.monotonic()
        while True:
            try:
                text = text_of(stub.Generate(INNOCENT, timeout=CALL_SECONDS))
            except grpc.RpcError as error:
                if self._over.is_set():
                    return
                patient = time.monotonic() - began < PATIENCE_SECONDS
                if error.code() in AGAIN and patient:
                    with self._lock:
                        self._seen.retried += 1
                    time.sleep(_hint(error))
                    continue
                with self._lock:
                    self._seen.failed[error.code().name] += 1
                return
            with self._lock:
                self._seen.served += 1
                self._seen.wrong += text != self._expected
            return

    def _probe(self) -> None:
        request = health_pb2.HealthCheckRequest(service="liveness")
        address = f"127.0.0.1:{self._pod.health_port}"
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            row = 0
            while not self._over.wait(_PROBE_EVERY_SECONDS):
                began = time.monotonic()
                try:
                    alive = stub.Check(request, timeout=1.0).status == SERVING
                except grpc.RpcError:
                    alive = False
                row = 0 if alive else row + 1
                with self._lock:
                    if alive:
                        self._seen.probes.append(time.monotonic() - began)
                    else:
                        self._seen.lost_probes += 1
                        self._seen.lost_in_a_row = max(self._seen.lost_in_a_row, row)


def answer(address: str) -> str:
    """What the pod says to the innocent, on a new connection. Raises grpc.RpcError."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        stub = GenerationServiceStub(channel)
        return text_of(stub.Generate(INNOCENT, timeout=CALL_SECONDS))


def text_of(events: Iterator[Any]) -> str:
    """The text of a stream, and how it finished."""
    parts = []
    for event in events:
        if event.WhichOneof("event") == "tokens":
            parts.append(event.tokens.text)
        elif event.WhichOneof("event") == "finished":
            parts.append(f" [{event.finished.finish_reason}]")
    return "".join(parts)


def gone(pid: int) -> bool:
    """Whether a process has ended (one that nobody has reaped yet has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _hint(error: Any) -> float:
    """Seconds to wait, as the server says; else a little."""
    hint = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms")
    return float(hint) / 1e3 if hint else 0.2
