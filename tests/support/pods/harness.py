"""Real server processes for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.examples import ALL
from support.pods import prefork
from support.pods.prefork import PreforkedProcess
from support.pods.prefork_server import FORKER
from support.waiting import wait_for
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import GetLoadRequest
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
START_SECONDS = 120.0
#: The command line's program.
TOKENPOD = (sys.executable, "-P", "-m", "tokenpod")
#: Flags that say how many prompt tokens a step has, or limit it.
_PROMPT_STEPS = frozenset(
    {"--max-batch-prefill-tokens", "--max-batch-total-tokens", "--batching", "--max-total-tokens"}
)
#: What tests' servers have unless a test says otherwise. Several threads spin while they wait for
#: each other, on cores that other tests need. And a step beside them that has a loop to compile
#: first, in a clone without any, can take longer than the engine of an idle machine may.
_USUAL = {"--threads": "1", "--stall-timeout": "240"}
#: Between SERVING and the line about it.
SECONDS_TO_LOG = 2.0
#: What GetLoad counts of calls that have not ended.
_OF_CALLS = (
    "request_count",
    "running_sequence_count",
    "waiting_sequence_count",
    "swapped_sequence_count",
    "used_token_count",
)
#: A server takes its port seconds after a test chose it. Systems hand out none of these to others,
#: and test processes that run side by side, whose ids are local_ranks, begin far from each other.
_PORTS = range(10_000, 32_000)
_turns = itertools.count(os.getpid() * 997)


def free_port() -> int:
    """A port that nobody listens on, and that nobody else is given until its server has it."""
    while True:
        port = _PORTS[next(_turns) % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class ServerProcess:
    """A `tokenpod serve` process."""

    process: subprocess.Popen[str] | PreforkedProcess
    port: int
    health_port: int
    uds: str
    log: Path
    channels: list[grpc.Channel] = field(default_factory=list)
    #: Whether tests of all files share it.
    is_common: bool = False
    _load: Any = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def health_address(self) -> str:
        return f"127.0.0.1:{self.health_port}"

    def channel(self, address: str | None = None) -> grpc.Channel:
        channel = grpc.insecure_channel(address or self.address)
        self.channels.append(channel)
        return channel

    def stub(self) -> Any:
        """Of the public API."""
        return GenerationServiceStub(self.channel())

    def shard(self) -> Any:
        """A `generate.v3` stub."""
        return rpc.TextGenerationServiceStub(self.channel())

    def health(self, service: str = "readiness") -> int:
        with grpc.insecure_channel(self.health_address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status)

    def wait_until_serving(self, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended:\n{self.log.read_text()}")
            with contextlib.suppress(grpc.RpcError):
                if self.health() == SERVING:
                    break
            time.sleep(0.05)
        else:
            raise AssertionError(f"not SERVING within {seconds} s:\n{self.log.read_text()}")
        # The log line about what is served follows a moment later, if that level is logged.
        until = time.monotonic() + SECONDS_TO_LOG
        while "serving" not in (text := self.log.read_text()) and text and time.monotonic() < until:
            time.sleep(0.02)

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """Nothing runs or waits, and no sequence holds memory."""
        if self._load is None:
            self._load = GenerationServiceStub(self.channel()).GetLoad
        deadline = time.monotonic() + seconds
        while True:
            load = self._load(GetLoadRequest(), timeout=30)
            left = {name: getattr(load, name) for name in _OF_CALLS if getattr(load, name)}
            if not left:
                return
            assert time.monotonic() < deadline, f"the test has left something behind: {left}"
            time.sleep(0.02)

    def logged(self, words: str) -> list[str]:
        """Lines of the log with these words: it may be written a moment after what it tells."""
        return wait_for(
            lambda: [line for line in self.log.read_text().splitlines() if words in line],
            log=self.log,
        )

    def children(self) -> list[int]:
        """Process ids of the server's children."""
        return children_of(self.process.pid)

    def engine_pid(self) -> int:
        """The process id of the only engine."""
        (pid,) = self.engine_pids()
        return pid

    def engine_pids(self) -> list[int]:
        """Process ids of the pod's ranks, in order."""
        return self._running("tokenpod.engine.process")

    def front_end_pids(self) -> list[int]:
        """Process ids of the further front ends, in order."""
        return self._running("tokenpod.service.front_end")

    def text_worker_pids(self, front_end: int = 0) -> list[int]:
        """Process ids of a front end's text workers; of the first one's."""
        return self._running("tokenpod.service.text.workers.text_worker", front_end)

    def _running(self, module: str, parent: int = 0) -> list[int]:
        # Nobody would be found by the name of a module that has moved, and nothing would tell.
        assert importlib.util.find_spec(module), f"there is no module {module}"
        return children_of(parent or self.process.pid, running=module)

    def stop(self) -> int:
        """SIGTERM, and wait; the exit status."""
        for channel in self.channels:
            channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def children_of(pid: int, *, running: str = "") -> list[int]:
    """Process ids of a process's children, as far as its first thread has started them.

    `running`: a module; only those that run it.
    """
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    commands = {child: _arguments(child) for child in map(int, listed.split())}
    return [
        child
        for child, words in commands.items()
        if FORKER not in words and (not running or running in words)
    ]


def _arguments(pid: int) -> list[str]:
    """A process's command line; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@contextlib.contextmanager
def serve(
    *flags: str,
    wait: bool = True,
    env: dict[str, str] | None = None,
    own_imports: bool = False,
    script: str | None = None,
    stderr: Path | None = None,
) -> Iterator[ServerProcess]:
    """A server on free ports and a unix socket; killed in the end if it still runs.

    Args:
        flags: of `tokenpod serve`.
        wait: until it serves.
        env: added to this process's environment.
        own_imports: start it by its command line, as users do, at 2.5 seconds of a core; otherwise
            it is forked from a process that has imported its modules (prefork.py), but in
            `make test-all`.
        script: started in place of `tokenpod`; it does what that does, and more.
        stderr: a file for what the log has otherwise.
    """
    with tempfile.TemporaryDirectory() as scratch:
        port, health_port = free_port(), free_port()
        log = Path(scratch) / "log"
        command = ["serve", "--hostname", "127.0.0.1"]
        command += ["--port", str(port), "--health-port", str(health_port)]
        command += ["--uds-path", f"{scratch}/shard", "--lame-duck-seconds", "0"]
        for flag, value in _USUAL.items():
            command += () if flag in flags else (flag, value)
        command += flags
        started = own_imports or ALL or not prefork.can_fork(env)
        if not started and not _PROMPT_STEPS.intersection(flags):
            # What engines find else, by timing steps for as long as the rest of their start takes.
            command += ["--max-batch-prefill-tokens", "256"]
        process: subprocess.Popen[str] | PreforkedProcess
        with log.open("a") as output, (stderr or log).open("a") as errors:
            if started:
                program = TOKENPOD if script is None else (sys.executable, "-P", script)
                process = subprocess.Popen(
                    [*program, *command],
                    stdout=output,
                    stderr=errors,
                    text=True,
                    cwd=scratch,
                    env={**os.environ, **(env or {})},
                )
            else:
                process = prefork.start(
                    command,
                    stdout=output.fileno(),
                    stderr=errors.fileno(),
                    cwd=scratch,
                    env={**os.environ, **(env or {})},
                    script=script,
                )
        server = ServerProcess(process, port, health_port, f"{scratch}/shard-0", log)
        try:
            if wait:
                server.wait_until_serving()
            yield server
        finally:
            for channel in server.channels:
                channel.close()
            if process.poll() is None:
                process.kill()
            process.wait()
