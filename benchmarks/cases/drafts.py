"""What drafts bring at a set acceptance, at no cost and by a draft model, by turns with none.

An 8B shape with random weights but for the head, whose row j is the embedding's row j - 1: after
token t it says t + 1, whatever the layers add and however sums are rounded. So a source can be
right for any share of the tokens.

    simulated   a source that is right for --right of the tokens, at no cost; --sampled draws tokens
    model       a draft model of --draft's sizes, as often right; its own time counts

A ratio is of tokens per second from the first token of all on.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.support.engine import GREEDY, Client, Engine
from benchmarks.support.models import random_model, shape_names, shape_of
from benchmarks.support.report import Report
from benchmarks.support.timing import DEVICE, by_turns, pair_ratios, synchronise
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.startup.memory import let_segments_grow
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.scheduler.drafts.drafting import Drafting, ModelDrafts
from tokenpod.scheduler.steps.step_times import Costs

GPU = DEVICE.type == "cuda"
CASES = ("simulated", "model")
SMOKE = {
    "cpu": "--served nano --draft nano --rounds 1 --rows 1 --new 24",
    "gpu": "--served tiny --draft nano --rounds 2 --rows 1 4 --new 100",
}
SAMPLED = SamplingParams(do_sample=True, temperature=0.8, repetition_penalty=1.1, seed=1)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--served", choices=shape_names(), default="llama-3.1-8b")
    parser.add_argument("--draft", choices=shape_names(), default="160m", help="its sizes")
    parser.add_argument("--right", type=float, default=0.75, help="share of tokens")
    parser.add_argument("--speculate", type=int, default=8)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--new", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--sampled", action="store_true", help="with a penalty; else greedy")
    parser.add_argument("--rounds", type=int, default=3)


def run(asked: argparse.Namespace, report: Report) -> None:
    if GPU:
        let_segments_grow()
    served = counting(shape_of(asked.served), drafts=asked.speculate)
    small = asked.served.startswith(("tiny", "nano"))
    slots = {"max_batch_total_tokens": 1 << 15 if small else 300_000}
    sizes = {"rows": 16 if small else 512, "positions": 4096, "prefill": 512 if small else 4096}
    sampling = SAMPLED if asked.sampled else GREEDY
    if "simulated" in asked.cases:
        engine = Engine(served, DEVICE, speculate=asked.speculate, **sizes, **slots)
        for rows in asked.rows:
            asks = batch(rows, sampling, asked.new)
            measure(f"simulated {rows}", asks, lambda: Counting(asked.right), engine, asked, report)
        del engine
    if "model" in asked.cases:
        # Few rows, so that few sizes of steps are captured.
        sizes = {"rows": 16, "positions": 4096, "prefill": 256}
        shape = {**shape_of(asked.draft), "vocab_size": served.config.vocab_size}
        extra = {"draft": counting(shape, asked.right)}
        engine = Engine(served, DEVICE, extra=extra, speculate=asked.speculate, **sizes, **slots)
        plain = Engine(served, DEVICE, **sizes, **slots)
        for rows in asked.rows:
            asks = batch(rows, sampling, asked.new)
            measure(f"model {rows}", asks, ModelDrafts, engine, asked, report, plain=plain)


class Counting:
    """A source that is right for a given share of the tokens."""

    watched = True

    def __init__(self, right: float) -> None:
        self._right, self._chance = right, random.Random(1)

    def find(self, sequence: Any, most: int) -> list[int]:
        """t + 1, t + 2, ... behind token t, or t again where it is wrong."""
        last = sequence.outputs[-1]
        return [
            last + i if self._chance.random() < self._right else last for i in range(1, most + 1)
        ]

    def forget(self, sequence: Any) -> None:
        """Nothing is known of it."""


def counting(shape: dict[str, Any], right: float = 1.0, drafts: int = 0) -> Decoder:
    """A model that says t + 1 after token t, or, for tokens drawn at random, something else.

    `drafts`: so many of a row may be wrong.
    """

    def count(weights: dict[str, Any]) -> None:
        head = weights["embedding"].roll(1, 0) / 64
        chance = torch.rand(len(head), generator=torch.Generator().manual_seed(3))
        head[(chance >= right).to(head.device)] = 0
        weights["head"] = head

    dtype = torch.bfloat16 if GPU else torch.float32
    return random_model(shape, DEVICE, dtype, change=count, drafts=drafts)


def counted(first: int, prompt: int, new: int, sampling: SamplingParams, number: int) -> Request:
    """A prompt of falling numbers, so that nothing of the answer is in it."""
    tokens = [(first + 20_000 - at) % 500 for at in range(prompt - 1)]
    return Request([number], [*tokens, first % 500], sampling, StoppingParams(new), drafts=64)


def batch(rows: int, sampling: SamplingParams, new: int) -> Callable[[int], list[Request]]:
    """So many requests, of other numbers in each round."""
    return lambda turn: [counted(37 * i + 11 * turn, 256, new, sampling, i) for i in range(rows)]


def measure(
    name: str,
    requests: Callable[[int], list[Request]],
    source: Callable[[], Any],
    engine: Engine,
    asked: argparse.Namespace,
    report: Report,
    plain: Engine | None = None,
) -> None:
    """With drafts and without by turns; `plain` answers without, if it is another engine."""
    turns, counts, costs = {"with": 0, "without": 0}, [0, 0], Costs()

    def rate(way: str) -> float:
        own = plain if way == "without" and plain else engine
        drafting = lambda kv: Drafting(source(), asked.speculate, kv, costs)  # noqa: E731
        drafts = {"drafting": drafting if way == "with" else None}
        value, load = answer(own, requests(turns[way]), drafts)
        turns[way] += 1
        if way == "with" and turns[way] > 1:
            counts[0] += load.drafted_tokens
            counts[1] += load.accepted_tokens
        return value

    found = by_turns({way: (lambda way=way: rate(way)) for way in turns}, asked.rounds)  # type: ignore[misc]
    report.row(
        "drafts",
        case=name,
        **{"tokens/s": found["with"], "without": found["without"]},
        ratio=pair_ratios(found["with"], found["without"]),
        drafted=counts[0],
        accepted_share=counts[1] / counts[0] if counts[0] else None,
    )


def answer(engine: Engine, requests: list[Request], drafts: dict[str, Any]) -> tuple[float, Any]:
    """Tokens per second of one round, and the engine's load at its end."""
    client = Client(by_sequence=True)
    client.inbox, client.left = list(requests), len(requests)
    # Nothing is cached: another way's tokens lie in the slots by then.
    loop = engine.loop(client, limits={"prefix_caching": False}, full=False, **drafts)
    tokens = lambda: sum(map(len, client.times.values()))  # noqa: E731
    with torch.inference_mode():
        while len(client.times) < len(requests):
            loop.turn()
        began, before = time.perf_counter(), tokens()
        while client.left:
            loop.turn()
        while loop._flying is not None:  # another way's steps are the next
            loop.turn()
    synchronise()
    assert not client.refused, client.refused[0]
    return (tokens() - before) / (time.perf_counter() - began), client.load
