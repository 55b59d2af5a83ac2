"""What part of prompts is found in a full prefix cache, by what is forgotten first: on a CPU.

    python -P benchmarks/eviction.py --slots 100000

Requests run a few at a time through the bookkeeping of keys and values alone. Kinds: `chats` come
back with all that was said before, after a while; `agents` begin with one of many long common
prompts, some far more often than others; `mixed` are agents among documents that come only once.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Iterator
from random import Random

import numpy as np

from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.radix import Tokens
from tokenpod.scheduler.sequence import Sequence

VOCABULARY = 128_000
#: Requests that run at once, and new tokens of each.
AT_ONCE, OUTPUT = 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{options.slots} slots, {options.requests} requests: tokens of prompts that were cached")
    for kind in (chats, agents, mixed):
        shares = []
        for by_uses in (False, True):
            prompts = kind(Random(options.seed), np.random.default_rng(options.seed))
            shares.append(hit_share(KV(options.slots, by_uses=by_uses), prompts, options.requests))
        print(f"{kind.__name__:8}lru {shares[0]:6.1%}   lfu {shares[1]:6.1%}")


def hit_share(kv: KV, prompts: Iterator[Tokens], requests: int) -> float:
    """Of the prompts' tokens in the second half, those that were in the tree."""
    live: deque[Sequence] = deque()
    total, cached = 0, 0
    draw = np.random.default_rng(7)
    for number in range(requests):
        if len(live) == AT_ONCE:
            _end(kv, live.popleft(), draw)
        prompt = next(prompts)
        asked = Request([number], prompt.tolist(), SamplingParams(), StoppingParams(OUTPUT))
        sequence = Sequence(asked, 0, prompt, kv.table)
        kv.begin(sequence)
        if number >= requests // 2:
            total += len(prompt)
            cached += sequence.cached
        n = sequence.to_compute
        kv.extend(sequence, n)
        sequence.computed += n
        assert sequence.node is not None
        kv.tree.use(sequence.node)
        kv.publish_inputs(sequence, awaited=False)
        live.append(sequence)
    return cached / total


def _end(kv: KV, sequence: Sequence, draw: np.random.Generator) -> None:
    kv.extend(sequence, OUTPUT - 1)
    sequence.computed += OUTPUT - 1
    sequence.outputs += draw.integers(VOCABULARY, size=OUTPUT).tolist()
    kv.release(sequence)
    sequence.leave()


def chats(chance: Random, draw: np.random.Generator) -> Iterator[Tokens]:
    """400 people, each of whom goes on after a while or begins anew."""
    waiting: list[tuple[float, int, Tokens]] = []
    number = 0
    now = 0.0
    while True:
        if len(waiting) < 400:
            said = _tokens(draw, chance.randrange(50, 400))
        else:
            now, _, before = heapq.heappop(waiting)
            said = np.concatenate((before, _tokens(draw, chance.randrange(80, 300))))
        yield said
        number += 1
        if chance.random() < 0.85:
            heapq.heappush(waiting, (now + chance.lognormvariate(4, 1.5), number, said))


def agents(chance: Random, draw: np.random.Generator) -> Iterator[Tokens]:
    """300 common prompts of 500 to 3,000 tokens, the k-th with a weight of 1 / k."""
    common = [_tokens(draw, chance.randrange(500, 3000)) for _ in range(300)]
    weights = [1 / (k + 1) for k in range(len(common))]
    while True:
        (begin,) = chance.choices(common, weights)
        yield np.concatenate((begin, _tokens(draw, chance.randrange(50, 500))))


def mixed(chance: Random, draw: np.random.Generator) -> Iterator[Tokens]:
    """Agents, and every third request a document of 4,000 tokens that never comes again."""
    common = agents(chance, draw)
    while True:
        yield _tokens(draw, 4000) if chance.random() < 1 / 3 else next(common)


def _tokens(draw: np.random.Generator, n: int) -> Tokens:
    return draw.integers(VOCABULARY, size=n, dtype=np.int32)


if __name__ == "__main__":
    main()
