"""Measure what a pod's front end delivers and what each token costs it, without a model.

    python -P benchmarks/front.py --steps 50,70 --streams 256 --seconds 10

The real server runs with another program in the engine's place: it speaks the real link and emits
one token a step for every sequence that is there, so many steps a second, whether the front end
keeps up or not. `tokenpod bench` reads the streams. Beside the rates stands the CPU time of each
process, which a busy machine changes less: the front end's microseconds a token say what it could
deliver on a core of its own. `--profile` says where they go (and makes them more).
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenpod.core.link import LinkClosed
from tokenpod.core.messages import Abort, Ready, ToEngine
from tokenpod.core.outputs import FinishCode, Load, Started, StepOutputs
from tokenpod.core.requests import Request
from tokenpod.engine.exchange import face_of
from tokenpod.service.config import load_settings

_TICKS = os.sysconf("SC_CLK_TCK")
_SLOTS = 1 << 24
#: The demo model's, whose tokenizer the server loads; ids of it that every step draws from.
_VOCABULARY = 4096
_IDS = range(300, 4000)


# -- the program in the engine's place ---------------------------------------------------------


@dataclass(slots=True)
class _Running:
    sequence_id: int
    left: int
    started: bool = False


def emit(endpoints: Sequence[int], steps_per_second: float, report: Path) -> None:
    """Be an engine that needs no time: a token a step for all, until the first link closes."""
    link = face_of([socket.socket(fileno=endpoint) for endpoint in endpoints])
    link.receive(None)
    link.send(_ready())
    running: dict[int, _Running] = {}
    draw = random.Random(1)
    step = tokens = 0
    first = last = time.monotonic()
    due = time.monotonic()
    try:
        while True:
            wait = max(due - time.monotonic(), 0.0) if running else None
            for message in link.receive(wait):
                _take(message, running)
            if time.monotonic() < due:
                continue
            if not running:
                due = time.monotonic()
                continue
            step += 1
            tokens += len(running)
            link.send(_step(step, running, draw))
            # A step that was late is not made up for: an engine would not either.
            due = max(due + 1 / steps_per_second, time.monotonic() - 1 / steps_per_second)
            last = time.monotonic()
            first = last if step == 1 else first
    except LinkClosed:
        report.write_text(json.dumps({"tokens": tokens, "seconds": last - first}))


def _take(message: ToEngine, running: dict[int, _Running]) -> None:
    match message:
        case Request():
            for sequence_id in message.sequence_ids:
                running[sequence_id] = _Running(sequence_id, message.stopping.max_new_tokens)
        case Abort():
            for sequence_id in message.sequence_ids:
                running.pop(sequence_id, None)


def _step(step: int, running: dict[int, _Running], draw: random.Random) -> StepOutputs:
    now = time.monotonic_ns()
    rows = list(running.values())
    started = [Started(row.sequence_id, 0, now) for row in rows if not row.started]
    finishes = []
    for row in rows:
        row.started = True
        row.left -= 1
        finishes.append(int(FinishCode.LENGTH if row.left == 0 else FinishCode.RUNNING))
        if row.left == 0:
            del running[row.sequence_id]
    return StepOutputs(
        step=step,
        at=now,
        sequence_ids=[row.sequence_id for row in rows],
        token_ids=draw.choices(_IDS, k=len(rows)),
        logprobs=[0.0] * len(rows),
        finishes=finishes,
        load=Load(len(running), 0, 0, _SLOTS, _SLOTS, 0),
        started=started,
    )


def _ready() -> Ready:
    return Ready(
        dtype="float32",
        kv_cache_dtype="float32",
        device_type="cpu",
        attention="none",
        window_size=None,
        vocab_size=_VOCABULARY,
        max_positions=1 << 16,
        slots=_SLOTS,
        parameters=0,
        weight_bytes=0,
        load_seconds=0.0,
        warmup_seconds=0.0,
    )


# -- the server --------------------------------------------------------------------------------


def serve(port: int, health_port: int, engine: Sequence[str], front_ends: int) -> int:
    """Run the real server over `engine`."""
    from tokenpod.service.server import run

    settings = load_settings(
        hostname="127.0.0.1",
        port=port,
        health_port=health_port,
        max_concurrent_requests=4096,
        lame_duck_seconds=0.0,
        log_level="warning",
        front_ends=front_ends,
    )
    return run(settings, engine_command=engine)


def profiled(port: int, health_port: int, engine: Sequence[str], front_ends: int) -> int:
    """`serve`, and where its time went on standard error."""
    profile = cProfile.Profile()
    status = profile.runcall(serve, port, health_port, engine, front_ends)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(32)
    return int(status)


# -- one run -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to: tokens a second, microseconds of CPU a token, milliseconds."""

    offered: float
    delivered: float
    per_message: float
    front_us: float
    front_busy: float
    itl_p50: float
    itl_p99: float


def measure(steps: float, options: argparse.Namespace) -> Outcome:
    """Start a server, load it, read the clocks, stop it."""
    with tempfile.TemporaryDirectory() as folder:
        report, result = Path(folder) / "engine.json", Path(folder) / "bench.json"
        with _server(steps, report, options) as (pid, address):
            before = _cpu_seconds(pid)
            began = time.monotonic()
            _bench(address, int(steps * options.seconds), options, result)
            took = time.monotonic() - began
            spent = _cpu_seconds(pid) - before
        engine = json.loads(report.read_text())
        level = json.loads(result.read_text())["levels"][0]
    tokens = level["tokens"]["output"]
    seconds = level["duration_s"]
    return Outcome(
        offered=engine["tokens"] / engine["seconds"],
        delivered=tokens / seconds,
        per_message=level["tokens"]["per_message"],
        front_us=1e6 * spent / tokens,
        front_busy=spent / took,
        itl_p50=1e3 * level["latency_s"]["itl"]["p50"],
        itl_p99=1e3 * level["latency_s"]["itl"]["p99"],
    )


@contextlib.contextmanager
def _server(steps: float, report: Path, options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    port, health_port = _free_port(), _free_port()
    mode = "profile" if options.profile else "serve"
    command = [sys.executable, "-P", __file__, "--mode", mode, "--ports", f"{port},{health_port}"]
    command += [
        "--steps",
        str(steps),
        "--report",
        str(report),
        "--front-ends",
        str(options.front_ends),
    ]
    process = subprocess.Popen(command)
    try:
        _wait_until_serving(f"127.0.0.1:{health_port}", process)
        yield process.pid, f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _bench(address: str, tokens: int, options: argparse.Namespace, result: Path) -> None:
    command = [sys.executable, "-P", "-m", "tokenpod", "bench", "--address", address]
    command += ["--concurrency", str(options.streams), "--requests", str(options.streams)]
    command += ["--input-tokens", "16", "--output-tokens", str(tokens), "--warmup", "0"]
    command += ["--processes", str(options.clients), "--json", str(result)]
    # The kernel gives connections to front ends by chance: a few for each even it out.
    command += ["--connections", str(options.connections)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _cpu_seconds(server: int) -> float:
    """Of all front ends: the server and those of its children that are."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    further = [int(pid) for pid in children if b"front_end" in _command(int(pid))]
    spent = 0.0
    for pid in (server, *further):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += (int(fields[11]) + int(fields[12])) / _TICKS
    return spent


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_serving(address: str, process: subprocess.Popen[bytes]) -> None:
    request = health_pb2.HealthCheckRequest(service="readiness")
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while process.poll() is None:
            with contextlib.suppress(grpc.RpcError):
                if stub.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.1)
    raise SystemExit("the server ended before it served")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", default="50", help="steps a second, with commas for several")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--connections", type=int, default=16, help="of each client process")
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--mode", default="measure", help=argparse.SUPPRESS)
    parser.add_argument("--ports", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("endpoints", nargs="*", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode == "engine":
        emit(options.endpoints, float(options.steps), options.report)
        return 0
    if options.mode in ("serve", "profile"):
        engine = [sys.executable, "-P", __file__, "--mode", "engine", "--steps", options.steps]
        engine += ["--report", str(options.report)]
        port, health_port = map(int, options.ports.split(","))
        run = serve if options.mode == "serve" else profiled
        return run(port, health_port, engine, options.front_ends)
    print("                                               front end        ms between messages")
    print("  offered  delivered   share  tokens/message  us/token  cores       p50       p99")
    for steps in map(float, options.steps.split(",")):
        got = measure(steps, options)
        share = got.delivered / got.offered
        print(
            f"{got.offered:9.0f}  {got.delivered:9.0f}  {share:6.1%}  {got.per_message:14.2f}"
            f"  {got.front_us:8.1f}  {got.front_busy:5.2f}  {got.itl_p50:8.1f}  {got.itl_p99:8.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
