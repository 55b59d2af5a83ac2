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
              there are any, and as a server decides: each row's tokens behind its first in a step,
              and how many steps that took
    arrivals  32 plain streams (--streams) while 200 requests (--arrivals) come, plain ones and then
              schemas, each of its own                              aim: p99 of their gaps + 10 %

A vocabulary of 128,256 tokens is trained at the start, in about a minute; `--save-vocabulary FILE`
keeps it, and `--vocabulary FILE` reads it. The cases take a minute on an H200.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from constrained_rows import Client, Library
from constraints import vocabulary
from turn_times import TurnTimes

from tokenpod.core.constraints import Choice, Constraint, ConstraintLimits, JsonSchema, Regex
from tokenpod.core.messages import EngineOptions, Vocabulary
from tokenpod.core.outputs import MaskCounts
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.assemble import Assembled, assemble
from tokenpod.engine.constraints import guidance_batch
from tokenpod.engine.constraints import masks as masks_of_texts
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.masked_steps import MaskedSteps
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.device_rounds import DeviceDrawing
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.executor import StepResult
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.mailbox import Flight, Mailbox, Posted, _Mark
from tokenpod.engine.memory import let_segments_grow
from tokenpod.engine.step_executor import StepExecutor
from tokenpod.models.facts import LoadedModel
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.step_times import Costs
from tokenpod.service.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
#: Every other token or so is the only one that is allowed.
STAMPS = r"(\d{{4}}-0[1-9]-[0-3]\dT00:00:00Z~q{}#\^;){{200}}"


class Bench:
    """An engine, its loop and its client.

    Args:
        made: for `positions` of a sequence and `prefill` tokens of prompts in a step.
        vocab: width of the logits.
        known: the tokens' bytes, and which are special.
        asked: options.
    """

    def __init__(
        self,
        made: Assembled,
        vocab: int,
        known: tuple[list[bytes], list[int]],
        asked: argparse.Namespace,
    ) -> None:
        self.asked = asked
        self.client = Client()
        positions, prefill = sizes(asked)
        masks = Masks(Library, vocab, ConstraintLimits(workers=asked.workers))
        self.loop = EngineLoop(
            self.client,
            Scheduler(
                Limits(made.slots, made.room.rows, positions, prefill, forced=asked.speculate),
                forced_costs=Costs(),
            ),
            made.executor,
            overlap=made.overlap,
            masked=MaskedSteps(masks, overlap=made.overlap),
        )
        self.client.inbox.append(Vocabulary(*known))
        self.next = 1

    def ask(self, constraint: Constraint | None, new: int, prompt: int = 32) -> int:
        """Queue a request; its sequence."""
        number, self.next = self.next, self.next + 1
        self.client.inbox.append(
            Request(
                [number],
                [5 + number % 200] * prompt,
                SamplingParams(do_sample=True, temperature=1.0, seed=number),
                StoppingParams(max_new_tokens=new),
                constraint=constraint,
            )
        )
        self.client.left.add(number)
        return number

    def run(self, wanted: set[int]) -> None:
        """Turn until these have ended."""
        with torch.inference_mode():
            while wanted & self.client.left:
                self.loop.turn()

    def end(self, sequences: list[int]) -> None:
        """Abort what is left of these."""
        assert self.loop.masked is not None
        self.loop.scheduler.abort(sequences)
        self.loop.masked.forget(sequences)
        self.client.left -= set(sequences)

    def gaps(self, sequences: list[int]) -> list[float]:
        """Milliseconds between tokens of these sequences."""
        times = [self.client.times[sequence] for sequence in sequences]
        return [(b - a) * 1e3 for each in times for a, b in pairwise(each)]


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


def rows(bench: Bench, name: str, constraints: list[Constraint | None], new: int) -> float:
    """Tokens a second of the rows but the slow one's; prints a line."""
    before = bench.client.load.masks if bench.client.load else MaskCounts()
    sequences = [bench.ask(constraint, new) for constraint in constraints]
    quick = [s for s, c in zip(sequences, constraints, strict=True) if not isinstance(c, Choice)]
    bench.run(set(quick))
    gaps = bench.gaps(quick)
    begin = max(bench.client.times[s][0] for s in quick)
    end = max(bench.client.times[s][-1] for s in quick)
    tokens = sum(t > begin for s in quick for t in bench.client.times[s])
    rate = tokens / (end - begin)
    told = ""
    assert bench.client.load is not None
    now = bench.client.load.masks
    if needed := now.needed - before.needed:
        took = (now.nanoseconds - before.nanoseconds) / needed / 1e3
        told = (
            f"  late {(now.late - before.late) / needed:6.2%} of {needed} masks, {took:.0f} us each"
        )
    median, p99 = statistics.median(gaps), float(np.percentile(gaps, 99))
    print(f"{name:9} {rate:9.0f} tok/s  gap {median:7.2f} ms  p99 {p99:7.2f} ms{told}", flush=True)
    bench.end(sequences)
    return rate


def forced(bench: Bench) -> None:
    """Texts with forced tokens, without jumping ahead and with it."""
    ahead = bench.loop.scheduler.forced
    most, costs, rates, steps = ahead.most, ahead._costs, [], []
    texts: list[Constraint | None] = [Regex(STAMPS.format(i)) for i in range(bench.asked.rows // 2)]
    for ahead.most, ahead._costs in ((0, None), (most, None), (most, costs)):
        rows(bench, "warm", texts, bench.asked.new // 4)
        before = bench.client.steps
        rates.append(rows(bench, "forced", texts, bench.asked.new))
        steps.append(bench.client.steps - before)
    for kind, rate, n in zip(("always", "where it pays"), rates[1:], steps[1:], strict=True):
        print(f"          {rate / rates[0]:.3f} jumping ahead {kind}; steps {steps[0]} and {n}")


def arrivals(bench: Bench) -> None:
    """Requests come while streams run: plain ones, whose prompts cost steps too, then schemas."""
    asked, times = bench.asked, bench.client.times
    # The streams outlive all four parts.
    streams = [bench.ask(None, sizes(asked)[0] - 40) for _ in range(asked.streams)]
    least = asked.new // 2
    found = {}
    with torch.inference_mode():
        while any(len(times[s]) < 8 for s in streams):
            bench.loop.turn()
        for at, kind in enumerate(("calm", "plain", "schemas", "timed")):
            for sequence in streams:
                times[sequence].clear()
            parts = timed(bench) if kind == "timed" else None
            first = 10_000 * at
            wanted = [schema(first + i) if at >= 2 else None for i in range(asked.arrivals)]
            # One token each: what is measured is their coming, and not a larger batch.
            new = {bench.ask(each, 1, prompt=4) for each in wanted if at}
            while new & bench.client.left or any(len(times[s]) < least for s in streams):
                bench.loop.turn()
                assert streams[0] in bench.client.left, "the streams have ended: fewer --arrivals"
            found[kind] = bench.gaps(streams)
            if parts is not None:
                parts.stop()
                print(parts.report(lambda turn: turn["(turn)"] > 5.3))
    bench.end(streams)
    p99s = {kind: float(np.percentile(gaps, 99)) for kind, gaps in found.items()}
    for kind, gaps in found.items():
        print(
            f"arrivals  {kind:8} {len(gaps) // len(streams)} gaps of {len(streams)} streams: "
            f"median {statistics.median(gaps):7.2f} ms, p99 {p99s[kind]:7.2f}, "
            f"longest {max(gaps):7.2f}"
        )
    for other in ("calm", "plain"):
        print(f"          p99 beside schemas {p99s['schemas'] / p99s[other] - 1:+.1%} of `{other}`")


def sizes(asked: argparse.Namespace) -> tuple[int, int]:
    """Positions of a sequence, and prompt tokens of a step."""
    return (2048, 64) if asked.cpu else (8192, 4096)


def demo(asked: argparse.Namespace) -> Bench:
    """The embedded model on a CPU."""
    from tokenizers import Tokenizer as Backend

    # A core is left to the workers.
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) - 1, 1))
    folder = ROOT / "models" / "demo"
    model = load_model(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
    )
    known = Tokenizer(Backend.from_file(str(folder / "tokenizer.json"))).token_bytes()
    assert known is not None
    return Bench(assembled(model, asked, torch.device("cpu")), 4096, known, asked)


def shape_8b(asked: argparse.Namespace) -> Bench:
    """An 8B shape of random weights on a GPU."""
    from gpu import config_of, family_of, random_model

    let_segments_grow()
    began = time.perf_counter()
    known = words(asked)
    device = torch.device("cuda")
    model = random_model(family_of(LLAMA_8B), config_of(LLAMA_8B), device)
    made = assembled(model, asked, device)
    gc.collect()
    gc.freeze()  # as the engine does
    print(f"ready after {time.perf_counter() - began:.0f} s; {made.slots:,} slots", flush=True)
    return Bench(made, LLAMA_8B["vocab_size"], known, asked)


def words(asked: argparse.Namespace) -> tuple[list[bytes], list[int]]:
    """Bytes of the tokens of a large vocabulary, and which are special; see `--vocabulary`."""
    if asked.vocabulary is not None:
        found = json.loads(asked.vocabulary.read_text())
        return [token.encode("latin-1") for token in found["tokens"]], found["special"]
    known = Tokenizer(vocabulary(LLAMA_8B["vocab_size"])).token_bytes()
    assert known is not None
    if asked.save_vocabulary is not None:
        # A character for each byte.
        tokens = [token.decode("latin-1") for token in known[0]]
        asked.save_vocabulary.write_text(json.dumps({"tokens": tokens, "special": known[1]}))
    return known


def assembled(model: LoadedModel, asked: argparse.Namespace, device: torch.device) -> Assembled:
    """The engine of a server."""
    positions, prefill = sizes(asked)
    options = EngineOptions(
        model_folder="",
        dtype=None,
        device=device.type,
        threads=0,
        max_batch_size=max(asked.rows + 8, asked.streams + 32),
        max_batch_prefill_tokens=prefill,
        speculate=asked.speculate,
    )
    with torch.inference_mode():
        return assemble(model, options, positions=positions, device=device)


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


def timed(bench: Bench) -> TurnTimes:
    """Times the parts of the loop's turns, until it is told to stop."""
    times = TurnTimes((EngineLoop, "turn"))
    times.part(type(bench.loop.scheduler), "plan")
    times.part(type(bench.loop.scheduler), "settle")
    times.part(type(bench.loop.scheduler), "load")
    times.part(StepExecutor, "launch")
    times.part(Flight, "wait", "results of the step")
    times.part(_Mark, "wait", "wait for the step")
    times.part(Flight, "sample", "launch the sampler")
    times.part(EngineLoop, "_publish", "publish")
    for name in ("look", "prepare", "settled", "sample"):
        times.part(MaskedSteps, name, f"masked.{name}")
    times.part(Masks, "masks", "masks, waiting for them")
    times.part(Masks, "took", "masks.took")
    times.part(Library, "advance", "library")
    times.part(masks_of_texts, "read_together")
    times.part(DeviceDrawing, "_bits", "masks to the device")
    times.part(DeviceSampler, "begin", "sampler.begin")
    times.part(DeviceSampler, "finish", "sampler.finish")
    times.part(Mailbox, "send", "results to the host")
    receive = Mailbox.receive

    def noted(mailbox: Mailbox, posted: Posted, *, urgent: bool = False) -> StepResult:
        result = receive(mailbox, posted, urgent=urgent)
        times.note("(device: forward)", result.forward_ns / 1e6)
        times.note("(device: then, with waiting)", result.sample_ns / 1e6)
        return result

    times.replace(Mailbox, "receive", noted)
    return times


def schemas(bench: Bench) -> float:
    """Rows under schemas beside rows without; tokens a second of the cold ones."""
    n, new = bench.asked.rows, bench.asked.new
    rows(bench, "warm up", [None] * n, new // 4)
    rows(bench, "warm up", [schema(i) for i in range(n)], new // 4)
    kinds: dict[str, list[Constraint | None]] = {
        "plain": [None] * n,
        "cold": [schema(1000 + i) for i in range(n)],
        "warm": [schema(1000 + i) for i in range(n)],
        "one": [schema(1000)] * n,
    }
    rates = {}
    for kind, constraints in kinds.items():
        rates[kind] = rows(bench, kind, constraints, new)
        print(f"          {rates[kind] / rates['plain']:.3f} of plain")
    for kind in ("plain", "cold"):
        times = timed(bench)
        again = [schema(2000 + i) if kind == "cold" else None for i in range(n)]
        rows(bench, f"{kind}, timed", again, new)
        times.stop()
        print(times.report(lambda turn: "wait for the step" in turn), flush=True)
    return rates["cold"]


def slow(bench: Bench, masked: float) -> None:
    """Rows under schemas beside one whose masks take 50 ms."""
    n = bench.asked.rows
    some: list[Constraint | None] = [schema(3000 + i) for i in range(n - 1)]
    mixed = rows(bench, "slow", [*some, Choice(("a" * 4000,))], bench.asked.new)
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
    parser.add_argument("--new", type=int, default=256, help="tokens of each row")
    parser.add_argument("--speculate", type=int, default=4, help="forced tokens of a row in a step")
    parser.add_argument("--workers", type=int, default=0, help="as --constraint-workers")
    parser.add_argument("--cases", default="threads,schemas,slow,forced,arrivals")
    parser.add_argument("--vocabulary", type=Path, help="read from here")
    parser.add_argument("--save-vocabulary", type=Path, help="kept here once it is made")
    asked = parser.parse_args()
    began = time.perf_counter()
    cases = asked.cases.split(",")
    if "threads" in cases and not asked.cpu:
        threads(words(asked), asked.rows)
    if {*cases} != {"threads"}:
        measure(demo(asked) if asked.cpu else shape_8b(asked), cases)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
