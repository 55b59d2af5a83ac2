"""Lengths of requests, when they arrive, and the figures of a run that served them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tokenpod.simulator.trace import Arrival

Lengths = list[tuple[int, int, int]]  # prompt, output, asked for


def chat(count: int, longest: int, seed: int = 1) -> Lengths:
    """Like ShareGPT's: all ask for the longest output, and most end long before."""
    chance = random.Random(seed)

    def drawn(median: float, sigma: float) -> int:
        return min(max(int(chance.lognormvariate(np.log(median), sigma)), 4), longest)

    return [(drawn(longest / 6, 1.0), drawn(longest / 5, 0.9), longest) for _ in range(count)]


def uneven(count: int, longest: int, seed: int = 2) -> Lengths:
    """Outputs of 8 or of the longest, which requests ask for: their bounds are true."""
    chance = random.Random(seed)
    lengths = []
    for _ in range(count):
        new = chance.choice([8, longest])
        lengths.append((chance.randint(longest // 16, longest // 2), new, new))
    return lengths


def unknown(count: int, longest: int, seed: int = 2) -> Lengths:
    """The same outputs, but all ask for the longest."""
    return [(prompt, new, longest) for prompt, new, _ in uneven(count, longest, seed)]


SHAPES: dict[str, Callable[[int, int], Lengths]] = {
    "chat": chat,
    "uneven": uneven,
    "unknown": unknown,
}


def arrivals(lengths: Lengths, rate: float | None, seed: int = 5) -> list[Arrival]:
    """A Poisson process of so many requests per second; None: all at once."""
    chance, at, made = random.Random(seed), 0.0, []
    for prompt, output, asked in lengths:
        at += chance.expovariate(rate) if rate else 0.0
        made.append(Arrival(at, prompt, output, asked))
    return made


def figures(
    arrived: list[Arrival], tokens: list[np.ndarray], bounds: tuple[float, float]
) -> dict[str, float]:
    """Of one run. `tokens`: seconds of each request's tokens; `bounds`: ttft and each gap."""
    end = max(float(came[-1]) for came in tokens)
    first = np.array([came[0] - each.at for each, came in zip(arrived, tokens, strict=True)])
    gaps = [np.diff(came) for came in tokens]
    slowest = np.array([np.quantile(gap, 0.99) if len(gap) else 0.0 for gap in gaps])
    good = (first <= bounds[0]) & (slowest <= bounds[1])
    every = np.concatenate(gaps)
    return {
        "seconds": end,
        "tokens_per_s": sum(map(len, tokens)) / end,
        "requests_per_s": len(arrived) / end,
        "goodput_per_s": float(good.sum()) / end,
        "good_share": float(good.mean()),
        "ttft_p50": float(np.quantile(first, 0.5)),
        "ttft_p99": float(np.quantile(first, 0.99)),
        "itl_p50": float(np.quantile(every, 0.5)),
        "itl_p99": float(np.quantile(every, 0.99)),
    }


def workload_cases(path: Path) -> tuple[dict[str, list[tuple[int, int]]], dict[str, Any] | None]:
    """(prompt, output) lengths by case, and the model's shape if the file has one.

    Reads both forms: `{"cases": [{"name", "requests": [[p, o]]}], "model"}` and
    `{NAME: {"requests": [{"prompt": p, "output": o}]}}`.
    """
    file = json.loads(path.read_text())
    if "cases" in file:
        cases = {c["name"]: [(p, o) for p, o in c["requests"]] for c in file["cases"]}
        return cases, file.get("model")
    named = {name: case for name, case in file.items() if isinstance(case, dict)}
    return {
        name: [(each["prompt"], each["output"]) for each in case["requests"]]
        for name, case in named.items()
    }, None


def random_prompts(
    lengths: list[tuple[int, int]], vocabulary: int, seed: int
) -> list[tuple[list[int], int]]:
    """Prompts of random ids of these lengths, with their outputs."""
    draw = random.Random(seed)
    return [
        ([draw.randrange(10, vocabulary) for _ in range(prompt)], output)
        for prompt, output in lengths
    ]
