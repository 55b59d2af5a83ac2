"""A pod of this checkout or another one: start, wait until it serves, read its clocks, stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from tokenpod.core.own_process import die_with_parent

ROOT = Path(__file__).resolve().parents[2]


class Pod:
    """`tokenpod serve` in processes of its own, on ports that were free.

    Args:
        flags: of `tokenpod serve`; without --model-id it serves the demo model.
        tree: the checkout whose server it is.
        cores: the processors that it may use, as taskset writes them.
        command: started instead of `tokenpod serve`, with the same ports as flags.
        ready_s: seconds within which it must serve.
    """

    def __init__(
        self,
        flags: Sequence[str] = (),
        *,
        tree: Path = ROOT,
        cores: str | None = None,
        command: Sequence[str] | None = None,
        ready_s: float = 600.0,
    ) -> None:
        port, health = free_port(), free_port()
        self.address, self.health_address = f"127.0.0.1:{port}", f"127.0.0.1:{health}"
        #: Seconds from the command to SERVING.
        self.started_s = 0.0
        self._ready_s = ready_s
        program = list(command or (*python_of(tree), "-m", "tokenpod", "serve"))
        if command is None:
            program += ["--hostname", "127.0.0.1", "--log-level", "warning"]
            program += ["--lame-duck-seconds", "0"]
        program += ["--port", str(port), "--health-port", str(health), *flags]
        self._command = ["taskset", "-c", cores, *program] if cores else program
        self.pid = 0

    def __enter__(self) -> Self:
        began = time.perf_counter()
        # It ends with this process, also where that is killed: a pod keeps a GPU's memory.
        self._process = subprocess.Popen(
            self._command, start_new_session=True, preexec_fn=die_with_parent
        )
        self.pid = self._process.pid
        try:
            self._wait()
        except BaseException:
            self._kill()
            raise
        self.started_s = time.perf_counter() - began
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _wait(self) -> None:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        end = time.monotonic() + self._ready_s
        with grpc.insecure_channel(self.health_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            check = health_pb2.HealthCheckRequest(service="readiness")
            while self._process.poll() is None and time.monotonic() < end:
                try:
                    if stub.Check(check, timeout=5).status == 1:
                        return
                except grpc.RpcError:
                    pass
                time.sleep(0.02)
        raise SystemExit(
            f"the pod did not serve within {self._ready_s:.0f} s, exit status "
            f"{self._process.poll()}: {' '.join(self._command)}"
        )

    def processes(self) -> dict[str, list[int]]:
        """Process ids: `front` are the front ends, `rest` the engine and the text workers."""
        found: dict[str, list[int]] = {"front": [self.pid], "rest": []}
        for pid in descendants(self.pid):
            front = b"front_end" in Path(f"/proc/{pid}/cmdline").read_bytes()
            found["front" if front else "rest"].append(pid)
        return found

    def processor(self) -> dict[str, float]:
        """Processor seconds so far, of front ends and of the rest."""
        return {name: processor_seconds(pids) for name, pids in self.processes().items()}


def python_of(folder: Path = ROOT) -> list[str]:
    """A command that runs Python with the packages of the checkout in `folder`.

    That is its own virtual environment's if it has one, else this interpreter.
    """
    own = folder / ".venv" / "bin" / "python"
    if own.exists():
        return [str(own), "-P"]
    if folder == ROOT:
        return [sys.executable, "-P"]
    script = str(ROOT / "benchmarks" / "uninstalled.sh")
    return ["env", f"TOKENPOD_FOLDER={folder}", "bash", script, sys.executable, "-P"]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """Processes below this one."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(child) for listed in lists for child in listed.read_text().split()]
    return own + [each for child in own for each in descendants(child)]


def processor_seconds(pids: Iterable[int]) -> float:
    """That these processes have had, without their children; to the nanosecond."""
    # The clock of a process, as clock_getcpuclockid makes its number of the process's.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def cores_of(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    ends = [part.partition("-") for part in text.split(",")]
    return {core for low, _, high in ends for core in range(int(low), int(high or low) + 1)}


def bench(address: str, *options: str, json_file: Path) -> dict[str, Any]:
    """The report of `tokenpod bench` against this address; raises if it fails."""
    command = [*python_of(), "-m", "tokenpod", "bench", "--address", address, *options]
    subprocess.run(
        [*command, "--json", str(json_file)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return dict(json.loads(json_file.read_text()))
