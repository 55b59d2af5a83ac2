"""Constrained rows in the engine's loop: what masks cost a batch, and what schemas cost streams.

    python -P benchmarks/gpu_constraints.py                    an 8B shape of random weights, H200
    python -P benchmarks/gpu_constraints.py --cpu              the embedded model

Cases (`--cases`), each after the other over one engine:

    threads   masks of 64 texts (--rows) by one call of the library, with so many threads
    schemas   64 rows of sampled text without constraints (`plain`), then each row under a JSON
              schema of its own that nobody had before (`cold`), the same schemas again (`warm`),
              and all rows under one of them (`one`); with the times of the loop's parts
                                                      aim: 0.95 of plain, late <= 1 %
    slow      as cold, and one row whose masks take 50 ms           aim: the others as in `cold`
    forced    rows whose texts have many forced tokens, without jumping ahead, with it wherever
              there are any (--speculate of a row in a step), and as a server decides
    arrivals  32 plain streams (--streams) while 200 requests (--arrivals) come: none, plain ones,
              and schemas, each of its own, by turns (--rounds); now and then some that the library
              would take minutes for                                aim: p99 of their gaps + 10 %

The kinds of `schemas` and `forced` take turns (--pairs), and so much of the first one's rate is the
median of the pairs.

A vocabulary of 128,256 tokens is trained at the start, in about a minute; `--save-vocabulary FILE`
keeps it, and `--vocabulary FILE` reads it, or as many tokens of the tekken_240911.json that the
package mistral-common brings. The cases take a minute on an H200.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from constrained_arrivals import arrivals
from constrained_engine import Bench, demo, schema, shape_8b, words
from constrained_turns import Turns

from tokenpod.core.constraints import Choice, Constraint, Regex
from tokenpod.core.outputs import MaskCounts
from tokenpod.engine.constraints import guidance_batch, workers
from tokenpod.engine.constraints.guidance import Guidance

#: Every other token or so is the only one that is allowed.
STAMPS = r"(\d{{4}}-0[1-9]-[0-3]\dT00:00:00Z~q{}#\^;){{200}}"


class Rates(NamedTuple):
    """Tokens a second of the rows but the slow one's."""

    #: From the moment at which all have begun: those that began first end first.
    all: float
    #: From that moment until the first one ends.
    together: float


def rows(bench: Bench, name: str, constraints: list[Constraint | None], new: int) -> Rates:
    """How fast they are; prints a line."""
    before = bench.client.load.masks if bench.client.load else MaskCounts()
    sequences = [bench.ask(constraint, new) for constraint in constraints]
    quick = [s for s, c in zip(sequences, constraints, strict=True) if not isinstance(c, Choice)]
    bench.run(set(quick))
    gaps = bench.gaps(quick)
    begin = max(bench.client.times[s][0] for s in quick)
    times = np.sort(np.concatenate([bench.client.times[s] for s in quick]))
    first_end = min(bench.client.times[s][-1] for s in quick)
    all_begun, together = times[times > begin], times[(times > begin) & (times <= first_end)]
    rates = Rates(len(all_begun) / (all_begun[-1] - begin), len(together) / (together[-1] - begin))
    began = min(bench.client.times[s][0] for s in quick)
    told = ""
    assert bench.client.load is not None
    now = bench.client.load.masks
    if needed := now.needed - before.needed:
        took = (now.nanoseconds - before.nanoseconds) / needed / 1e3
        told = (
            f"  late {(now.late - before.late) / needed:6.2%} of {needed} masks, {took:.0f} us each"
        )
    median, p99 = statistics.median(gaps), float(np.percentile(gaps, 99))
    print(
        f"{name:13} {rates.all:9.0f} tok/s, together {rates.together:6.0f}, all begin within "
        f"{(begin - began) * 1e3:5.1f} ms  gap {median:7.2f} ms  p99 {p99:7.2f} ms{told}",
        flush=True,
    )
    bench.end(sequences)
    return rates


def by_turns(rounds: int, kinds: Mapping[str, Callable[[], Rates]]) -> dict[str, float]:
    """Each kind's median rate, beside the first one's: all of them by turns, so often."""
    rates = defaultdict[str, list[Rates]](list)
    names = [*kinds]
    for at in range(rounds):
        for name in (*names[at % len(names) :], *names[: at % len(names)]):
            rates[name].append(kinds[name]())
    first = np.array(rates[names[0]])
    for name in names[1:]:
        for way, part in enumerate(Rates._fields):
            pairs = (np.array(rates[name]) / first)[:, way]
            low, middle, high = np.percentile(pairs, (25, 50, 75))
            print(
                f"          {name:14} {part:9} {middle:.3f} of `{names[0]}`, quartiles {low:.3f} "
                f"and {high:.3f} of {rounds} pairs",
                flush=True,
            )
    return {name: statistics.median(each.all for each in found) for name, found in rates.items()}


def forced(bench: Bench) -> None:
    """Texts with forced tokens, without jumping ahead and with it."""
    ahead, asked = bench.loop.scheduler.forced, bench.asked
    most, costs = ahead.most, ahead._costs
    texts: list[Constraint | None] = [Regex(STAMPS.format(i)) for i in range(asked.rows // 2)]
    steps = {}

    def measured(kind: str, most: int, *, learns: bool) -> Rates:
        ahead.most, ahead._costs = most, costs if learns else None
        before = bench.client.steps
        rate = rows(bench, kind, texts, asked.new)
        steps[kind] = bench.client.steps - before
        return rate

    measured("warm up", most, learns=True)
    by_turns(
        asked.pairs,
        {
            "without": lambda: measured("without", 0, learns=False),
            "always": lambda: measured("always", most, learns=False),
            "where it pays": lambda: measured("where it pays", most, learns=True),
        },
    )
    print(f"          steps: {steps}")
    if costs is not None:
        n = len(texts)
        some = [f"{n + more} {costs.of(n + more) / 1e6:.2f}" for more in (1, 8, 16, 32, 64)]
        plain = costs.of(n, drafts=False) / 1e6
        print(f"          learned: steps of {n} rows {plain:.2f} ms, with forced tokens", *some)


def threads(known: tuple[list[bytes], list[int]], n: int) -> None:
    """Masks of n texts by one call, after random tokens: by the library's threads and what the
    caller's thread makes itself.
    """
    library, width = Guidance(*known), len(known[0])
    few = guidance_batch._FEW
    for count, most in ((1, n), (1, few), (4, few), (8, few), (12, few), (16, few)):
        library._batches, guidance_batch._FEW = None, most
        guidance_batch._ALONE_NS = 500_000 if most == few else 10**10
        random, parts = np.random.default_rng(7), []
        matchers = [library.compile(schema(i)) for i in range(n)]
        masks = np.zeros((n, -(-width // 32)), np.int32)
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.fill(mask)
        for _ in range(64):
            allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
            found = map(np.flatnonzero, allowed)
            tokens = [int(some[random.integers(len(some))]) for some in found]
            began = time.perf_counter()
            masks = library.advance(list(zip(matchers, tokens, strict=True)), count).words
            parts.append((time.perf_counter() - began) * 1e3)
        early, late = np.array(parts[:24]), np.array(parts[24:])
        print(
            f"threads   {count if most == few else 0:3}: first 24 tokens mean "
            f"{early.mean():6.2f} median {np.median(early):6.2f}; then mean {late.mean():6.2f} "
            f"median {np.median(late):6.2f} p95 {np.percentile(late, 95):6.2f} ms",
            flush=True,
        )


def schemas(bench: Bench) -> float:
    """Rows under schemas beside rows without; tokens a second of the cold ones."""
    n, new = bench.asked.rows, bench.asked.new
    rows(bench, "warm up", [None] * n, new // 4)
    rows(bench, "warm up", [schema(i) for i in range(n)], new // 4)
    cold = 0

    def of(name: str, *, many: bool = True, fresh: bool = False) -> Rates:
        nonlocal cold
        cold += fresh
        return rows(bench, name, [schema(1000 * cold + i * many) for i in range(n)], new)

    rates = by_turns(
        bench.asked.pairs,
        {
            "plain": lambda: rows(bench, "plain", [None] * n, new),
            "cold": lambda: of("cold", fresh=True),
            "warm": lambda: of("warm"),
            "one": lambda: of("one", many=False),
        },
    )
    for kind in ("plain", "cold", "one"):
        turns = Turns(bench)
        if kind == "plain":
            rows(bench, "plain, timed", [None] * n, new)
        else:
            of(f"{kind}, timed", many=kind == "cold", fresh=kind == "cold")
        turns.stop()
        print(turns.by_part(wanted=lambda turn: "wait for the step" in turn), flush=True)
    return rates["cold"]


def slow(bench: Bench, masked: float) -> None:
    """Rows under schemas beside one whose masks take 50 ms."""
    n = bench.asked.rows
    some: list[Constraint | None] = [schema(3000 + i) for i in range(n - 1)]
    mixed = rows(bench, "slow", [*some, Choice(("a" * 4000,))], bench.asked.new).all
    print(f"          {mixed / (n - 1) / (masked / n):.3f} of `cold` a row, beside 50 ms a mask")


def measure(bench: Bench, cases: list[str]) -> None:
    """The cases that are asked for."""
    masked = schemas(bench) if {"schemas", "slow"} & {*cases} else 0.0
    if "slow" in cases:
        slow(bench, masked)
    if "forced" in cases:
        forced(bench)
    if "arrivals" in cases:
        arrivals(bench)
    assert not bench.client.refused, bench.client.refused[0]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cpu", action="store_true", help="the embedded model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--arrivals", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=3, help="of `schemas` and `forced`")
    parser.add_argument("--rounds", type=int, default=30, help="of `arrivals`")
    parser.add_argument("--new", type=int, default=256, help="tokens of each row")
    parser.add_argument("--speculate", type=int, default=4, help="forced tokens of a row in a step")
    parser.add_argument("--workers", type=int, default=0, help="as --constraint-workers")
    parser.add_argument("--compilers", type=int, default=2, help="threads that compile")
    parser.add_argument("--cases", default="threads,schemas,slow,forced,arrivals")
    parser.add_argument("--vocabulary", type=Path, help="read from here")
    parser.add_argument("--save-vocabulary", type=Path, help="kept here once it is made")
    asked = parser.parse_args()
    began = time.perf_counter()
    workers._MOST_COMPILERS = asked.compilers
    cases = asked.cases.split(",")
    if "threads" in cases and not asked.cpu:
        threads(words(asked), asked.rows)
    if {*cases} != {"threads"}:
        measure(demo(asked) if asked.cpu else shape_8b(asked), cases)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
