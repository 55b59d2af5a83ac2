"""Rows under constraints in the engine: their rate, and gaps of streams while they arrive.

On a GPU an 8B shape with random weights and a vocabulary of 128,256 tokens, trained on this
machine's Python sources in about a minute; on a CPU the embedded model.

    schemas   --rows of sampled text without constraints (`plain`), each row under a JSON schema of
              its own that nobody had before (`cold`), the same schemas again (`warm`), and all
              rows under one of them (`one`), by turns
    arrivals  --streams plain streams while --arrivals requests come: none, plain ones, and
              schemas, each of its own, by turns

An aim is 0.95 of plain, and gaps whose 99th percentile is at most 1.10 of calm.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.support.engine import Bench, Client, Engine, demo_model
from benchmarks.support.models import random_model, shape_of
from benchmarks.support.report import Report
from benchmarks.support.timing import DEVICE, by_turns, pair_ratios, percentiles
from tokenpod.core.constraints import Constraint, ConstraintLimits, JsonSchema
from tokenpod.core.messages import Vocabulary
from tokenpod.core.outputs import MaskCounts
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.startup.memory import let_segments_grow
from tokenpod.scheduler.steps.step_times import Costs
from tokenpod.service.pod.model_store import resolve_model
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

GPU = DEVICE.type == "cuda"
CASES = ("schemas", "arrivals")
SMOKE = {
    "cpu": "--rows 2 --new 12 --streams 2 --arrivals 2 --rounds 1 --pairs 1 --calm 4",
    "gpu": "--rows 2 --new 12 --streams 2 --arrivals 2 --rounds 1 --pairs 1 --calm 4 --shape tiny",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--shape", default="llama-3.1-8b", help="on a GPU")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new", type=int, default=256, help="tokens of each row")
    parser.add_argument("--pairs", type=int, default=3, help="rounds of `schemas` and `forced`")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--arrivals", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30, help="of `arrivals`")
    parser.add_argument("--calm", type=int, default=50, help="steps of a stretch without arrivals")
    parser.add_argument("--speculate", type=int, default=4, help="forced tokens of a row in a step")
    parser.add_argument("--workers", type=int, default=0, help="as --constraint-workers")


def run(asked: argparse.Namespace, report: Report) -> None:
    known = words(asked)
    engine = engine_of(asked)
    limits = ConstraintLimits(workers=asked.workers, compile_seconds=2.0)
    client = Client(by_sequence=True)
    loop = engine.loop(
        client,
        limits={"forced": asked.speculate},
        masks=Masks(Guidance, engine.vocabulary, limits, trials=True),
        forced_costs=Costs(),
    )
    client.inbox.append(Vocabulary(*known))
    bench = Bench(loop, client, engine.vocabulary)
    for case in asked.cases:
        {"schemas": schemas, "arrivals": arrivals}[case](bench, asked, report)


def engine_of(asked: argparse.Namespace) -> Engine:
    """The engine of a server."""
    rows = max(asked.rows + 8, asked.streams + 32)
    if GPU:
        sizes = {"rows": rows, "positions": 8192, "prefill": 4096, "speculate": asked.speculate}
        shape = shape_of(asked.shape)
        let_segments_grow()
        made = Engine(random_model(shape, DEVICE), DEVICE, **sizes)
    else:
        # A processor is left to the workers.
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) - 1, 1))
        sizes = {"rows": rows, "positions": 2048, "prefill": 64, "speculate": asked.speculate}
        made = Engine(demo_model(), DEVICE, **sizes)
    gc.collect()
    gc.freeze()  # as the engine does
    return made


def words(asked: argparse.Namespace) -> tuple[list[bytes], list[int]]:
    """Bytes of the vocabulary's tokens, and which are special."""
    if GPU:
        backend = trained(shape_of(asked.shape)["vocab_size"])
    else:
        backend = Backend.from_file(str(resolve_model("demo", None) / "tokenizer.json"))
    known = Tokenizer(backend).token_bytes()
    assert known is not None
    return known


def trained(size: int) -> Backend:
    """A byte-level BPE of at most so many tokens, of Python sources."""
    made, alphabet = Backend(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        special_tokens=["<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    texts, most = [], 60_000_000 if size > 10_000 else 1_000_000
    for folder in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
        for path in sorted(Path(folder).rglob("*.py")):
            if most > 0:
                texts.append(path.read_text(errors="ignore")[:400_000])
                most -= len(texts[-1])
    made.train_from_iterator(texts, trainer)
    return made


def schema(number: int) -> JsonSchema:
    """One of its own, whose texts are long."""
    properties = {
        "name": {"type": "string", "maxLength": 30},
        f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 10**6 + number},
        "tags": {"type": "array", "items": {"enum": ["red", "green", f"blue {number}"]}},
        "nested": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    }
    item = {"type": "object", "properties": properties, "required": list(properties)}
    return JsonSchema(json.dumps({"type": "array", "items": item, "minItems": 500}))


def ask(bench: Bench, constraint: Constraint | None, new: int, prompt: int = 32) -> int:
    """A sampled request; its sequence."""
    number = bench.next_id
    sampling = SamplingParams(do_sample=True, temperature=1.0, seed=number)
    return bench.ask([5 + number % 200] * prompt, new, sampling, constraint=constraint)


def rate(
    bench: Bench, name: str, texts: list[Constraint | None], new: int, report: Report
) -> float:
    """Tokens per second from when all have begun until the first one ends; a row."""
    client = bench.client
    before = client.load.masks if client.load else MaskCounts()
    sequences = [ask(bench, constraint, new) for constraint in texts]
    bench.turn_until(lambda: client.ended.issuperset(sequences))
    assert not client.refused, client.refused[0]
    begun = max(client.times[s][0] for s in sequences)
    until = min(client.times[s][-1] for s in sequences)
    every = np.sort(np.concatenate([client.times[s] for s in sequences]))
    together = every[(every > begun) & (every <= until)]
    value = len(together) / max(until - begun, 1e-9)
    gaps = [b - a for s in sequences for a, b in pairwise(client.times[s])]
    assert client.load is not None
    now = client.load.masks
    needed = now.needed - before.needed
    report.row(
        "rows",
        kind=name,
        **{"tokens/s_while_all_run": value},
        all_begin_within_ms=1e3 * (begun - min(client.times[s][0] for s in sequences)),
        gap_p50_ms=1e3 * percentiles(gaps, 0.5)[0],
        gap_p99_ms=1e3 * percentiles(gaps, 0.99)[0],
        masks=needed,
        late_share=(now.late - before.late) / needed if needed else None,
        us_a_mask=(now.nanoseconds - before.nanoseconds) / needed / 1e3 if needed else None,
    )
    return value


def schemas(bench: Bench, asked: argparse.Namespace, report: Report) -> None:
    """Rows under schemas beside rows without."""
    n, new, cold = asked.rows, asked.new, 0
    rate(bench, "warm up", [None] * n, new // 4, report)
    rate(bench, "warm up", [schema(i) for i in range(n)], new // 4, report)

    def of(name: str, *, many: bool = True, fresh: bool = False) -> float:
        nonlocal cold
        cold += fresh
        texts: list[Constraint | None] = [schema(1000 * cold + i * many) for i in range(n)]
        return rate(bench, name, texts, new, report)

    kinds = {
        "plain": lambda: rate(bench, "plain", [None] * n, new, report),
        "cold": lambda: of("cold", fresh=True),
        "warm": lambda: of("warm"),
        "one": lambda: of("one", many=False),
    }
    rates = by_turns(kinds, asked.pairs, warm=0)
    for name in ("cold", "warm", "one"):
        report.row("pairs", kind=name, of_plain=pair_ratios(rates[name], rates["plain"]))


KINDS = ("calm", "plain", "schemas")
#: Positions of a stream that are left for its end.
_SPARE = 40


def arrivals(bench: Bench, asked: argparse.Namespace, report: Report) -> None:
    """Gaps of streams while requests come: from when they are sent until the last has ended."""
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    times, number, streams = bench.client.times, 10_000, list[int]()
    new = (8192 if GPU else 2048) - _SPARE

    def begin() -> None:
        bench.end(streams)
        streams[:] = [ask(bench, None, new) for _ in range(asked.streams)]
        bench.turn_until(lambda: all(len(times[s]) >= 8 for s in streams))

    def stretch(kind: str) -> list[float]:
        nonlocal number
        count = 0 if kind == "calm" else asked.arrivals
        made = [
            schema(number + i) if kind == "schemas" else None for i in range(count)
        ]  # before gaps count
        number += count
        first = streams[0]
        begun = len(times[first]) + 4
        bench.turn_until(lambda: len(times[first]) >= begun)
        # One token each: what is measured is their coming, and not a larger batch.
        arrived = {ask(bench, each, 1, prompt=4) for each in made}
        bench.turn_until(lambda: arrived <= bench.client.ended)
        if not arrived:
            bench.turn_until(lambda: len(times[first]) >= begun + asked.calm)
        assert first not in bench.client.ended, "the streams have ended: fewer --arrivals"
        return [1e3 * (b - a) for a, b in pairwise(times[first][begun - 1 :])]

    begin()
    for kind in KINDS:
        stretch(kind)
    for at in range(asked.rounds):
        begin()
        for kind in (*KINDS[at % len(KINDS) :], *KINDS[: at % len(KINDS)]):
            found[kind].append(stretch(kind))
    bench.end(streams)
    calm = percentiles(np.concatenate(found["calm"]), 0.99)[0]
    for kind, stretches in found.items():
        gaps = np.concatenate(stretches)
        p50, p90, p99 = percentiles(gaps, 0.5, 0.9, 0.99)
        cells = {"beside": kind, "gaps": len(gaps), "p50_ms": p50, "p90_ms": p90, "p99_ms": p99}
        report.row("streams while requests come", **cells, p99_of_calm=p99 / calm)
