"""Measure the Shepherd Model Gateway's way to pods against our own `Generate`, on chats.

    python -P benchmarks/gateway.py --pods 127.0.0.1:50051 127.0.0.1:50053 --gateway 127.0.0.1:8000

Both ways lead to the same pods; docs/openai.md says how to start them. Chats go by turns: a round
of them one way, as many the other way, `--concurrency` at once, and so on; then some one by one,
each way in turn, for the latency of the first text. What other programs do to the machine falls on
both alike. No two chats begin alike, so that none finds another's prompt in the cache.

With --pod-pids and --gateway-pid it also says what a chat costs them in processor time, which does
not depend on what else runs: so it tells what the gateway takes where it has cores of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

#: Runs one chat; seconds until its first text.
Chat = Callable[[str], Awaitable[float]]
_TICKS = os.sysconf("SC_CLK_TCK")
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


async def run(options: argparse.Namespace) -> None:
    """Both ways by turns; each begins as often as the other."""
    ways = {
        "own": own(options.pods, options.tokens),
        "gateway": gateway(options.gateway, options.tokens),
    }
    seed = random.randrange(10**6)
    texts = (f"{seed + at} {_QUESTION}" for at in itertools.count())
    for chat in ways.values():
        await asyncio.gather(*(chat(next(texts)) for _ in range(options.concurrency)))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(options.requests // options.round):
        for name in sorted(ways, reverse=bool(turn % 2)):
            pods, other = processor(options.pod_pids), processor(options.gateway_pid)
            rates[name].append(await throughput(ways[name], texts, options))
            pods, other = processor(options.pod_pids) - pods, processor(options.gateway_pid) - other
            costs[name].append((1e3 * pods / options.round, 1e3 * other / options.round))
        print(f"round {turn}: " + ", ".join(f"{n} {r[-1]:.1f} chats/s" for n, r in rates.items()))
    first: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.alone):
        for name in sorted(ways, reverse=bool(turn % 2)):
            first[name].append(1e3 * await ways[name](next(texts)))
    for name in ways:
        print(f"{name}: {_spread(rates[name])} chats/s; first text alone {_spread(first[name])} ms")
        of_pods, of_gateway = (list(each) for each in zip(*costs[name], strict=True))
        print(f"  processor for a chat, ms: pods {_spread(of_pods)}, gateway {_spread(of_gateway)}")
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
    parser.add_argument("--pods", nargs="+", default=["127.0.0.1:50051"])
    parser.add_argument("--pod-pids", nargs="*", type=int, default=[])
    parser.add_argument("--gateway-pid", nargs="*", type=int, default=[])
    parser.add_argument("--gateway", default="127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=1000, help="each way")
    parser.add_argument("--round", type=int, default=50, help="of them in a turn")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--alone", type=int, default=200, help="chats one by one, each way")
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
