"""Measure what a stream costs one front end in each protocol, without a model.

    python -P benchmarks/dialects.py --streams 2000 --tokens 16

The server and the program in the engine's place are those of front.py. Messages go as bytes, so
that the client takes as little as it can; the processor time of the front end beside the rate says
what a core of its own could serve.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2

sys.path.insert(0, str(Path(__file__).parent))
import front

from tokenpod_client.protos.fmaas import generation_pb2 as fmaas
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import generation_pb2

PROMPT = "def fibonacci(n):\n    " * 8


def requests(tokens: int) -> dict[str, Any]:
    """A request of each protocol, by the rpc that takes it; none has its text detokenised twice."""
    stopping = {"max_new_tokens": tokens}
    return {
        "/tokenpod.v1.GenerationService/Generate": generation_pb2.GenerateRequest(
            text=PROMPT, stopping=stopping
        ),
        "/generate.v3.TextGenerationService/Generate": v3.GenerateRequest(
            text=PROMPT, stopping=stopping
        ),
        "/fmaas.GenerationService/GenerateStream": fmaas.SingleGenerationRequest(
            request={"text": PROMPT}, params={"stopping": stopping}
        ),
        "/vllm.grpc.engine.VllmEngine/Generate": vllm_engine_pb2.GenerateRequest(
            text=PROMPT, stream=True, sampling_params={"max_tokens": tokens, "temperature": 0.0}
        ),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Streams a second, messages of a stream, and microseconds of the front end a stream."""

    rate: float
    messages: float
    cost: float


async def load(address: str, method: str, data: bytes, options: argparse.Namespace) -> int:
    """Run all streams, `--concurrency` at once; messages received."""
    left = iter(range(options.streams))
    received = 0

    async def work(channel: grpc.aio.Channel) -> None:
        nonlocal received
        call: Any = channel.unary_stream(method)
        for _ in left:
            async for _message in call(data):
                received += 1

    channels = [grpc.aio.insecure_channel(address, _OWN) for _ in range(4)]
    await asyncio.gather(*(work(channels[at % 4]) for at in range(options.concurrency)))
    for channel in channels:
        await channel.close()
    return received


_OWN = [("grpc.use_local_subchannel_pool", 1)]


async def measure(method: str, data: bytes, options: argparse.Namespace) -> Outcome:
    """Start a server, load it, read the clocks, stop it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        front._server(options.steps, Path(folder) / "engine.json", options) as (pid, address),
    ):
        warm = argparse.Namespace(**{**vars(options), "streams": options.concurrency})
        await load(address, method, data, warm)
        before, began = front._cpu_seconds(pid), time.monotonic()
        received = await load(address, method, data, options)
        took, spent = time.monotonic() - began, front._cpu_seconds(pid) - before
    n = options.streams
    return Outcome(n / took, received / n, 1e6 * spent / n)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=16, help="of each stream")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--steps", type=float, default=400, help="of the engine, a second")
    asyncio.run(run(parser.parse_args()))
    return 0


async def run(options: argparse.Namespace) -> None:
    """All protocols in one event loop: grpc's clients are not for several."""
    options.profile, options.front_ends = False, 1
    print("streams/s   messages   front end, us a stream   streams a core and second   protocol")
    for method, request in requests(options.tokens).items():
        got = await measure(method, request.SerializeToString(), options)
        print(
            f"{got.rate:9.0f}  {got.messages:9.1f}  {got.cost:23.0f}  {1e6 / got.cost:26.0f}"
            f"   {method.split('/')[1]}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
