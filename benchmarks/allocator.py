"""What slots cost to take and to give back, and in how many runs prompts lie: on a CPU.

    python -P benchmarks/allocator.py --slots 1000000 --occupancy 0.8

Requests of mixed lengths come and go at an even occupancy. Two ways: `alone` is the allocator by
itself; `cached` is what sequences do, whose slots stay in the prefix tree when they end, so that
slots are evicted for every new one. Printed are processor microseconds of a request of 1,024 prompt
tokens, and the share of prompts' tokens that lie in one run of adjacent slots.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable
from random import Random

import numpy as np

from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.slots import Extent, SlotAllocator

#: Of the request that is timed.
PROMPT, OUTPUT = 1024, 256
VOCABULARY = 128_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, default=1_000_000)
    parser.add_argument("--occupancy", type=float, default=0.8)
    parser.add_argument("--requests", type=int, default=20_000, help="that churn before and during")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    given = options.slots, options.occupancy, options.requests, Random(options.seed)
    print(f"{options.slots} slots, {options.occupancy:.0%} of them taken")
    for name, churn in (("alone", alone), ("cached", cached)):
        took, ended, whole = churn(*given)
        print(f"{name:8}take  {_figures(took)}")
        print(f"{name:8}free  {_figures(ended)}")
        print(f"{name:8}{whole:.1%} of prompts' tokens in one run")


def lengths(chance: Random) -> tuple[int, int]:
    """Prompt and output of a request that churns: half are short, some are very long."""
    prompt = min(int(chance.lognormvariate(6.2, 1.1)) + 16, 32_768)
    return prompt, min(int(chance.lognormvariate(5.0, 1.0)) + 1, 2048)


def alone(
    slots: int, occupancy: float, requests: int, chance: Random
) -> tuple[list[float], list[float], float]:
    """Microseconds of taking and of freeing, and the share of prompts' tokens in one run."""
    allocator = SlotAllocator(slots)
    live: list[tuple[int, list[Extent]]] = []
    took: list[float] = []
    ended: list[float] = []
    whole, total = 0, 0

    def free() -> float:
        at = chance.randrange(len(live))
        live[at], live[-1] = live[-1], live[at]
        _, extents = live.pop()
        return _timed(lambda: [allocator.release(extent) for extent in extents])

    for number in range(requests):
        prompt, output = (PROMPT, OUTPUT) if number % 10 == 0 else lengths(chance)
        while live and slots - allocator.free + prompt > occupancy * slots:
            spent = free()
            ended.append(spent)
        extents: list[Extent] = []

        def take(n: int = prompt, room: int = output, into: list[Extent] = extents) -> None:
            into += allocator.allocate(n, position=0, room=room)

        spent = _timed(take)
        if number > requests // 2:
            total += prompt
            whole += prompt if len(extents) == 1 else max(e.used for e in extents)
            if prompt == PROMPT:
                took.append(spent)
        # Outputs grow into their rooms, and end before their bound.
        for grown in range(0, chance.randrange(output), 16):
            del grown
            extents += allocator.grow(extents[-1], min(16, allocator.free), 0)
        live.append((prompt, extents))
    return took, ended[len(ended) // 2 :], whole / total


def cached(
    slots: int, occupancy: float, requests: int, chance: Random
) -> tuple[list[float], list[float], float]:
    """The same through the prefix tree; what is not taken by sequences is full of old prompts."""
    kv = KV(slots)
    live: deque[Sequence] = deque()
    took: list[float] = []
    ended: list[float] = []
    whole, total, held = 0, 0, 0
    draw = np.random.default_rng(chance.randrange(1 << 30))
    for number in range(requests):
        timed = number % 10 == 0
        prompt, output = (PROMPT, OUTPUT) if timed else lengths(chance)
        while live and held + prompt + output > occupancy * slots:
            sequence = live.popleft() if chance.random() < 0.5 else live.pop()
            held -= sequence.bound + 1
            spent = _timed(lambda s=sequence: kv.release(s))  # type: ignore[misc]
            ended.append(spent)
            sequence.leave()
        tokens = draw.integers(VOCABULARY, size=prompt, dtype=np.int32)
        asked = Request([number], tokens.tolist(), SamplingParams(), StoppingParams(output))
        sequence = Sequence(asked, 0, tokens, kv.table)
        held += prompt + output
        kv.begin(sequence)

        def take(s: Sequence = sequence, n: int = prompt) -> None:
            kv.extend(s, n)

        spent = _timed(take)
        sequence.computed = prompt
        if number > requests // 2:
            total += prompt
            whole += max(extent.used for extent in sequence.extents)
            if timed:
                took.append(spent)
        kv.publish_inputs(sequence, awaited=False)
        for _ in range(chance.randrange(output)):
            kv.extend(sequence, 1)
            sequence.computed += 1
            sequence.outputs.append(int(draw.integers(VOCABULARY)))
        live.append(sequence)
    return took, ended[len(ended) // 2 :], whole / total


def _timed(call: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - began) / 1000


def _figures(spent: list[float]) -> str:
    ordered = sorted(spent)
    late = ordered[int(len(ordered) * 0.99)]
    return (
        f"{statistics.median(spent):7.1f} us median {statistics.fmean(spent):8.1f} us mean "
        f"{late:8.1f} us p99"
    )


if __name__ == "__main__":
    main()
