"""Measure the Shepherd Model Gateway's way to pods against our own `Generate`, on chats.

    python -P benchmarks/gateway.py --smg ENVIRONMENT/bin/smg [-- SERVE FLAGS]

Starts two pods with the demo model and the gateway (`pip install smg`, in an environment of its
own), loads both ways, and ends them. Both ways lead to the same pods. Chats go by turns: a round
of them one way, as many the other way, `--concurrency` at once, and so on; then some one by one,
each way in turn, for the latency of the first text. What other programs do to the machine falls on
both alike. No two chats begin alike, so that none finds another's prompt in the cache.

It also says what a chat costs pods, gateway and this client in processor time, which depends less
on what else runs: so it tells what the gateway takes where it has cores of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `python -P` leaves it out
from overload import Server, free_port, serving

from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

#: Runs one chat; seconds until its first text.
Chat = Callable[[str], Awaitable[float]]
_TICKS = os.sysconf("SC_CLK_TCK")
#: Wide enough for fetching the tokenizer from a pod on a busy machine.
_READY_SECONDS = 180.0
_QUESTION = "Write a function that sums a list of numbers, and skips those that are negative. "


def own(addresses: Sequence[str], tokens: int) -> Chat:
    """Our own `Generate`, by the pods' turns."""
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    stubs: Any = itertools.cycle([GenerationServiceStub(channel) for channel in channels])

    async def chat(text: str) -> float:
        stub = next(stubs)
        request = pb.GenerateRequest(
            chat={"messages": [{"role": "user", "content": [{"text": text}]}]},
            stopping={"max_new_tokens": tokens, "ignore_eos": True},
            sampling={"temperature": 0.0},
        )
        began, first = time.monotonic(), 0.0
        async for event in stub.Generate(request):
            if not first and event.tokens.text:
                first = time.monotonic() - began
        return first

    return chat


def gateway(address: str, tokens: int) -> Chat:
    """OpenAI's API over HTTP/1.1, with a connection for each chat: idle ones are dropped."""
    host, _, port = address.partition(":")

    async def chat(text: str) -> float:
        body = {"model": "demo", "messages": [{"role": "user", "content": text}], "stream": True}
        data = json.dumps(
            body | {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        began, first = time.monotonic(), 0.0
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"the gateway answers {status.decode().strip()}")
        while (line := await reader.readline()) != b"0\r\n":
            if not first and b'"content":"' in line and b'"content":""' not in line:
                first = time.monotonic() - began
        writer.close()
        return first

    return chat


async def throughput(chat: Chat, texts: Iterator[str], options: argparse.Namespace) -> float:
    """Chats a second of one round."""
    left = itertools.islice(texts, options.round)

    async def work() -> None:
        for text in left:
            await chat(text)

    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(options.concurrency)))
    return options.round / (time.monotonic() - began)


@contextlib.contextmanager
def running_gateway(program: str, pods: Sequence[Server]) -> Iterator[tuple[str, int]]:
    """The gateway before these pods, once it answers chats: its address and process."""
    port, metrics = free_port(), free_port()
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    command += ["--policy", "cache_aware", "--worker-urls"]
    command += [f"grpc://{pod.address}" for pod in pods]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + _READY_SECONDS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"the gateway does not serve: {log.read().decode()[-2000:]}")
                time.sleep(0.2)
            yield f"127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait()


def _answers(port: int) -> bool:
    """Whether a chat is served: it knows a pod, and has its tokenizer."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as client:
        try:
            headers = {"content-type": "application/json"}
            client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            return client.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


#: Seconds of a processor, by who had them.
Costs = dict[str, float]


async def run(
    options: argparse.Namespace, pods: Sequence[Server], address: str, gateway_pid: int
) -> None:
    """Both ways by turns; each begins as often as the other."""
    ways = {
        "own": own([pod.address for pod in pods], options.tokens),
        "gateway": gateway(address, options.tokens),
    }

    def spent() -> Costs:
        of_pods = processor([pod.pid for pod in pods])
        return {
            "pods": of_pods,
            "gateway": processor([gateway_pid]),
            "client": time.process_time(),
        }

    seed = random.randrange(10**6)
    texts = (f"{seed + at} {_QUESTION}" for at in itertools.count())
    for chat in ways.values():
        await asyncio.gather(*(chat(next(texts)) for _ in range(options.concurrency)))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[Costs]] = {name: [] for name in ways}
    for turn in range(options.requests // options.round):
        for name in sorted(ways, reverse=bool(turn % 2)):
            before = spent()
            rates[name].append(await throughput(ways[name], texts, options))
            after = spent()
            costs[name].append({k: 1e3 * (after[k] - before[k]) / options.round for k in after})
        said = ", ".join(f"{n} {r[-1]:.1f} chats/s" for n, r in rates.items())
        print(f"round {turn}: {said}", flush=True)
    first: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.alone):
        for name in sorted(ways, reverse=bool(turn % 2)):
            first[name].append(1e3 * await ways[name](next(texts)))
    report(rates, costs, first)


def report(
    rates: dict[str, list[float]], costs: dict[str, list[Costs]], first: dict[str, list[float]]
) -> None:
    """Medians, and between what the middle half of all rounds or chats lies."""
    for name in rates:
        print(f"{name}: {_spread(rates[name])} chats/s; first text alone {_spread(first[name])} ms")
        each = (f"{who} {_spread([c[who] for c in costs[name]])}" for who in costs[name][0])
        print(f"  processor for a chat, ms: {', '.join(each)}")
    shares = [b / a for a, b in zip(rates["own"], rates["gateway"], strict=True)]
    added = [b - a for a, b in zip(first["own"], first["gateway"], strict=True)]
    print(f"through the gateway: {_spread(shares)} of the throughput, first text", end=" ")
    print(f"{_spread(added)} ms later")


def processor(pids: Sequence[int]) -> float:
    """Seconds that these processes and their children have had of a processor."""
    spent, found = 0.0, list(pids)
    while found:
        pid = found.pop()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += (int(fields[11]) + int(fields[12])) / _TICKS
        tasks = Path(f"/proc/{pid}/task").iterdir()
        found += [int(each) for task in tasks for each in (task / "children").read_text().split()]
    return spent


def _spread(values: list[float]) -> str:
    """The median, and between what the middle half of all lies."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smg", default="smg", metavar="PROGRAM", help="of the package smg")
    parser.add_argument("--pods", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1000, help="each way")
    parser.add_argument("--round", type=int, default=50, help="of them in a turn")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--alone", type=int, default=200, help="chats one by one, each way")
    parser.add_argument("flags", nargs="*", help="of tokenpod serve, after --")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        pods = [
            stack.enter_context(
                serving(["--kv-cache-events", f"--uds-path={scratch}/{at}", *options.flags])
            )
            for at in range(options.pods)
        ]
        address, pid = stack.enter_context(running_gateway(options.smg, pods))
        print(f"{os.cpu_count()} processors, load average {_load()} before", flush=True)
        asyncio.run(run(options, pods, address, pid))
        print(f"load average {_load()} after")
    return 0


def _load() -> str:
    return " ".join(f"{each:.1f}" for each in os.getloadavg())


if __name__ == "__main__":
    sys.exit(main())
