"""What a token, a stream and a unary call cost a pod's front end, without a model.

The real server runs with another program in the engine's place: it speaks the real link and emits
one token per step for every sequence that is there, so many steps per second, whether the front end
keeps up or not.

    front                           long streams: what is delivered, processor time per token
    front --calls 1000 --tokens 16  short streams by protocol, and unary calls
    front --rows 32                 a router's Decode of so many rows of the demo model
    front --steps 50 --pairs 15     two pods by turns, one without telemetry and one with metrics,
                                    and access lines on standard error: what a call costs more, and
                                    a page of metrics

Beside the rates stands the processor time of the front ends, which a busy machine changes less: it
says what they could deliver on processors of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from benchmarks.support.pod import Pod, bench, free_port, python_of
from benchmarks.support.report import Report
from tokenpod.core.link import LinkClosed
from tokenpod.core.messages import Abort, Ask, Ready
from tokenpod.core.outputs import FinishCode, Load, Started, StepOutputs
from tokenpod.core.requests import Request
from tokenpod.engine.exchange import face_of
from tokenpod.service.config.sources import load_settings

SMOKE = {
    "cpu": "--steps 20 --streams 8 --seconds 1 --calls 16",
    "gpu": "--steps 20 --streams 8 --seconds 1",
}
_RUN = str(Path(__file__).resolve().parents[1] / "run.py")
_SLOTS = 1 << 24
#: The demo model's, whose tokenizer the server loads; ids of it that every step draws from.
_VOCABULARY = 4096
_IDS = range(300, 4000)


def emit(endpoints: Sequence[int], steps_per_second: float, report: Path) -> None:
    """Be an engine that needs no time: a token a step for all, until the first link closes."""
    link = face_of([socket.socket(fileno=endpoint) for endpoint in endpoints])
    link.receive(None)
    link.send(_ready())
    #: Tokens that are left, by sequence; those that have begun.
    left: dict[int, int] = {}
    begun: set[int] = set()
    draw, step, tokens = random.Random(1), 0, 0
    first = last = due = time.monotonic()
    try:
        while True:
            for message in link.receive(max(due - time.monotonic(), 0.0) if left else None):
                if isinstance(message, Request):
                    left |= dict.fromkeys(message.sequence_ids, message.stopping.max_new_tokens)
                elif isinstance(message, Abort):
                    for sequence in message.sequence_ids:
                        left.pop(sequence, None)
                elif isinstance(message, Ask):
                    link.send(_step(step, {}, begun, draw))
            if time.monotonic() < due:
                continue
            if not left:
                due = time.monotonic()
                continue
            step, tokens = step + 1, tokens + len(left)
            link.send(_step(step, left, begun, draw))
            # A step that was late is not made up for: an engine would not either.
            due = max(due + 1 / steps_per_second, time.monotonic() - 1 / steps_per_second)
            last = time.monotonic()
            first = last if step == 1 else first
    except LinkClosed:
        report.write_text(json.dumps({"tokens": tokens, "seconds": last - first}))


def _step(step: int, left: dict[int, int], begun: set[int], draw: random.Random) -> StepOutputs:
    now, sequences = time.monotonic_ns(), list(left)
    started = [Started(sequence, 0, now) for sequence in sequences if sequence not in begun]
    begun.update(sequences)
    finishes = []
    for sequence in sequences:
        left[sequence] -= 1
        finishes.append(int(FinishCode.RUNNING if left[sequence] else FinishCode.LENGTH))
        if not left[sequence]:
            del left[sequence]
    return StepOutputs(
        step=step,
        at=now,
        sequence_ids=sequences,
        token_ids=draw.choices(_IDS, k=len(sequences)),
        logprobs=[0.0] * len(sequences),
        finishes=finishes,
        load=Load(len(left), 0, 0, _SLOTS, _SLOTS, 0),
        started=started,
    )


def _ready() -> Ready:
    told = {"dtype": "float32", "kv_cache_dtype": "float32", "device_type": "cpu"}
    told |= {"attention": "none", "window_size": None, "vocab_size": _VOCABULARY}
    told |= {"max_positions": 1 << 16, "slots": _SLOTS, "parameters": 0, "weight_bytes": 0}
    return Ready(**told, load_seconds=0.0, warmup_seconds=0.0)  # type: ignore[arg-type]


def serve(
    port: int, health_port: int, engine: Sequence[str], front_ends: int, metrics_port: int
) -> int:
    """Run the real server over `engine`; with telemetry, if there is a port for metrics."""
    from tokenpod.service.server import run

    settings = load_settings(
        hostname="127.0.0.1",
        port=port,
        health_port=health_port,
        max_concurrent_requests=4096,
        lame_duck_seconds=0.0,
        log_level="info" if metrics_port else "warning",
        metrics_port=metrics_port,
        front_ends=front_ends,
    )
    return run(settings, engine_command=engine)


@contextlib.contextmanager
def pod_of(
    steps: float, report: Path, asked: argparse.Namespace, metrics_port: int = 0
) -> Iterator[Pod]:
    """The server over the program in the engine's place."""
    command = [*python_of(), _RUN, "front", "--child", "--steps", str(steps)]
    command += ["--report", str(report), "--front-ends", str(asked.front_ends)]
    command += ["--metrics-port", str(metrics_port)]
    with Pod(command=command) as pod:
        yield pod


def streams(steps: float, asked: argparse.Namespace, report: Report) -> None:
    """Long streams, read by `tokenpod bench`."""
    with tempfile.TemporaryDirectory() as folder:
        engine_file, result = Path(folder) / "engine.json", Path(folder) / "bench.json"
        with pod_of(steps, engine_file, asked) as pod:
            before, began = pod.processor()["front"], time.monotonic()
            load = ["--concurrency", str(asked.streams), "--requests", str(asked.streams)]
            load += ["--input-tokens", "16", "--output-tokens", str(int(steps * asked.seconds))]
            # The kernel gives connections to front ends by chance: a few for each even it out.
            load += ["--warmup", "0", "--connections", str(asked.connections)]
            load += ["--processes", str(asked.clients)]
            level = bench(pod.address, *load, json_file=result)["levels"][0]
            took = time.monotonic() - began
            spent = pod.processor()["front"] - before
        engine = json.loads(engine_file.read_text())
    tokens, itl = level["tokens"]["output"], level["latency_s"]["itl"]
    offered, delivered = engine["tokens"] / engine["seconds"], tokens / level["duration_s"]
    report.row(
        "streams",
        front_ends=asked.front_ends,
        **{"offered_tokens/s": offered, "delivered_tokens/s": delivered},
        delivered_share=delivered / offered,
        tokens_a_message=level["tokens"]["per_message"],
        us_a_token=1e6 * spent / tokens,
        processors_busy=spent / took,
        itl_p50_ms=1e3 * itl["p50"],
        itl_p99_ms=1e3 * itl["p99"],
    )


def pairs(steps: float, asked: argparse.Namespace, report: Report) -> None:
    """What telemetry costs: of a call, of a page, and so of a token in long streams.

    A call and a page are what telemetry has work with. In short calls that work is a large part,
    which shows on a machine that others use too; in long streams it would be lost in the noise.
    """
    rpc, port = "/tokenpod.v1.GenerationService/Generate", free_port()
    long = int(steps * asked.seconds)

    def cost(pod: Pod, tokens: int, calls: int) -> float:
        """Microseconds of a call."""
        before = sum(pod.processor().values())
        _, data = requests(tokens)[rpc]
        at_once = min(asked.streams, calls), asked.connections
        asyncio.run(load(pod.address, rpc, True, data, calls, *at_once))
        return 1e6 * (sum(pod.processor().values()) - before) / calls

    plain, telling, pages, streams = list[float](), list[float](), list[float](), list[float]()
    with (
        tempfile.TemporaryDirectory() as folder,
        pod_of(steps, Path(folder) / "without.json", asked) as without,
        pod_of(steps, Path(folder) / "with.json", asked, port) as with_it,
    ):
        for pod in (without, with_it):
            cost(pod, asked.tokens, asked.streams)
        for turn in range(asked.pairs):
            turns = [(without, plain), (with_it, telling)]
            for pod, costs in turns if turn % 2 else turns[::-1]:
                costs.append(cost(pod, asked.tokens, asked.calls or 4 * asked.streams))
            pages.append(page_cost(with_it, port))
            streams.append(cost(without, long, asked.streams) / long)
    more = [b - a for a, b in zip(plain, telling, strict=True)]
    low, middle, high = statistics.quantiles(more, n=4)
    token, page = statistics.median(streams), statistics.median(pages)
    report.row(
        f"telemetry beside {asked.streams} streams of {steps:g} tokens/s",
        turns=asked.pairs,
        us_a_call_without=plain,
        us_a_call_with=telling,
        us_more=f"{middle:.0f} (middle half {low:.0f} to {high:.0f})",
        page_ms=[each / 1e3 for each in pages],
        us_a_token=streams,
        **{f"calls_of_{long}_tokens_share": middle / (long * token)},
        page_every_second_share=page / (asked.streams * steps * token),
    )


def page_cost(pod: Pod, port: int, times: int = 10) -> float:
    """Microseconds of the pod's processor time for a page of metrics."""
    before = sum(pod.processor().values())
    for _ in range(times):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            page.read()
        # A page that is new is served again.
        time.sleep(0.05)
    return 1e6 * (sum(pod.processor().values()) - before) / times


PROMPT = "def fibonacci(n):\n    " * 8


def requests(tokens: int) -> dict[str, tuple[bool, bytes]]:
    """Whether it streams, and the message, by rpc."""
    from tokenpod_client.protos.fmaas import generation_pb2 as fmaas
    from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
    from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as v1
    from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import GenerateOnceRequest

    asked = {"text": PROMPT, "stopping": {"max_new_tokens": tokens}}
    single = fmaas.SingleGenerationRequest(
        request={"text": PROMPT}, params={"stopping": {"max_new_tokens": tokens}}
    )
    own = v1.GenerateRequest(**asked)
    once = GenerateOnceRequest(request=own)
    found: dict[str, tuple[bool, Any]] = {
        "/tokenpod.v1.GenerationService/Generate": (True, own),
        "/tokenpod.v1.GenerationService/GenerateOnce": (False, once),
        "/generate.v3.TextGenerationService/Generate": (True, v3.GenerateRequest(**asked)),
        "/fmaas.GenerationService/GenerateStream": (True, single),
        "/generate.v3.TextGenerationService/Info": (False, v3.InfoRequest()),
    }
    return {rpc: (many, made.SerializeToString()) for rpc, (many, made) in found.items()}


async def load(
    address: str, rpc: str, streams: bool, data: bytes, calls: int, at_once: int, connections: int
) -> int:
    """Make calls; messages received. Messages go as bytes, so that the client takes little."""
    left, received = iter(range(calls)), 0

    async def work(channel: grpc.aio.Channel) -> None:
        nonlocal received
        for _ in left:
            if not streams:
                await channel.unary_unary(rpc)(data)  # type: ignore[misc]
                received += 1
                continue
            async for _message in channel.unary_stream(rpc)(data):
                received += 1

    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, own) for _ in range(connections)]
    await asyncio.gather(*(work(channels[at % connections]) for at in range(at_once)))
    for channel in channels:
        await channel.close()
    return received


async def protocols(asked: argparse.Namespace, report: Report) -> None:
    """All of them in one event loop: grpc's clients are not for several."""
    for rpc, (many, data) in requests(asked.tokens).items():
        with (
            tempfile.TemporaryDirectory() as folder,
            pod_of(400, Path(folder) / "engine.json", asked) as pod,
        ):
            await load(pod.address, rpc, many, data, 64, 64, 4)
            before, began = pod.processor()["front"], time.monotonic()
            received = await load(pod.address, rpc, many, data, asked.calls, 64, 4)
            took, spent = time.monotonic() - began, pod.processor()["front"] - before
        report.row(
            f"calls of {asked.tokens} tokens, 64 at once",
            rpc=rpc,
            **{"calls/s": asked.calls / took, "messages_a_call": received / asked.calls},
            front_us_a_call=1e6 * spent / asked.calls,
            **{"calls/s_of_a_processor": asked.calls / max(spent, 1e-9)},
        )


def routed(asked: argparse.Namespace, report: Report) -> None:
    """A router's Decode: a real pod, whose engine's processor time is apart."""
    from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
    from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as v3_grpc

    stopping = v3.StoppingCriteriaParameters(
        max_new_tokens=asked.decodes + 1, ignore_eos_token=True
    )
    parameters = v3.NextTokenChooserParameters(temperature=1, repetition_penalty=1)
    batch = v3.Batch(size=asked.rows, max_tokens=asked.rows * (32 + asked.decodes))
    for at in range(asked.rows):
        batch.requests.add(
            id=at, inputs=PROMPT, truncate=16, parameters=parameters, stopping_parameters=stopping
        )
    with Pod() as pod, grpc.insecure_channel(pod.address) as channel:
        stub = v3_grpc.TextGenerationServiceStub(channel)
        answer = stub.Prefill(v3.PrefillRequest(batch=batch))
        spent, taken = [], []
        for _ in range(asked.decodes // 10 - 1):
            before, began = pod.processor()["front"], time.perf_counter()
            for _ in range(10):
                answer = stub.Decode(v3.DecodeRequest(batches=[answer.batch]))
                assert len(answer.generations) == asked.rows
            taken.append((time.perf_counter() - began) * 100)
            spent.append((pod.processor()["front"] - before) * 100)
    report.row("Decode of a router", rows=asked.rows, front_ms=spent, by_the_clock_ms=taken)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=0, help="of a router's Decode")
    parser.add_argument("--decodes", type=int, default=200)
    parser.add_argument(
        "--steps", nargs="*", type=float, default=[10, 50, 70, 100], help="a second"
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--connections", type=int, default=16, help="of each client process")
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--calls", type=int, default=0, help="of each protocol")
    parser.add_argument("--tokens", type=int, default=16, help="of each call")
    parser.add_argument("--pairs", type=int, default=0, help="turns without and with telemetry")
    parser.add_argument("--metrics-port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--health-port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("endpoints", nargs="*", type=int, help=argparse.SUPPRESS)


def run(asked: argparse.Namespace, report: Report | None) -> int:
    """Measure, or be the server or the program in the engine's place."""
    if asked.mode == "engine":
        emit(asked.endpoints, asked.steps[0], asked.report)
        return 0
    if asked.child:
        engine = [*python_of(), _RUN, "front", "--child", "--mode", "engine"]
        engine += ["--steps", str(asked.steps[0]), "--report", str(asked.report), "--"]
        ports = asked.port, asked.health_port
        return serve(*ports, engine, asked.front_ends, asked.metrics_port)
    assert report is not None
    if asked.rows:
        routed(asked, report)
        return 0
    for steps in asked.steps:
        (pairs if asked.pairs else streams)(steps, asked, report)
    if asked.calls and not asked.pairs:
        asyncio.run(protocols(asked, report))
    return 0
