"""Measure the Shepherd Model Gateway's way to a pod against our own `Generate`, on chats.

    python -P benchmarks/gateway.py --pod 127.0.0.1:50051 --gateway 127.0.0.1:8000

Both lead to the same pod; docs/openai.md says how to start them. The same chats go both ways:
first all of them, `--concurrency` at once, then some one by one for the first token's latency.
Each way has its own chats, so that neither finds the other's prompts in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

#: Runs one chat; seconds until its first text.
Chat = Callable[[str], Awaitable[float]]
_QUESTION = "Write a function that sums a list of numbers, and skips those that are negative. "


def own(address: str, tokens: int) -> Chat:
    """Our own `Generate`."""
    stub: Any = GenerationServiceStub(grpc.aio.insecure_channel(address))

    async def chat(text: str) -> float:
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


async def throughput(chat: Chat, name: str, options: argparse.Namespace) -> float:
    """Chats a second."""
    left = iter(range(options.requests))

    async def work() -> None:
        for number in left:
            await chat(f"{name} {number}: {_QUESTION}")

    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(options.concurrency)))
    return options.requests / (time.monotonic() - began)


async def latency(chat: Chat, name: str, options: argparse.Namespace) -> float:
    """Median seconds to the first text of chats that run alone."""
    found = [await chat(f"{name} alone {at}: {_QUESTION}") for at in range(options.alone)]
    return statistics.median(found)


async def run(options: argparse.Namespace) -> None:
    """Both ways in turns."""
    ways = {
        "own": own(options.pod, options.tokens),
        "gateway": gateway(options.gateway, options.tokens),
    }
    for name, chat in ways.items():
        await chat(f"{name} warm: {_QUESTION}")
    print("way       chats/s   tokens/s   first text alone, ms")
    for turn in range(options.turns):
        for name, chat in ways.items():
            rate = await throughput(chat, f"{name} {turn}", options)
            alone = await latency(chat, f"{name} {turn}", options)
            print(f"{name:8}  {rate:7.1f}  {rate * options.tokens:9.0f}  {1e3 * alone:21.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pod", default="127.0.0.1:50051")
    parser.add_argument("--gateway", default="127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--alone", type=int, default=50)
    parser.add_argument("--turns", type=int, default=2)
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
