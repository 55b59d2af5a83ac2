"""What deterministic steps cost, and what it is for: tokens that differ when a request comes again.

Two engines over the same random weights take turns. Greedy requests are answered alone; then beside
others, with prompts cut into pieces, and again from cached prefixes: of each that comes out
otherwise the first token that differs is counted, and no token behind it. On a CPU, which has no
such kernels, both engines are the same.

    deterministic --requests 300
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.support import loads
from benchmarks.support.engine import Bench, Client, Engine
from benchmarks.support.models import random_model, random_weights, shape_names, shape_of
from benchmarks.support.report import Report
from benchmarks.support.timing import DEVICE
from tokenpod.core.outputs import StepOutputs
from tokenpod.engine.startup.memory import let_segments_grow

GPU = DEVICE.type == "cuda"
SMOKE = dict.fromkeys(
    ("cpu", "gpu"),
    "--shape tiny --requests 8 --longest 64 --rows 8 --prefill 32 --positions 128 --slots 2048"
    " --sequences 4 --tokens 8 --decode 1x16 4x16",
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=shape_names(), default="llama-3.1-8b" if GPU else "15m")
    parser.add_argument("--rows", type=int, default=256 if GPU else 32)
    parser.add_argument("--prefill", type=int, default=2048 if GPU else 128)
    parser.add_argument("--positions", type=int, default=2048 if GPU else 512)
    parser.add_argument("--slots", type=int, default=120_000 if GPU else 16_384, help="of KV, each")
    parser.add_argument("--requests", type=int, default=300, help="chat-like, at once")
    parser.add_argument("--longest", type=int, default=1024 if GPU else 256)
    parser.add_argument("--decode", nargs="*", default=["1x256", "64x512"], metavar="ROWSxCONTEXT")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=32, help="that come again")
    parser.add_argument("--tokens", type=int, default=64, help="of each")
    parser.add_argument("--only", choices=["with", "without"], help="one engine")


@dataclass
class Tokens(Client):
    """Keeps them, by sequence."""

    tokens: dict[int, list[int]] = field(default_factory=dict)

    def send(self, message: object) -> None:
        super().send(message)
        if isinstance(message, StepOutputs):
            for sequence, token in zip(message.sequence_ids, message.token_ids, strict=True):
                self.tokens.setdefault(sequence, []).append(token)


def run(asked: argparse.Namespace, report: Report) -> None:
    if GPU:
        let_segments_grow()
    else:
        torch.set_num_threads(1)
    dtype, shape = torch.bfloat16 if GPU else torch.float32, shape_of(asked.shape)
    weights = random_weights(shape, DEVICE, dtype)
    engines = {}
    for name in ("without", "with"):
        if asked.only in (None, name):
            ours = GPU and name == "with"
            model = random_model(shape, DEVICE, dtype, weights=weights, deterministic=ours)
            engines[name] = Engine(
                model,
                DEVICE,
                rows=asked.rows,
                positions=asked.positions,
                prefill=asked.prefill,
                max_batch_total_tokens=asked.slots,
                max_total_tokens=asked.positions,
            )
            report.note(f"{name}: warm after {engines[name].warm_s:.1f} s")
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(asked.rounds):
        for name in sorted(engines, reverse=bool(turn % 2)):
            for what, seconds in timed(engines[name], asked).items():
                times.setdefault((what, name), []).append(seconds)
    for (what, name), found in times.items():
        report.row("times", what=what, deterministic=name, seconds=found)
    for what in {what for what, _ in times}:
        if len(engines) == 2:
            ratio = statistics.median(times[what, "with"]) / statistics.median(
                times[what, "without"]
            )
            report.row("cost", what=what, times_as_long=ratio)
    for name, engine in engines.items():
        for how, (sequences, tokens) in flips(engine, asked).items():
            report.row(
                "tokens that differ",
                deterministic=name,
                how=how,
                sequences=sequences,
                tokens=tokens,
                in_10_000=1e4 * sequences / tokens,
            )


def timed(engine: Engine, asked: argparse.Namespace) -> dict[str, float]:
    """Seconds of the requests, and of decode steps."""
    client = Client()
    bench = Bench(engine.loop(client, limits={"prefix_caching": False}), client, engine.vocabulary)
    bench.run([(16, 4)])
    found = {}
    if asked.requests:
        lengths = [(prompt, new) for prompt, new, _ in loads.chat(asked.requests, asked.longest)]
        found[f"{asked.requests} chats"] = bench.run(lengths).seconds
    for spec in asked.decode:
        rows, context = map(int, spec.split("x"))
        bench.run([(context, 64)] * rows)
        ends = [b[0] - a[0] for a, b in zip(client.arrivals, client.arrivals[1:], strict=False)
                if a[1] == b[1] == rows]  # fmt: skip
        found[f"decode {spec}"] = statistics.median(ends)
    return found


def flips(engine: Engine, asked: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Of each way to come again: sequences that differ, and tokens up to where they do."""
    client = Tokens()
    bench = Bench(engine.loop(client), client, engine.vocabulary)
    longest = engine.positions - asked.tokens - 1
    lengths = [prompt for prompt, _, _ in loads.chat(asked.sequences, min(longest, 512), 7)]
    prompts = [[bench.draw.randrange(10, bench.vocabulary) for _ in range(n)] for n in lengths]

    def ask(each: int) -> list[list[int]]:
        """Tokens of all, so many at a time."""
        asked_for = []
        for first in range(0, len(prompts), each):
            asked_for += [bench.ask(prompt, asked.tokens) for prompt in prompts[first:][:each]]
            bench.turn_until(lambda: not client.left)
        return [client.tokens[sequence] for sequence in asked_for]

    def fresh(**limits: Any) -> None:
        bench.loop = engine.loop(client, limits=limits)

    fresh(prefix_caching=False)
    alone = ask(1)
    found = {}
    for prompt, new, _ in loads.chat(2 * asked.sequences, asked.longest, 8):
        bench.ask(min(prompt, longest), min(new, asked.tokens))
    found["in company"] = ask(len(prompts))
    fresh()
    for prompt in prompts:  # the beginnings of all are cached
        bench.ask(prompt[: len(prompt) * 2 // 3 + 1], 2)
    bench.turn_until(lambda: not client.left)
    found["cached"] = ask(1)
    found["cached, in company"] = ask(len(prompts))
    return {how: differing(alone, tokens) for how, tokens in found.items()}


def differing(one: list[list[int]], other: list[list[int]]) -> tuple[int, int]:
    """Sequences that differ, and tokens up to where they do."""
    firsts = [
        next((i for i in range(len(a)) if a[i] != b[i]), None)
        for a, b in zip(one, other, strict=True)
    ]
    tokens = sum(len(a) if at is None else at + 1 for at, a in zip(firsts, one, strict=True))
    return sum(at is not None for at in firsts), tokens
