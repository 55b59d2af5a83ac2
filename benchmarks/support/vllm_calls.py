"""Streams through vLLM's gRPC protocol, which both its own server and a pod speak."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

_RPC = "/vllm.grpc.engine.VllmEngine/Generate"


def level(
    address: str,
    lengths: list[tuple[int, int]],
    vocabulary: int,
    *,
    rate: float = float("inf"),
    seed: int = 1,
    processes: int = 1,
) -> dict[str, Any]:
    """What `tokenpod bench` reports of a load, as far as `serve` reads it.

    Args:
        rate: requests per second, Poisson; inf: all at once.
    """
    chance, at, asked = random.Random(seed), 0.0, []
    for number, (prompt, output) in enumerate(lengths):
        at += chance.expovariate(rate) if rate != float("inf") else 0.0
        ids = [chance.randrange(10, vocabulary) for _ in range(prompt)]
        asked.append((at, f"{seed}-{number}", ids, output))
    begin = time.time() + 3.0  # the processes are there by then
    parts = [(address, asked[own::processes], begin) for own in range(processes)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = list(itertools.chain.from_iterable(pool.map(_serve, parts)))
    firsts = [times[0] - due for due, times in found]
    gaps = np.concatenate([np.diff(times) for _, times in found])
    began = min(due for due, _ in found)

    def shares(values: Any) -> dict[str, float]:
        return {f"p{x}": float(np.percentile(values, x)) for x in (50, 99)} if len(values) else {}

    return {
        "duration_s": max(times[-1] for _, times in found) - began,
        "tokens": {"output": sum(output for _, output in lengths)},
        "latency_s": {"ttft": shares(firsts), "itl": shares(gaps)},
    }


def _serve(part: tuple[str, list[Any], float]) -> list[tuple[float, list[float]]]:
    return asyncio.run(_calls(*part))


async def _calls(address: str, asked: list[Any], begin: float) -> list[tuple[float, list[float]]]:
    import grpc
    from smg_grpc_proto import vllm_engine_pb2 as pb

    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, own) for _ in range(4)]

    async def one(number: int, at: float, name: str, ids: list[int], output: int) -> Any:
        request = pb.GenerateRequest(
            request_id=name,
            tokenized=pb.TokenizedInput(input_ids=ids),
            sampling_params=pb.SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
            stream=True,
        )
        call: Any = channels[number % 4].unary_stream(
            _RPC,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        await asyncio.sleep(begin + at - time.time())
        times, tokens = [], 0
        async for event in call(request):
            if event.WhichOneof("response") == "chunk":
                tokens += len(event.chunk.token_ids)
                times.append(time.time())
        assert tokens == output, f"{name} has {tokens} tokens instead of {output}"
        return begin + at, times

    found = await asyncio.gather(*(one(n, *each) for n, each in enumerate(asked)))
    await asyncio.gather(*(channel.close() for channel in channels))
    return list(found)
